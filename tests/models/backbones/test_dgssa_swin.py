# SPDX-License-Identifier: Apache-2.0
from collections import defaultdict

import pytest
import timm
import torch
from torch import nn

from effvit_mm.analysis.cost import analytical_macs, counted_macs
from effvit_mm.models.backbones import DGSSASwin
from effvit_mm.models.layers import grid, windows
from effvit_mm.models.layers.grid import Tiling
from effvit_mm.models.layers.static_attention import MlpMixing, StaticWindowAttention

SMALL = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), static_layers=(1, 2, 3))


def build(awake=True, dtype=torch.float64, **fields):
    """A small backbone for inference with weights of a size that training would give them."""
    torch.manual_seed(0)
    model = DGSSASwin({**SMALL, **fields}).eval().to(dtype)
    for p in model.parameters() if awake else ():
        nn.init.normal_(p, std=p[0].numel() ** -0.5 if p.ndim in (2, 4) else 0.5)
    return model


def noise(*size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0)).double()


# timm's Swin


@pytest.mark.parametrize('load', ['state dict', 'checkpoint'])
@torch.no_grad()
def test_without_static_layers_it_is_timm_s_swin_with_its_weights(load, tmp_path):
    torch.manual_seed(0)
    original = timm.create_model('swin_tiny_patch4_window7_224', num_classes=0).eval()
    model = DGSSASwin(dict(base='tiny', static_layers=()), out_indices=(3,)).eval()
    if load == 'state dict':
        state = {
            k.replace('norm.', 'norm3.') if k.startswith('norm.') else k: v
            for k, v in original.state_dict().items()
        }
        result = model.load_state_dict(state, strict=False)
        assert not result.missing_keys
        assert not [k for k in result.unexpected_keys if not k.startswith('head')]
    else:
        torch.save(original.state_dict(), tmp_path / 'swin.pth')
        model.load_pretrained(str(tmp_path / 'swin.pth'))
    x = torch.randn(2, 3, 224, 224)
    expected = original.forward_features(x).permute(0, 3, 1, 2)
    torch.testing.assert_close(model(x)[0], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_windows_are_no_larger_than_the_maps_of_the_pretraining_images(tmp_path):
    torch.manual_seed(0)
    sizes = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4)
    original = timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=64, num_classes=0, **sizes
    ).eval()
    torch.save(original.state_dict(), tmp_path / 'swin.pth')
    model = build(awake=False, dtype=torch.float32, static_layers=(), window_size=4, image_size=64)
    model.load_pretrained(str(tmp_path / 'swin.pth'))
    x = noise(64, 64).float()
    expected = original.forward_features(x).permute(0, 3, 1, 2)
    torch.testing.assert_close(model(x)[3], expected, rtol=0, atol=1e-5)


# the definition


