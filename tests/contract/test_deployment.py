# SPDX-License-Identifier: Apache-2.0
"""Contract: deployment. Compiled, exported, traced and converted models compute what eager does."""

import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from versions import needs_compile, needs_export

from effvit_mm.models.layers.utils import TORCH_2_4

from .families import awaken, image, random_loss

# batch, height, width; none of them is the size that is traced and exported
TRACED_SIZE = (2, 96, 128)
OTHER_SIZES = [(1, 224, 224), (3, 101, 157), (2, 37, 310), (1, 33, 33)]
VARIANTS = {
    'default': dict(),
    'outputs, freezing, drop path': dict(out_indices=(1, 3), frozen_stages=2, drop_path_rate=0.3),
}
variants = pytest.mark.parametrize('kwargs', VARIANTS.values(), ids=VARIANTS)
slow_variants = pytest.mark.parametrize(
    'kwargs',
    [
        pytest.param(kwargs, id=name, marks=[] if name == 'default' else pytest.mark.slow)
        for name, kwargs in VARIANTS.items()
    ],
)


def noise(batch: int, height: int, width: int) -> torch.Tensor:
    return image(height, width, batch=batch)


def assert_equals_eager(run, model, sizes, tolerance):
    for size in sizes:
        x = noise(*size)
        with torch.no_grad():
            expected, actual = model(x), run(x)
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= tolerance, size


@pytest.fixture(autouse=True)
def _fresh_compiler(request):
    if 'compile' in request.node.name:
        torch._dynamo.reset()


# torch.compile


@needs_compile
@slow_variants
def test_compiles_as_one_graph_for_all_image_sizes(family, kwargs):
    model = family.build(**kwargs)
    graphs = CompileCounterWithBackend('eager')
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    assert_equals_eager(compiled, model, [TRACED_SIZE, *OTHER_SIZES[1:3]], tolerance=1e-5)
    assert graphs.frame_count == 1


@needs_compile
@pytest.mark.slow
def test_compiles_at_most_twice_where_dynamic_sizes_are_found_out(family):
    model = family.build()
    graphs = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    sizes = [TRACED_SIZE, *OTHER_SIZES[1:3], (2, 160, 224)]
    assert_equals_eager(compiled, model, sizes, tolerance=1e-5)
    assert graphs.frame_count <= 2


@needs_compile
@pytest.mark.slow
def test_a_compiled_model_trains_as_eager_does(family):
    gradients = []
    for compiles in (False, True):
        model = family.build(frozen_stages=1, out_indices=(1, 3)).train()
        run = torch.compile(model, fullgraph=True, backend='aot_eager') if compiles else model
        random_loss(run(noise(*TRACED_SIZE))).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@needs_compile
@pytest.mark.slow
def test_drop_path_compiles_as_one_graph_in_training(family):
    model = family.build(drop_path_rate=0.5).train()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    random_loss(compiled(noise(*TRACED_SIZE))).backward()
    assert all(p.grad is not None for p in model.parameters())


@needs_compile
@pytest.mark.slow
def test_inductor_compiles_it(family):
    # one stage: generating code for all of them takes minutes and shows nothing new
    model = awaken(family.build(out_indices=(0,)), gain=0.5)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    assert_equals_eager(compiled, model, [TRACED_SIZE, OTHER_SIZES[1]], tolerance=1e-3)


@pytest.mark.skipif(TORCH_2_4, reason='older compilers are left out; newer ones make one graph')
def test_an_older_compiler_leaves_the_results_as_they_are(family):
    model = family.build()
    compiled = torch.compile(model, backend='eager')
    assert_equals_eager(compiled, model, [TRACED_SIZE, OTHER_SIZES[1]], tolerance=1e-5)


# torch.export and ONNX


def export(model):
    dim = torch.export.Dim
    shape = {0: dim('batch', min=1), 2: dim('height', min=33), 3: dim('width', min=33)}
    return torch.export.export(model, (noise(*TRACED_SIZE),), dynamic_shapes=(shape,))


@pytest.fixture(scope='session')
def exported(family):
    model = family.build()
    return model, export(model)


@needs_export
def test_one_export_serves_every_batch_and_image_size(exported):
    model, program = exported
    assert_equals_eager(program.module(), model, OTHER_SIZES, tolerance=1e-5)


@needs_export
@pytest.mark.slow
def test_export_serves_every_size_with_chosen_outputs_freezing_and_drop_path(family):
    model = family.build(**VARIANTS['outputs, freezing, drop path'])
    assert_equals_eager(export(model).module(), model, OTHER_SIZES, tolerance=1e-5)


def run_onnx(path):
    session = pytest.importorskip('onnxruntime').InferenceSession(
        str(path), providers=['CPUExecutionProvider']
    )
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(o) for o in session.run(None, {name: x.numpy()})]


@variants
def test_onnx_by_way_of_torchscript_equals_eager_at_other_sizes(family, kwargs, tmp_path):
    pytest.importorskip('onnx')
    model = family.build(**kwargs)
    options = dict(
        opset_version=17,
        input_names=['image'],
        output_names=[f'stride{s}' for s in model.out_strides],
        dynamic_axes=dict(image={0: 'batch', 2: 'height', 3: 'width'}),
    )
    if torch.__version__ >= '2.5':
        options['dynamo'] = False
    torch.onnx.export(model, (noise(*TRACED_SIZE),), str(tmp_path / 'model.onnx'), **options)
    assert_equals_eager(run_onnx(tmp_path / 'model.onnx'), model, OTHER_SIZES, tolerance=1e-4)


@needs_export
@pytest.mark.slow
def test_onnx_by_way_of_export_equals_eager_at_other_sizes(exported, tmp_path):
    pytest.importorskip('onnxscript')
    model, program = exported
    torch.onnx.export(program, (), str(tmp_path / 'model.onnx'), dynamo=True, verbose=False)
    assert_equals_eager(run_onnx(tmp_path / 'model.onnx'), model, OTHER_SIZES, tolerance=1e-4)


# TorchScript


@variants
def test_a_trace_serves_every_batch_and_image_size(family, kwargs):
    model = family.build(**kwargs)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, noise(*TRACED_SIZE), check_trace=False), file)
    file.seek(0)
    traced = torch.jit.load(file)
    assert_equals_eager(traced, model, [*OTHER_SIZES, (2, 32, 32)], tolerance=1e-5)
