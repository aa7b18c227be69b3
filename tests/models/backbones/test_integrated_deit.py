# SPDX-License-Identifier: Apache-2.0
"""Integrated-DeiT against timm's DeiT, against a slow reference, and against the paper's costs."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from versions import needs_export

from effvit_mm.analysis.cost import analytical_macs, counted_macs
from effvit_mm.compression.costs import PUBLISHED_PYRAMID, Costs, cost_ratio, scale_pyramid
from effvit_mm.models.backbones import IntegratedDeiT

ARCH = dict(
    embed_dims=24,
    depth=5,
    num_heads=2,
    image_size=64,
    static_layers=(1,),
    pyramid=((2, 15), (3, 13), (4, 11)),
)


def awake(model: nn.Module) -> nn.Module:
    """Weights and biases of which none hides an error by being zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.double().eval()


def attend(block: nn.Module, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The attention branch of one window's tokens ``(n, C)``, head by head and key by key."""
    attn, y = block.attn, block.norm1(x)
    heads, size = attn.num_heads, x.shape[1] // attn.num_heads
    out = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        if hasattr(attn, 'matrix'):
            v = (y @ attn.v.weight.T + attn.v.bias)[:, part]
            weights = attn.matrix[h]
            out.append(sum(weights[:, [j]] * v[[j]] for j in range(len(x)) if there[j]))
            continue
        w_q, w_k, w_v = attn.qkv.weight.chunk(3)
        q = (y @ w_q.T + attn.qkv.q_bias)[:, part]
        k = (y @ w_k.T)[:, part]
        v = (y @ w_v.T + attn.qkv.v_bias)[:, part]
        keys = [j for j in range(len(x)) if there[j]]
        out.append((q @ k[keys].T / size**0.5).softmax(dim=1) @ v[keys])
    return attn.proj(torch.cat(out, dim=1))


def reference(model: IntegratedDeiT, image: torch.Tensor) -> list[torch.Tensor]:
    """All windows of one image ``(3, H, W)``, each by itself; the tokens after every layer."""
    patch, grid = model.arch_settings['patch_size'], model.grid
    rows, columns = (-(-side // patch) for side in image.shape[1:])
    padded = torch.zeros(3, rows * patch, columns * patch, dtype=image.dtype)
    padded[:, : image.shape[1], : image.shape[2]] = image
    proj, result = model.patch_embed.proj, []
    for top in range(0, rows, grid):
        for left in range(0, columns, grid):
            tokens, there = [model.cls_token[0, 0] + model.pos_embed[0, 0]], [True]
            for i in range(grid * grid):
                y, x = top + i // grid, left + i % grid
                there.append(y < rows and x < columns)
                content = torch.zeros_like(tokens[0])
                if there[-1]:
                    cut = padded[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
                    content = proj.weight.flatten(1) @ cut.flatten() + proj.bias
                tokens.append(content + model.pos_embed[0, 1 + i])
            x, layers = torch.stack(tokens), []
            for layer, block in enumerate(model.blocks):
                if str(layer) in model.aggregations:
                    glad = model.aggregations[str(layer)]
                    x = torch.stack(
                        [t if here else 0 * t for t, here in zip(x, there, strict=True)]
                    )
                    x = F.gelu(glad.norm(glad.weight @ x)) + glad.pos_embed
                    there = [True] * len(x)
                x = x + attend(block, x, there)
                x = x + block.mlp(block.norm2(x))
                layers.append(x)
            result.append(layers)
    return result


@pytest.mark.parametrize('size', [(64, 64), (33, 50), (100, 130)], ids=str)
@torch.no_grad()
def test_the_class_token_is_the_mean_of_the_windows_each_computed_by_itself(size):
    model = awake(IntegratedDeiT(ARCH, out_type='cls_token'))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    for image, actual in zip(images, model(images)[0], strict=True):
        windows = reference(model, image)
        expected = torch.stack([model.norm(layers[-1][0]) for layers in windows]).mean(dim=0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize('size', [(64, 64), (33, 50), (100, 130)], ids=str)
@torch.no_grad()
def test_maps_are_the_tokens_of_the_windows_back_on_the_grid(size):
    model = awake(IntegratedDeiT({**ARCH, 'window_mixing': False}))
    image = torch.randn(3, *size, dtype=torch.float64)
    rows, columns = (-(-side // 16) for side in size)
    windows = reference(model, image)
    across = -(-columns // 4)
    actual = model(image[None])[2][0]  # stride 16: neither deconvolved nor pooled
    tap, back = model.taps[2], model.unprojections['2'].weight
    assert actual.shape[1:] == (rows, columns)
    for y in range(rows):
        for x in range(columns):
            window = windows[y // 4 * across + x // 4]
            token = back[y % 4 * 4 + x % 4] @ window[tap]
            torch.testing.assert_close(actual[:, y, x], model.norm2(token), rtol=0, atol=1e-10)


@torch.no_grad()
def test_without_compression_it_is_timm_s_deit_with_its_weights():
    torch.manual_seed(0)
    original = timm.create_model('deit_tiny_patch16_224', num_classes=0).eval()
    for p in original.parameters():
        p.add_(torch.randn_like(p), alpha=0.02)
    arch = dict(base='tiny', static_layers=(), pyramid=())
    model = IntegratedDeiT(arch, out_type='cls_token').eval()
    model.load_state_dict(original.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(model(x)[0], original(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_static_layer_with_an_image_s_own_attention_is_the_layer_it_replaces():
    dynamic = awake(IntegratedDeiT({**ARCH, 'static_layers': (), 'pyramid': ()}))
    static = awake(IntegratedDeiT({**ARCH, 'pyramid': ()}))
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    x, *_ = dynamic.embed(image)
    x = dynamic.blocks[0](x)
    block, twin = dynamic.blocks[1], static.blocks[1]
    for name in ('norm1', 'norm2', 'mlp'):
        getattr(twin, name).load_state_dict(getattr(block, name).state_dict())
    twin.attn.proj.load_state_dict(block.attn.proj.state_dict())
    qkv = block.attn.qkv
    w_q, w_k, w_v = qkv.weight.chunk(3)
    twin.attn.v.weight.copy_(w_v)
    twin.attn.v.bias.copy_(qkv.v_bias)
    y = block.norm1(x)
    q, k = (z.unflatten(2, (2, 12)).transpose(1, 2) for z in (y @ w_q.T + qkv.q_bias, y @ w_k.T))
    twin.attn.matrix.copy_((q @ k.transpose(2, 3) / 12**0.5).softmax(dim=3)[0])
    torch.testing.assert_close(twin(x), block(x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_window_s_maps_come_from_the_tokens_of_classification():
    pyramid = awake(IntegratedDeiT(ARCH))
    classifier = IntegratedDeiT(ARCH, out_type='cls_token').double().eval()
    state = pyramid.state_dict()
    own = classifier.state_dict()
    state['norm.weight'], state['norm.bias'] = state['norm3.weight'], state['norm3.bias']
    classifier.load_state_dict({key: state[key] for key in own})
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    tokens = []
    pyramid.blocks[-1].register_forward_hook(lambda _, args, result: tokens.append(result))
    _, aggregated = pyramid.forward_tokens(image)
    (cls_token,), same = classifier.forward_tokens(image)
    torch.testing.assert_close(classifier.norm(tokens[0][:, 0]), cls_token)
    for layer, y in aggregated.items():
        torch.testing.assert_close(same[layer], y)


def test_small_has_the_published_tokens_and_the_others_its_shape_at_their_cost():
    model = IntegratedDeiT('small', out_type='cls_token')
    assert model.tokens_of == [197] * 3 + [127] * 2 + [77] * 2 + [35] * 5
    for name, eta in dict(tiny=0.54, small=0.4575, base=0.457).items():
        arch = IntegratedDeiT.arch_zoo[name]
        costs = Costs(arch['depth'], 197, arch['embed_dims'])
        assert arch['pyramid'] == scale_pyramid(costs, 2, eta, PUBLISHED_PYRAMID)
        assert eta - 0.01 < cost_ratio(costs, arch['static_layers'], arch['pyramid']) <= eta


def test_maps_are_taken_before_each_glad_and_at_the_end_to_strides_4_to_32():
    model = IntegratedDeiT('small')
    assert model.taps == (2, 4, 6, 11)
    assert [model.tokens_of[tap] for tap in model.taps] == [197, 127, 77, 35]
    steps = [(m.factor, m.halvings) for m in model.to_stride.values()]
    assert steps == [(4, 0), (2, 0), (1, 0), (1, 1)]


@torch.no_grad()
def test_the_way_to_each_stride_is_deconvolution_nothing_or_pooling():
    model = awake(IntegratedDeiT(ARCH))
    x = torch.randn(1, 24, 5, 7, dtype=torch.float64)
    finest, finer, same, coarser = (m for m in model.to_stride.values())
    assert torch.equal(same(x, 5, 7), x)
    assert torch.equal(coarser(x, 3, 4), F.max_pool2d(x, 3, stride=2, padding=1))
    # cell by cell: a deconvolution with kernel 2 and stride 2 makes four of each
    for module, factor in ((finer, 2), (finest, 4)):
        deconv, y = module.deconv[0], x
        out = module(x, 5 * factor, 7 * factor)
        assert out.shape == (1, 24, 5 * factor, 7 * factor)
        y = torch.einsum('bchw,cdij->bdhiwj', y, deconv.weight).flatten(4).flatten(2, 3)
        y = y + deconv.bias.view(-1, 1, 1)
        if factor == 4:
            norm, _, deconv = module.deconv[1:]
            y = F.gelu(F.group_norm(y, 1, norm.weight, norm.bias, norm.eps))
            y = torch.einsum('bchw,cdij->bdhiwj', y, deconv.weight).flatten(4).flatten(2, 3)
            y = y + deconv.bias.view(-1, 1, 1)
        torch.testing.assert_close(out, y, rtol=0, atol=1e-10)


@torch.no_grad()
def test_windows_of_a_new_model_do_not_meet_and_afterwards_by_their_borders():
    torch.manual_seed(0)
    model = IntegratedDeiT(ARCH).double().eval()
    image = torch.randn(1, 3, 64, 128, dtype=torch.float64)
    other = image.clone()
    other[..., 64:] += 1
    a, b = (model(x)[2] for x in (image, other))
    torch.testing.assert_close(a[..., :4], b[..., :4], rtol=0, atol=1e-12)
    torch.nn.init.ones_(model.window_mixing['2'].proj.weight)
    a, b = (model(x)[2] for x in (image, other))
    torch.testing.assert_close(a[..., :3], b[..., :3], rtol=0, atol=1e-12)
    assert (a - b)[..., 3].abs().max() > 1e-3


@pytest.mark.parametrize('size', [(224, 224), (100, 300)], ids=str)
@pytest.mark.parametrize(
    'fields', [{}, dict(static_layers=(4,)), dict(static_block='mlp'), dict(pyramid=())], ids=str
)
def test_the_cost_of_a_classifier_is_what_the_formula_says(fields, size):
    model = IntegratedDeiT({**ARCH, **fields}, out_type='cls_token')
    assert analytical_macs(model, *size) == counted_macs(model, *size)


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        (dict(pyramid=((2, 17),)), 'tokens must fall from 17'),
        (dict(pyramid=((3, 9), (2, 5))), 'layers must rise'),
        (dict(static_layers=(5,)), 'static_layers'),
        (dict(patch_size=12), 'patch_size'),
        (dict(taps=(0, 1, 2)), 'taps'),
        (dict(static_block='conv'), 'static_block'),
        (dict(aggregation='mean'), 'aggregation'),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        IntegratedDeiT({**ARCH, **fields})


@needs_export
@torch.no_grad()
def test_a_classifier_s_export_and_trace_serve_one_window_and_many():
    torch.manual_seed(0)
    model = IntegratedDeiT(ARCH, out_type='cls_token').eval()
    dim = torch.export.Dim
    shape = {0: dim('batch', min=1), 2: dim('height', min=33), 3: dim('width', min=33)}
    x = torch.randn(2, 3, 96, 128)
    program = torch.export.export(model, (x,), dynamic_shapes=(shape,)).module()
    trace = torch.jit.trace(model, x, check_trace=False)
    for size in [(1, 64, 64), (3, 101, 157), (1, 33, 40), (2, 128, 128)]:
        x = torch.randn(size[0], 3, *size[1:])
        for run in (program, trace):
            torch.testing.assert_close(run(x)[0], model(x)[0], rtol=0, atol=1e-5)


def test_the_first_layer_is_never_static():
    with pytest.raises(ValueError, match=r'static_layers must lie in 1…11, not \(0, 1\)'):
        IntegratedDeiT(dict(base='tiny', static_layers=(0, 1)))


@pytest.mark.parametrize('aggregation', ['glad', 'concat', 'downsample'])
def test_unprojections_start_anew_in_any_precision(aggregation):
    arch = {**ARCH, 'aggregation': aggregation}
    model = IntegratedDeiT(arch).double()
    model.reset_unprojections()
    assert model.unprojections['3'].weight.dtype == torch.float64


def test_unprojections_of_a_file_stay_and_those_it_lacks_start_from_its_aggregations(tmp_path):
    trained = awake(IntegratedDeiT(ARCH)).float()
    path = str(tmp_path / 'all.pth')
    torch.save(trained.state_dict(), path)
    for _ in range(2):  # the second time the weights are those of the file already
        trained.load_pretrained(path)
        for name, value in torch.load(path, weights_only=True).items():
            assert torch.equal(trained.state_dict()[name], value), name
    some = {k: v for k, v in trained.state_dict().items() if not k.startswith('unprojections.1.')}
    torch.save(some, tmp_path / 'some.pth')
    model = IntegratedDeiT(ARCH)
    model.load_pretrained(str(tmp_path / 'some.pth'))
    assert torch.equal(model.unprojections['2'].weight, trained.unprojections['2'].weight)
    torch.testing.assert_close(model.unprojections['1'].weight, trained.unprojection_start(1))


def test_a_classifier_of_which_all_stages_are_frozen_trains_nothing():
    arch = {**ARCH, 'taps': (0, 1, 2, 3)}
    assert arch['depth'] > 4
    model = IntegratedDeiT(arch, out_type='cls_token', frozen_stages=4)
    assert not [name for name, p in model.named_parameters() if p.requires_grad]
