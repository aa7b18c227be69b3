# SPDX-License-Identifier: Apache-2.0
"""What is LaViT's own; what it shares with the other families is in tests/contract."""

import copy
import itertools
import math
from importlib import import_module
from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from versions import needs_compile, needs_export

from effvit_mm import AuxiliaryLossHook, LaViT
from effvit_mm.analysis.cost import counted_macs, lavit_score_macs
from effvit_mm.engine.launch import import_framework
from effvit_mm.models.layers.less_attention import LessAttention, VanillaAttention

# fewer channels and layers; every kind of layer and stage is there
SMALL = dict(
    dims=(8, 8, 16, 16), depths=(2, 1, 3, 2), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2)
)
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]


def small(awake=True, diagonality_loss=None, out_indices=(0, 1, 2, 3), **fields):
    """A small backbone; awake, with weights of trained size and nothing left at zero."""
    torch.manual_seed(0)
    model = LaViT(
        {**SMALL, **fields}, diagonality_loss=diagonality_loss, out_indices=out_indices
    ).eval()
    if awake:
        for name, p in model.named_parameters():
            if p.ndim > 1 and not any(key in name for key in LaViT.no_decay_keys):
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
            else:
                p.data.add_(0.1 * torch.randn(p.shape))
    return model


def layers_of(model):
    return [block.attn for stage in model.stages for block in stage.blocks]


def scores_of(model, image):
    """What each layer of each stage hands on, ``[stage][layer]``."""
    seen = []
    hooks = [
        attn.register_forward_hook(lambda module, args, out: seen.append(out[1]))
        for attn in layers_of(model)
    ]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    iterator = iter(seen)
    return [[next(iterator) for _ in stage.blocks] for stage in model.stages]


# budgets

PUBLISHED = {'tiny': (10.9, 1.6), 'small': (22.4, 3.3), 'base': (39.6, 6.1)}


def macs(model, side):
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(1, 3, side, side))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize('arch', PUBLISHED)
def test_named_architectures_meet_the_published_budget(arch):
    model = LaViT(arch, out_indices=(3,)).eval()
    head = model.out_channels[0] * 1000
    params = sum(p.numel() for p in model.parameters()) + head + 1000
    assert params / 1e6 == pytest.approx(PUBLISHED[arch][0], rel=0.03)
    assert (macs(model, 224) + head) / 1e9 == pytest.approx(PUBLISHED[arch][1], rel=0.05)


@pytest.mark.parametrize(('arch', 'peer'), [('small', 'pvt_v2_b2'), ('base', 'pvt_v2_b3')])
def test_small_and_base_are_as_deep_as_pvt(arch, peer):
    with torch.device('meta'):
        stages = timm.create_model(peer).stages
    assert LaViT.arch_zoo[arch]['depths'] == tuple(len(stage.blocks) for stage in stages)


def test_with_pvt_s_two_layers_in_each_stage_tiny_would_be_too_small_and_small_s_widths_too_large():
    with torch.device('meta'):
        tiny, small = (
            LaViT(dict(base=arch, depths=(2, 2, 2, 2)), out_indices=(3,))
            for arch in ('tiny', 'small')
        )
    params = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (tiny, small)]
    params = [p + (m.out_channels[0] + 1) / 1e3 for p, m in zip(params, (tiny, small), strict=True)]
    assert params == pytest.approx([9.99, 13.03], abs=0.01)


def test_psi_pays_in_the_last_two_stages_only():
    """Multiples of the queries, keys and products that the maps replace."""
    model = LaViT(dict(base='small', query_grids=(56, 28, 14, 7)))
    costs = lavit_score_macs(model, 224, 224)
    assert [c.theta / c.plain for c in costs[:2]] == pytest.approx([0.33, 0.20], abs=0.005)
    assert [c.psi / c.plain for c in costs[:2]] == pytest.approx([21.1, 3.2], abs=0.05)
    both = [(c.theta + c.psi) / c.plain for c in costs[2:]]
    assert both == pytest.approx([0.42, 0.07], abs=0.005)