def slow_attention(attention, tokens, places, side):
    """One window of which only some places hold tokens ``(n, C)``."""
    n, dim = tokens.shape
    if isinstance(attention, MlpMixing):
        window = tokens.new_zeros(side**2, dim)
        window[places] = tokens
        hidden = nn.functional.gelu(attention.fc1(window.T))
        return attention.fc2(hidden).T[places]
    d = dim // attention.num_heads
    if isinstance(attention, StaticWindowAttention):
        v, weights = attention.v(tokens), attention.logits[:, places][:, :, places].softmax(dim=-1)
    else:
        q, k, v = attention.qkv(tokens).chunk(3, dim=1)
        y, x = places // side, places % side
        offset = (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1
        scores = [q[:, i : i + d] @ k[:, i : i + d].T / d**0.5 for i in range(0, dim, d)]
        bias = attention.relative_position_bias_table[offset].permute(2, 0, 1)
        weights = (torch.stack(scores) + bias).softmax(dim=-1)
    heads = [a @ v[:, i * d : (i + 1) * d] for i, a in enumerate(weights)]
    return attention.proj(torch.cat(heads, dim=1))


def slow_block(block, x, shifts, side):
    """A map ``(H, W, C)``: every group of cells that share a window, by itself."""
    groups = defaultdict(list)
    for row in range(x.shape[0]):
        for col in range(x.shape[1]):
            (tile_y, y), (tile_x, x_) = divmod(row - shifts[0], side), divmod(col - shifts[1], side)
            groups[tile_y, tile_x].append((row, col, y * side + x_))
    normed, out = block.norm1(x), torch.zeros_like(x)
    for cells in groups.values():
        rows, cols, places = torch.tensor(cells).T
        out[rows, cols] = slow_attention(block.attn, normed[rows, cols], places, side)
    x = x + out
    return x + block.mlp(block.norm2(x))


def padded(x, multiple):
    """Zeros below and right of a map ``(H, W, C)``."""
    below, right = -x.shape[0] % multiple, -x.shape[1] % multiple
    return nn.functional.pad(x, (0, 0, 0, right, 0, below))


def slow_swin(model, image, side):
    """Features of one image ``(3, H, W)``, of a model with windows of this side everywhere."""
    x, features = image, []
    for i, stage in enumerate(model.stages):
        embed = stage.patch_embed
        if i:
            x = padded(x, 2)
            parts = [x[row::2, col::2] for row, col in ((0, 0), (1, 0), (0, 1), (1, 1))]
            x = embed.reduction(embed.norm(torch.cat(parts, dim=2)))
        else:
            x = padded(x.permute(1, 2, 0), 4)
            x = x.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).permute(0, 2, 4, 1, 3)
            weight = embed.proj.weight.flatten(1)
            x = embed.norm(x.flatten(2) @ weight.T + embed.proj.bias)
        for j, block in enumerate(stage.blocks):
            shift = side // 2 * (j % 2)
            if isinstance(block.attn, MlpMixing):
                shifts = (shift * (i < 3),) * 2  # pretrained with one window in the last stage
            else:
                shifts = [shift * (length > side) for length in x.shape[:2]]
            x = slow_block(block, x, shifts, side)
        features.append(getattr(model, f'norm{i}')(x).permute(2, 0, 1))
    return features


@pytest.mark.parametrize(
    'fields',
    [
        dict(static_layers=()),
        dict(),
        dict(static_layers=(1, 3, 5, 6, 7)),
        dict(static_layers=(1, 3, 5, 6, 7), static_block='mlp'),
        dict(window_size=4, static_init='local'),
    ],
    ids=str,
)
@torch.no_grad()
def test_any_image_gives_what_the_definition_gives_group_by_group(fields):
    model, image = build(**fields), noise(100, 180, batch=1)
    expected = slow_swin(model, image[0], fields.get('window_size', 7))
    for a, b in zip(model(image), expected, strict=True):
        torch.testing.assert_close(a[0], b, rtol=0, atol=1e-10)


@torch.no_grad()
def test_with_the_attention_of_an_image_a_static_layer_reproduces_it():
    """A map of one window: the static layers' attention is taken from the dynamic model."""
    image = noise(28, 28, batch=1)
    dynamic, static = build(static_layers=()), build()
    state, block = dynamic.state_dict(), dynamic.stages[0].blocks[1]
    taken = []
    handle = block.attn.qkv.register_forward_hook(lambda _, args, out: taken.append(out))
    expected = dynamic(image)[0]
    handle.remove()
    q, k, _ = taken[0].view(49, 3, 1, 16).permute(1, 2, 0, 3)
    bias = block.attn.relative_position_bias_table[block.attn.relative_position_index]
    logits = q @ k.mT / 4 + bias.permute(2, 0, 1)
    name = 'stages.0.blocks.1.attn'
    state[f'{name}.logits'] = logits.softmax(dim=-1).log()
    state[f'{name}.v.weight'] = state[f'{name}.qkv.weight'].chunk(3)[2]
    state[f'{name}.v.bias'] = state[f'{name}.qkv.v_bias']
    static.load_state_dict(state, strict=False)
    torch.testing.assert_close(static(image)[0], expected, rtol=0, atol=1e-10)


# any size


