# SPDX-License-Identifier: Apache-2.0
"""tools/benchmark.py and what it is made of. Times are measured, never asserted."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from effvit_mm import LaViT
from effvit_mm.analysis.benchmark import (
    Settings,
    count,
    fitted_exponent,
    growth_exponents,
    make_step,
    peak_memory,
    time_interleaved,
)
from effvit_mm.analysis.benchmark_report import replace_block
from effvit_mm.analysis.cost import growth_exponent, lavit_score_macs
from effvit_mm.analysis.networks import build_network, families, parse_model
from effvit_mm.engine.launch import SetupError

ROOT = Path(__file__).resolve().parents[2]
SUITES = sorted((ROOT / 'configs' / 'benchmarks').glob('*.py'))
FIELDS = "'dims': (16, 16, 32, 32), 'depths': (1, 1, 2, 1), 'num_heads': (1, 2, 4, 4)"
OURS = f'ours:LaViT(arch={{{FIELDS}}}, diagonality_loss=None)'
PEER = 'timm:test_vit'
SUITE = f"""
models = {{'ours': {OURS!r}, 'peer': {PEER!r}}}
tables = dict(
    compared=dict(models=models, sizes=((64, 64),), batch_size=2, modes=('inference', 'training')),
    grown=dict(models=models, reference='ours', sizes=((32, 32), (64, 64)), batch_size=1),
    scores=dict(kind='scores', models={{'ours': {OURS!r}}}, sizes=((224, 224),)),
)
"""
PAGE = '# Page\n\n' + '\n'.join(
    f'Before {name}.\n\n<!-- results: {name} begin -->\nold\n<!-- results: {name} end -->\n'
    for name in ('compared', 'grown', 'scores')
)


def run_tool(*args, cwd):
    command = [sys.executable, ROOT / 'tools' / 'benchmark.py', *map(str, args)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """A folder where a small suite has been run: its page, results and output."""
    folder = tmp_path_factory.mktemp('suite')
    (folder / 'suite.py').write_text(SUITE)
    (folder / 'page.md').write_text(PAGE)
    arguments = ['--suite', 'suite.py', '--write', 'page.md', '--rounds', 3, '--minutes', 0.01]
    arguments += ['--threads', 1, '--device', 'cpu', '--no-memory']
    status, out, err = run_tool(*arguments, cwd=folder)
    assert status == 0, err
    return folder, out


def results(folder, table):
    return json.loads((folder / f'work_dirs/benchmarks/suite/{table}.json').read_text())


def test_each_table_leaves_json_markdown_and_plots(measured):
    folder, _ = measured
    files = {path.name for path in (folder / 'work_dirs/benchmarks/suite').iterdir()}
    assert files == {
        *('compared.json', 'compared.md', 'compared_inference.png', 'compared_training.png'),
        *('grown.json', 'grown.md', 'grown_inference.png', 'scores.json', 'scores.md'),
    }
    record = results(folder, 'compared')
    assert record['machine']['threads'] == 1 and record['machine']['torch'] == torch.__version__
    assert record['machine']['processor']


def test_ratios_and_quartiles_are_those_of_the_times(measured):
    for mode in ('inference', 'training'):
        (result,) = results(measured[0], 'compared')['results'][mode]
        assert result['reference'] == 'peer'
        base = result['models']['peer']['seconds']
        for row in result['models'].values():
            seconds = sorted(row['seconds'])
            assert len(seconds) == 3 and row['median'] == seconds[1]
            assert row['quartiles'] == pytest.approx([sum(seconds[:2]) / 2, sum(seconds[1:]) / 2])
            assert row['images_per_second'] == pytest.approx(2 / seconds[1])
            ratios = sorted(b / t for b, t in zip(base, row['seconds'], strict=True))
            assert row['speed'] == pytest.approx(ratios[1])
            assert ratios[0] <= row['speed_quartiles'][0] <= row['speed_quartiles'][1] <= ratios[2]
            assert row['peak_memory'] is None and row['counted_memory'] > 4 * row['params']
            assert (row['latency'] is None) == (mode == 'training')
        assert result['models']['peer']['speed_quartiles'] == [1, 1]


def test_a_page_gets_the_tables_with_command_and_machine_and_keeps_the_rest(measured):
    folder, out = measured
    page = (folder / 'page.md').read_text()
    assert page.startswith('# Page\n\nBefore compared.') and 'old' not in page
    for name in ('compared', 'grown', 'scores'):
        block = page.partition(f'{name} begin -->')[2].partition('<!--')[0].strip()
        assert block == (folder / f'work_dirs/benchmarks/suite/{name}.md').read_text().strip()
        assert block in out
        assert f'--minutes 0.01 --threads 1 --device cpu --no-memory --only {name}\n' in block
        assert (f'torch {torch.__version__}' in block) == (name != 'scores')
        lines = [line for line in block.splitlines() if line.startswith('|')]
        assert {line.count('|') for line in lines if 'model' in line} >= {lines[0].count('|')}
    assert 'speed against peer' in page and 'exponent in pixels' in page


def test_the_written_command_measures_the_table_again(measured):
    folder, _ = measured
    page = (folder / 'page.md').read_text()
    command = re.search(r'python tools/benchmark.py (.* --only scores)\n', page)[1]
    status, out, err = run_tool(*command.split(), '--write', 'page.md', cwd=folder)
    assert status == 0, err
    assert (folder / 'page.md').read_text() == page  # by formula: nothing differs


def test_growth_is_the_slope_through_all_sizes(measured):
    (grown,) = results(measured[0], 'grown')['results'].values()
    exponents = growth_exponents(grown)
    macs = [result['models']['ours']['macs'] for result in grown]
    by_contract = growth_exponent(lambda h, w: macs[h // 64], small=32, large=64)
    assert exponents['ours']['MACs'] == pytest.approx(by_contract)
    assert fitted_exponent([1, 10, 100], [2, 200, 20_000]) == pytest.approx(2)


def test_models_take_turns():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in 'abc'}
    timings = time_interleaved(steps, rounds=4, turn_seconds=0)
    assert order[6:] == list('abc') * 4  # after two calls of each that do not count
    assert all(len(timing.seconds) == 4 for timing in timings.values())


def test_rounds_follow_from_the_time_and_are_at_least_the_least():
    progress = []
    step = {'a': lambda: None, 'b': lambda: None}
    timings = time_interleaved(
        step, rounds=10, seconds=0, turn_seconds=0, progress=lambda *done: progress.append(done)
    )
    assert len(timings['a'].seconds) == len(timings['b'].seconds) == 3
    assert progress == [(i + 1, 6) for i in range(6)]


def test_short_calls_fill_a_turn():
    calls = []
    timing = time_interleaved({'a': lambda: calls.append(0)}, rounds=3, turn_seconds=1e-4)['a']
    assert timing.calls > 1 and len(calls) == 2 + 3 * timing.calls


def test_a_block_is_replaced_again_and_again_without_changing_the_rest():
    once = replace_block(PAGE, 'grown', 'new')
    assert replace_block(once, 'grown', 'new') == once
    assert once.replace('\n\nnew\n\n', '\nold\n') == PAGE
    with pytest.raises(ValueError, match="no place for 'other'"):
        replace_block(PAGE, 'other', 'new')


def test_names_are_taken_apart():
    name = parse_model("mmdet:SwinTransformer/tiny(window_size=7, act_cfg={'type': 'GELU'})")
    assert (name.source, name.kind, name.arch) == ('mmdet', 'SwinTransformer', 'tiny')
    assert name.kwargs == dict(window_size=7, act_cfg={'type': 'GELU'})
    assert parse_model('timm:vit_base_patch16_clip_224.openai').kind.endswith('.openai')
    assert parse_model('mmdet::swin/x.py').source == 'config'


@pytest.mark.parametrize('backbone', [False, True], ids=['classifier', 'backbone'])
def test_every_family_is_built_by_name(backbone):
    for family, kind in families().items():
        arch = next(iter(kind.arch_zoo))
        network = build_network(f'ours:{family}/{arch}', (64, 64), backbone).eval()
        with torch.no_grad():
            out = network(torch.zeros(1, 3, 64, 64))
        assert len(out) == 4 if backbone else out.shape == (1, 1000)


def test_constructor_arguments_arrive():
    network = build_network(f'{OURS[:-1]}, drop_path_rate=0.5)', (64, 64), backbone=True)
    rates = [m.drop_prob for m in network.modules() if hasattr(m, 'drop_prob')]
    assert max(rates) == 0.5 and network.backbone.arch_settings['dims'] == (16, 16, 32, 32)
    assert network.backbone.diagonality_loss is None


def test_models_of_one_size_are_built_for_the_size_rounded_up_to_32():
    network = build_network(PEER, (70, 99), backbone=True).eval()
    assert network.padded_size == (96, 128)
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 70, 99))[-1].shape[2:] == (6, 8)


@pytest.mark.parametrize(
    'name',
    [
        *('mmdet:SwinTransformer/tiny', 'mmdet:PyramidVisionTransformerV2/b0'),
        'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py',
        str(ROOT / 'configs' / 'mask_rcnn_partialformer_b0.py'),
    ],
    ids=['swin', 'pvt', 'a config of MMDetection', 'a config of ours'],
)
def test_backbones_of_frameworks_and_configs_run(name):
    pytest.importorskip('mmdet')
    network = build_network(name, (64, 64), backbone=True)
    assert network.train() is network and network.eval() is network
    with torch.no_grad():
        outputs = network(torch.zeros(1, 3, 64, 64))
    assert [out.shape[2] for out in outputs] == [16, 8, 4, 2]


def test_the_formula_and_the_counter_agree_for_classifiers():
    counts = count(OURS, Settings(size=(64, 64)))
    assert counts['analytical_macs'] == pytest.approx(counts['macs'], rel=0.02)
    assert count(PEER, Settings(size=(64, 64)))['analytical_macs'] is None


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_training_step_leaves_gradients_and_a_forward_none(dtype):
    network = build_network(OURS, (64, 64))
    make_step(network, Settings((64, 64), 2, dtype=dtype))()
    assert not network.training and all(p.grad is None for p in network.parameters())
    make_step(network, Settings((64, 64), 2, training=True, dtype=dtype))()
    assert network.training and any(p.grad is not None for p in network.parameters())


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_training_a_larger_batch_needs_more_memory():
    peaks = [peak_memory(OURS, Settings((256, 256), batch, training=True)) for batch in (1, 8)]
    assert peaks[1] > 2 * peaks[0] > 0


@pytest.mark.slow
def test_more_models_than_dynamo_keeps_are_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = Settings((64, 64), 2, compile='static')
    for mlp_ratio in range(1, 11):
        network = build_network(f'timm:test_vit(depth=1, mlp_ratio={mlp_ratio})', (64, 64))
        make_step(network, settings)()
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 10
    torch._dynamo.reset()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_a_gpu_is_measured_at_every_precision(dtype, tmp_path):
    arguments = (OURS, PEER, '--size', 64, '--batch-size', 4, '--rounds', 3, '--seconds', 1)
    status, out, err = run_tool(*arguments, '--dtype', dtype, '--mode', 'training', cwd=tmp_path)
    assert status == 0, err
    assert torch.cuda.get_device_name() in out


def test_theta_and_psi_cost_what_matrices_of_their_sizes_cost():
    for s, macs in enumerate(lavit_score_macs(LaViT('small'), 224, 224)):
        n, heads, dim = (56 >> s) ** 2, (1, 2, 5, 8)[s], (64, 128, 320, 512)[s]
        assert macs.theta == n * heads * 49 * 49
        assert macs.psi == (n * n * heads * 49 if s > 1 else 0)
        assert macs.plain == n * dim * dim + 49 * dim * dim + n * 49 * dim


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (['LaViT'], "'LaViT' names no model"),
        (['ours:Foo/b0'], "there is no family 'Foo'; there are DGSSASwin"),
        (['ours:LaViT/huge'], "LaViT has no architecture 'huge'; there are 'tiny'"),
        (['ours:LaViT/tiny(x=1)'], "unexpected keyword argument 'x'"),
        (['ours:LaViT/tiny(x=y)'], 'arguments are written as in Python'),
        (['timm:swin_tny_patch4_window7_224'], 'did you mean swin_tiny_patch4_window7_224'),
        (['none.py'], 'There is no config none.py.'),
        ([PEER, '--reference', 'x'], "The reference 'x' is none of the models"),
        ([PEER, '--size', '64', '16'], 'an image at least 32×32 pixels'),
        ([PEER, '--size', '64x96', '96x64'], 'sizes of different numbers of pixels'),
        ([], 'Name models, or a --suite'),
        (['--suite', 'none'], 'There is no suite none; there are detection_800x1333'),
        (['--suite', 'growth', '--only', 'x'], "has no table 'x'; there are partialformer_growth"),
        (['--suite', 'vs_peers_224', '--only', 'lavit_scores', '--write', 'no.md'], 'is no no.md'),
        (['--suite', 'wrong.py'], "unexpected keyword argument 'modles'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(args, sentence, tmp_path, monkeypatch, load_tool):
    (tmp_path / 'wrong.py').write_text("tables = dict(a=dict(modles={'a': 'timm:test_vit'}))")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=re.escape(sentence)) as error:
        load_tool('benchmark').main(args)
    assert '\n' not in str(error.value)


def test_the_tool_ends_with_the_sentence_and_status_1(tmp_path):
    status, _, err = run_tool('ours:Foo/b0', cwd=tmp_path)
    assert status == 1 and 'Traceback' not in err and 'error: ours:Foo/b0: ' in err


@pytest.mark.parametrize('path', SUITES, ids=[path.stem for path in SUITES])
def test_the_suites_tables_name_models_that_exist_and_have_a_place_in_the_docs(path, load_tool):
    page = (ROOT / 'docs' / 'benchmarks.md').read_text()
    for name, table in load_tool('benchmark').load_suite(str(path)).items():
        table.check()
        replace_block(page, name, '')
        for text in table.models.values():
            model = parse_model(text)
            if model.source == 'ours':
                assert model.arch in families()[model.kind].arch_zoo
        assert all(small < large for small, large in pairwise(table.sizes))


@pytest.mark.parametrize(
    'words',
    [
        '--out-dir out A B --rounds 3',
        '--out-dir=out A B --rounds 3',
        'A B --rounds 3 --out-dir out',
    ],
)
def test_the_command_of_a_table_keeps_its_models(words, load_tool):
    command = load_tool('benchmark').command_of(words.split(), None, 'benchmark')
    assert command == 'python tools/benchmark.py A B --rounds 3'


def test_the_command_of_a_table_of_several_suites_names_its_own(load_tool):
    words = [
        '--suite',
        'growth',
        'pairs_224',
        '--threads',
        '1',
        '--only',
        'b',
        'a',
        '--write',
        'page.md',
    ]
    command = load_tool('benchmark').command_of(words, 'growth', 'a')
    assert command == 'python tools/benchmark.py --suite growth --threads 1 --only a'


def test_tables_of_several_suites_have_names_of_their_own(load_tool):
    tool = load_tool('benchmark')
    load = tool.load_suites
    every = load([path.stem for path in SUITES], None)
    assert {suite for suite, _ in every.values()} == {path.stem for path in SUITES}
    assert [*load(['growth', 'pairs_224'], ['dgssa_swin_tiny_224', 'lavit_growth'])] == [
        'dgssa_swin_tiny_224',
        'lavit_growth',
    ]
    with pytest.raises(tool.SetupError, match='both have partialformer_growth'):
        load(['growth', 'growth'], None)


def test_classifiers_of_frameworks_end_with_their_last_stage():
    pytest.importorskip('mmpretrain')
    network = build_network('mmpretrain:EfficientNet/b0', (64, 64))
    assert network.fc.in_features == 1280


def test_stochastic_depth_of_peers_is_off_unless_it_is_asked_for():
    pytest.importorskip('mmdet')
    drops = []
    swin, pvt = 'mmdet:SwinTransformer/tiny', 'mmdet:PyramidVisionTransformerV2/b0'
    for name in (swin, pvt, f'{swin}(drop_path_rate=0.2)', f'{pvt}(drop_path_rate=0.2)'):
        modules = build_network(name, (64, 64), backbone=True).modules()
        drops.append(
            max(getattr(m, 'drop_prob', 0) for m in modules if type(m).__name__ == 'DropPath')
        )
    assert drops == [0, 0, pytest.approx(0.2), pytest.approx(0.2)]