class Whole(nn.Module):
    """A detector or segmentor as a function of images."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, mode='tensor')


@pytest.mark.parametrize(
    ('config', 'size', 'gmacs'),
    [
        ('upernet_lavit_small', (512, 2048), 908),  # published: 920
        pytest.param('semantic_fpn_lavit_small', (512, 2048), 152, marks=pytest.mark.slow),
        pytest.param('semantic_fpn_lavit_small', (512, 512), 38, marks=pytest.mark.slow),
        pytest.param('retinanet_lavit_tiny', (800, 1280), 183, marks=pytest.mark.slow),
        pytest.param('retinanet_lavit_small', (800, 1280), 216, marks=pytest.mark.slow),
    ],
)
def test_whole_models_cost_what_the_page_on_fidelity_compares(config, size, gmacs):
    scope = 'mmdet' if config.startswith('retinanet') else 'mmseg'
    pytest.importorskip(scope)
    import_framework(scope)
    cfg = Config.fromfile(Path(__file__).parents[3] / 'configs' / f'{config}.py')
    with DefaultScope.overwrite_default_scope(scope):
        model = import_module(f'{scope}.registry').MODELS.build(cfg.model)
    assert round(counted_macs(Whole(model), *size) / 1e9) == gmacs


def test_macs_grow_linearly_with_pixels():
    model = LaViT('tiny').eval()
    exponent = math.log(macs(model, 896) / macs(model, 224)) / math.log(16)
    assert exponent <= 1.15


def test_a_less_attention_layer_is_cheaper_than_a_vanilla_one_in_every_stage():
    model = LaViT('small').eval()
    vanilla = LaViT(dict(base='small', vanilla_layers=(3, 4, 6, 3))).eval()
    for i in range(4):
        cut = dict(out_indices=(i,))
        less, full = (macs(LaViT(m.arch_settings, **cut).eval(), 224) for m in (model, vanilla))
        assert less < full
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in vanilla.parameters())


# which layers


def test_the_first_layer_of_each_stage_computes_attention_and_the_others_derive_it():
    for i, stage in enumerate(LaViT('small').stages):
        kinds = [type(block.attn) for block in stage.blocks]
        assert kinds == [VanillaAttention] + [LessAttention] * (len(kinds) - 1)
        psi = {block.attn.transform.psi_delta is not None for block in list(stage.blocks)[1:]}
        assert psi == {i >= 2}


def test_vanilla_layers_choose_another_reading():
    model = small(vanilla_layers=(2, 1, 2, 1))
    kinds = [[isinstance(b.attn, LessAttention) for b in s.blocks] for s in model.stages]
    assert kinds == [[False, False], [False], [False, False, True], [False, True]]


def test_only_less_attention_layers_have_no_queries_and_keys():
    for layer in layers_of(small()):
        names = {name for name, _ in layer.named_children()}
        assert (
            {'q', 'k'} <= names if isinstance(layer, VanillaAttention) else names.isdisjoint('qk')
        )


@pytest.mark.parametrize('layers', [(0, 1, 1, 1), (1, 2, 1, 1)], ids=str)
def test_a_stage_needs_a_vanilla_layer_and_has_no_more_than_layers(layers):
    with pytest.raises(ValueError, match='vanilla_layers: stage'):
        small(vanilla_layers=layers)


# identities


@pytest.mark.parametrize('size', [(64, 64), (224, 224), (100, 333)], ids=str)
def test_in_a_new_model_layers_of_a_stage_share_the_scores_of_its_first(size):
    for stage in scores_of(small(awake=False), torch.randn(2, 3, *size)):
        assert all(torch.equal(scores, stage[0]) for scores in stage)


def test_scores_stay_those_before_the_softmax():
    """Handed on as they are: they do not sum to 1, and reach beyond [0, 1]."""
    for stage in scores_of(small(), torch.randn(1, 3, 96, 96)):
        for scores in stage:
            assert scores.min() < 0
            assert (scores.sum(3) - 1).abs().max() > 0.1


@torch.no_grad()
def test_a_stage_starts_with_a_convolution_a_norm_and_one_position_encoding():
    model, x = small().double(), torch.randn(2, 3, 96, 160, dtype=torch.float64)
    for i, stage in enumerate(model.stages):
        stride, heads = 2 if i else 4, SMALL['num_heads'][i - 1]
        scores = torch.zeros(2, x[0, 0].numel(), heads, 49, dtype=torch.float64)
        tokens, _, grid = stage.enter(x, scores, (96, 160))
        conv, position = stage.patch_embed.proj, stage.pos_embed.proj
        x = F.conv2d(x, conv.weight, conv.bias, stride, padding=stride - 1)
        assert (grid.height, grid.width) == x.shape[2:] == (96 // (4 << i), 160 // (4 << i))
        x = stage.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + F.conv2d(x, position.weight, position.bias, padding=1, groups=x.shape[1])
        torch.testing.assert_close(tokens, x.flatten(2).transpose(1, 2), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_stage_s_first_scores_are_its_own_plus_the_downsampled_last_ones_of_the_stage_before():
    model, inputs = small().double(), []
    for stage in model.stages:
        stage.blocks[0].attn.register_forward_pre_hook(lambda module, args: inputs.append(args))
    scores = scores_of(model, torch.randn(2, 3, 96, 160, dtype=torch.float64))
    for i in (1, 2, 3):
        attn, (tokens, _, grid) = model.stages[i].blocks[0].attn, inputs[i]
        own = attn.scores(tokens, attn.k(attn.reduction(tokens, grid)))
        height, width = 96 // (2 << i), 160 // (2 << i)
        residual = model.stages[i].attn_downsample(scores[i - 1][-1], height, width)
        assert residual.abs().max() > 0.01
        torch.testing.assert_close(scores[i][0], own + residual, rtol=1e-10, atol=1e-10)


def test_the_attention_residual_reaches_the_next_stage_s_first_layer():
    model, x = small(), torch.randn(1, 3, 96, 96)
    before = scores_of(model, x)
    layer = model.stages[1].attn_downsample
    with torch.no_grad():
        layer.head_mix += 1
    after = scores_of(model, x)
    assert torch.equal(before[0][1], after[0][1])
    assert (before[1][0] - after[1][0]).abs().max() > 0.1


@torch.no_grad()
def test_a_zero_attention_residual_is_none():
    """As in every new model."""
    model, x = small(), torch.randn(2, 3, 70, 100)
    without = small(attention_residual=False)
    weights = {k: v for k, v in model.state_dict().items() if 'attn_downsample' not in k}
    without.load_state_dict(weights)
    for stage in list(model.stages)[1:]:
        nn.init.zeros_(stage.attn_downsample.head_mix)
    for a, b in zip(model(x), without(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ('fields', 'absent'),
    [
        (dict(vanilla_layers=(2, 1, 3, 2)), 'transform'),
        (dict(attention_residual=False), 'attn_downsample'),
        (dict(query_grids=(None,) * 4), 'psi'),
    ],
    ids=str,
)
def test_an_ablation_leaves_no_parameters_behind(fields, absent):
    model = small(**fields)
    assert not [n for n in model.state_dict() if absent in n]
    sum(o.square().mean() for o in model(torch.randn(1, 3, 64, 64))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


# sizes and samples


@pytest.mark.parametrize('size', [(32, 32), (33, 61), (100, 133), (224, 224), (32, 480)], ids=str)
@torch.no_grad()
def test_any_size_gives_maps_of_its_strides(size):
    outputs = small()(torch.randn(2, 3, *size))
    for output, stride in zip(outputs, (4, 8, 16, 32), strict=True):
        assert output.shape[2:] == (-(-size[0] // stride), -(-size[1] // stride))
        assert output.isfinite().all()


@pytest.mark.parametrize('size', [(75, 110), (224, 224)], ids=str)
@torch.no_grad()
def test_samples_do_not_depend_on_each_other(size):
    model, x = small().double(), torch.randn(3, 3, *size).double()
    together = model(x)
    for i in range(3):
        for a, b in zip(model(x[i : i + 1]), together, strict=True):
            torch.testing.assert_close(a, b[i : i + 1], rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_only_tiles_bound_psi_s_reach():
    """Ψ mixes queries of its tile alone: scores elsewhere are what they would be without it."""
    model, x = small(), torch.randn(1, 3, 448, 448)
    layer = model.stages[2].blocks[1].attn
    before = scores_of(model, x)[2][1].view(28, 28, 2, 49)
    first = scores_of(model, x)[2][0].view(28, 28, 2, 49)
    theta = torch.eye(49) + layer.transform.theta_delta
    psi = torch.eye(196) + layer.transform.psi_delta
    tile = first[14:, :14].reshape(196, 2, 49)
    expected = torch.einsum('pq,qhk,lk->phl', psi, tile, theta).view(14, 14, 2, 49)
    torch.testing.assert_close(before[14:, :14], expected, rtol=1e-3, atol=1e-4)


# training


@pytest.mark.parametrize('out_indices', SUBSETS, ids=str)
def test_every_parameter_gets_a_gradient(out_indices):
    model = small(out_indices=out_indices).double().train()
    outputs = model(torch.randn(2, 3, 64, 96).double())
    sum((o * torch.randn_like(o)).mean() for o in outputs).backward()
    size = {n: 0.0 if p.grad is None else float(p.grad.abs().max())
            for n, p in model.named_parameters()}  # fmt: skip
    assert [n for n, s in size.items() if s <= 1e-10 * max(size.values())] == []


def test_checkpointing_changes_neither_outputs_nor_gradients():
    results = []
    for with_cp in (False, True):
        model = small(diagonality_loss=dict(loss_weight=1.0)).double().train()
        model.with_cp = with_cp
        AuxiliaryLossHook().attach(nn.Sequential(model))
        outputs = model(torch.randn(2, 3, 70, 61, generator=torch.Generator().manual_seed(0),
                                    dtype=torch.float64))  # fmt: skip
        loss = model.take_losses()['loss_diagonality']
        (loss + sum(o.square().mean() for o in outputs)).backward()
        results.append([loss, *outputs, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize('on', ['scores', 'probs'])
def test_the_loss_is_the_mean_of_that_of_the_less_attention_layers(on):
    model = small(diagonality_loss=dict(on=on, loss_weight=1.0)).double().train()
    x = torch.randn(2, 3, 224, 224).double()
    scores = [s for stage in scores_of(model, x) for s in stage]
    expected = []
    for layer, a in zip(layers_of(model), scores, strict=True):
        if isinstance(layer, LessAttention):
            a = a.softmax(3) if on == 'probs' else a
            side = math.isqrt(a.shape[1])
            cells = a.view(2, 7, side // 7, 7, side // 7, -1, 49).mean((2, 4))
            expected.append(model.diagonality_loss(cells.flatten(1, 2).transpose(1, 2)))
    AuxiliaryLossHook().attach(nn.Sequential(model))
    model(x)
    loss = model.take_losses()['loss_diagonality']
    torch.testing.assert_close(loss, sum(expected) / 4, rtol=1e-6, atol=0)


def test_a_copy_after_a_training_step_computes_the_same():
    model = small(diagonality_loss=dict()).train()
    AuxiliaryLossHook().attach(nn.Sequential(model))
    x = torch.randn(1, 3, 48, 64)
    sum(o.sum() for o in model(x)).backward()
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for a, b in zip(twin(x), model.eval()(x), strict=True):
            assert torch.equal(a, b)


# deployment: shallow models, for what takes long is the sizes' algebra and not the layers

SHALLOW = dict(depths=(1, 1, 2, 2))
TRACED, OTHERS = (2, 96, 128), [(1, 224, 224), (3, 101, 157), (2, 37, 310)]


def assert_equals_eager(run, model, sizes, tolerance):
    for batch, *size in sizes:
        x = torch.randn(batch, 3, *size)
        with torch.no_grad():
            for a, b in zip(run(x), model(x), strict=True):
                assert a.shape == b.shape
                assert (a - b).abs().max() <= tolerance


@needs_compile
def test_compiles_as_one_graph_for_all_image_sizes():
    torch._dynamo.reset()
    model, graphs = small(**SHALLOW), CompileCounterWithBackend('eager')
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    assert_equals_eager(compiled, model, [TRACED, *OTHERS[1:]], 1e-5)
    assert graphs.frame_count == 1


@needs_export
def test_one_export_serves_every_batch_and_image_size():
    model, dim = small(**SHALLOW), torch.export.Dim
    shape = {0: dim('batch', min=1), 2: dim('height', min=33), 3: dim('width', min=33)}
    program = torch.export.export(model, (torch.randn(2, 3, 96, 128),), dynamic_shapes=(shape,))
    assert_equals_eager(program.module(), model, [*OTHERS, (1, 33, 33)], 1e-5)


def test_onnx_serves_every_batch_and_image_size(tmp_path):
    pytest.importorskip('onnx')
    runtime = pytest.importorskip('onnxruntime')
    model, path = small(), tmp_path / 'model.onnx'
    options = dict(dynamo=False) if torch.__version__ >= '2.5' else {}
    torch.onnx.export(
        model,
        (torch.randn(2, 3, 96, 128),),
        str(path),
        opset_version=17,
        input_names=['image'],
        output_names=['c2', 'c3', 'c4', 'c5'],
        dynamic_axes=dict(image={0: 'batch', 2: 'height', 3: 'width'}),
        **options,
    )
    session = runtime.InferenceSession(str(path), providers=['CPUExecutionProvider'])

    def run(x):
        return [torch.from_numpy(o) for o in session.run(None, {'image': x.numpy()})]

    assert_equals_eager(run, model, [*OTHERS, (1, 33, 33)], 1e-4)


def test_a_trace_serves_every_batch_and_image_size():
    model = small()
    traced = torch.jit.trace(model, torch.randn(2, 3, 96, 128), check_trace=False)
    assert_equals_eager(traced, model, [*OTHERS, (2, 32, 32)], 1e-5)