@pytest.mark.parametrize('fields', [dict(), dict(static_block='mlp')], ids=str)
@pytest.mark.parametrize('size', [(33, 33), (100, 133)])
def test_static_layers_give_maps_of_any_size_and_gradients(size, fields):
    model = build(**fields).train()
    outputs = model(noise(*size))
    for o, s in zip(outputs, (4, 8, 16, 32), strict=True):
        assert o.shape[2:] == (-(-size[0] // s), -(-size[1] // s))
    sum(o.square().sum() for o in outputs).backward()
    for stage in model.stages:
        for block in stage.blocks:
            for name, p in block.attn.named_parameters():
                assert p.grad.abs().max() > 1e-6, name


@pytest.fixture(params=[False, True], ids=['eager', 'captured'])
def captured(request, monkeypatch):
    """Both ways of cutting: by views, and by the indices of graphs that serve all sizes."""
    for module in (grid, windows):
        monkeypatch.setattr(module, 'is_captured', lambda: request.param)


@pytest.mark.parametrize('size', [(33, 33), (37, 61), (100, 260), (130, 90)])
@torch.no_grad()
def test_what_windows_hold_beyond_the_map_is_not_seen(size, captured, monkeypatch):
    model, x, cut = build(), noise(*size), Tiling.cut
    expected = model(x)

    def poisoned(self, tokens):
        outside = ~self.inside().repeat(self.batch, 1)[..., None] & (self.tile == (7, 7))
        return cut(self, tokens).masked_fill(outside, 50.0)

    monkeypatch.setattr(Tiling, 'cut', poisoned)
    for a, b in zip(model(x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize('fields', [dict(), dict(static_block='mlp')], ids=str)
@torch.no_grad()
def test_what_is_not_a_number_in_one_image_stays_there(fields, captured):
    model, x = build(**fields), noise(50, 71)
    expected = model(x)
    x[0] = torch.nan
    for a, b in zip(model(x), expected, strict=True):
        torch.testing.assert_close(a[1], b[1])
        assert a[0].isnan().any()


# architectures


def test_the_first_layer_is_never_static():
    with pytest.raises(ValueError, match='static_layers'):
        DGSSASwin(dict(base='tiny', static_layers=(0, 1)))


@pytest.mark.parametrize('name,layers', [('tiny', 6), ('small', 12), ('base', 12)])
def test_layers_1_to_p_of_named_architectures_are_static_as_published(name, layers):
    with torch.device('meta'):
        model = DGSSASwin(name)
    static = [isinstance(b.attn, StaticWindowAttention) for s in model.stages for b in s.blocks]
    assert static == [0 < layer <= layers for layer in range(len(static))]


def test_another_block_than_the_two_is_an_error():
    with pytest.raises(ValueError, match="'attention' or 'mlp', not 'conv'"):
        build(static_block='conv')


def test_a_static_block_is_a_static_attention_or_an_mlp_over_the_tokens_of_a_window():
    for block, cls in (('attention', StaticWindowAttention), ('mlp', MlpMixing)):
        model = build(static_block=block, window_size=4)
        static = [isinstance(b.attn, cls) for stage in model.stages for b in stage.blocks]
        assert static == [layer in (1, 2, 3) for layer in range(8)]


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(static_layers=()),
        dict(static_layers=(1, 3, 5, 6, 7), static_block='mlp'),
        dict(window_size=4, image_size=64, mlp_ratio=3),
    ],
    ids=str,
)
@pytest.mark.parametrize('size', [(224, 224), (100, 180), (33, 61)])
def test_the_formula_for_the_cost_equals_the_counter(fields, size):
    model = build(awake=False, dtype=torch.float32, **fields)
    assert analytical_macs(model, *size) == counted_macs(model, *size)


@pytest.mark.parametrize('name,saved', [('tiny', 8.7), ('small', 8.7), ('base', 8.5)])
def test_static_layers_save_what_the_parts_add_up_to(name, saved):
    """Per cent of the blocks and mergings, which is all but the patch embedding."""
    with torch.device('meta'):
        macs = [
            analytical_macs(DGSSASwin(dict(base=name, **fields)), 224, 224)
            for fields in (dict(static_layers=()), dict())
        ]
    embedding = 56**2 * 48 * DGSSASwin.arch_zoo[name]['embed_dims']
    share = (macs[0] - macs[1]) / (macs[0] - embedding)
    assert 100 * share == pytest.approx(saved, abs=0.05)
