# SPDX-License-Identifier: Apache-2.0
"""What a user gets who installs the package: light imports, agreeing versions, complete wheels."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import effvit_mm

ROOT = Path(__file__).resolve().parents[1]
STACKS = ('onedl', 'openmmlab')
SOURCES = (
    *('setup.py', 'pyproject.toml', 'MANIFEST.in', 'Makefile', 'LICENSE', 'model-index.yml'),
    *('README.md', 'CHANGELOG.md'),
    *('effvit_mm', 'configs', 'tools', 'docs', 'examples', 'requirements', 'tests'),
)


def run_python(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Standard output of a fresh interpreter with these arguments, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(name: str) -> list[Requirement]:
    """Requirements in ``requirements/{name}.txt``, without comments and options."""
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    lines = [re.sub(r'(^|\s)#.*', '', line).strip() for line in lines]
    return [Requirement(line) for line in lines if line and not line.startswith('-')]


def pins(name: str) -> dict[str, list[str]]:
    """Versions (one per Python) that ``requirements/{name}.txt`` pins each package to."""
    versions: dict[str, list[str]] = {}
    for requirement in requirements(name):
        (specifier,) = requirement.specifier
        assert specifier.operator == '==', f'{name}.txt: {requirement} is not pinned'
        versions.setdefault(canonicalize_name(requirement.name), []).append(specifier.version)
    return versions


@pytest.fixture(scope='module')
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked; built from a copy so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp('checkout')
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns('__pycache__', '.mim')
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy)
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    run_python('-c', build, cwd=copy)
    (path,) = (copy / 'dist').glob('effvit_mm-*.tar.gz')
    with tarfile.open(path) as archive:
        archive.extractall(copy / 'unpacked')
    return copy / 'unpacked' / path.name.removesuffix('.tar.gz')


@pytest.fixture(scope='module')
def wheel(sdist: Path) -> ZipFile:
    """The wheel, built from the source distribution."""
    build = ('--no-deps', '--no-build-isolation', '--no-cache-dir', '--no-index', '--quiet')
    run_python('-m', 'pip', 'wheel', '.', '--wheel-dir', 'dist', *build, cwd=sdist)
    (path,) = (sdist / 'dist').glob('effvit_mm-*-py3-none-any.whl')
    return ZipFile(path)


@pytest.fixture
def installed(wheel: ZipFile, tmp_path: Path) -> Path:
    """A folder with the installed wheel; the package is the one in it where this is asked first."""
    target = tmp_path / 'site'
    options = ('--no-deps', '--no-index', '--no-compile', '--quiet', '--target', target)
    run_python('-m', 'pip', 'install', *options, wheel.filename)
    return target


@pytest.fixture(scope='module')
def metadata(wheel: ZipFile) -> Message:
    """The wheel's METADATA."""
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    return Parser().parsestr(wheel.read(name).decode())


def test_import_needs_torch_timm_and_mmengine_only():
    # not OpenCV: mmengine's own hooks import it, and AuxiliaryLossHook is one of them
    heavy = {'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'matplotlib', 'pycocotools', 'sklearn'}
    modules = run_python('-c', 'import sys, effvit_mm; print(*sys.modules)').split()
    assert not heavy & {module.split('.')[0] for module in modules}


def test_version_agrees_everywhere(metadata):
    assert metadata['Version'] == effvit_mm.__version__
    assert f'## {effvit_mm.__version__}' in (ROOT / 'CHANGELOG.md').read_text()


def test_neither_family_of_packages_is_required(metadata):
    required = [Requirement(text) for text in metadata.get_all('Requires-Dist')]
    assert {r.name for r in required if r.marker is None} == {'torch', 'timm', 'safetensors'}


@pytest.mark.parametrize('stack', STACKS)
def test_pins_lie_in_the_ranges_of_setup_py(metadata, stack):
    pinned = pins(stack) | pins('tests')
    for text in metadata.get_all('Requires-Dist'):
        requirement = Requirement(text)
        extras = (stack, 'tests')
        if requirement.marker and not any(
            requirement.marker.evaluate({'extra': e}) for e in extras
        ):
            continue
        for version in pinned[canonicalize_name(requirement.name)]:
            assert version in requirement.specifier, f'{requirement} against {version}'


@pytest.mark.parametrize('stack', STACKS)
def test_operators_are_compiled_for_the_torch_that_is_used(stack):
    build, use = pins(f'{stack}-build'), pins(stack)
    assert all(build[name] == use[name] for name in ('torch', 'torchvision'))


def test_wheel_carries_what_mim_looks_for(wheel):
    names = set(wheel.namelist())
    for folder in ('configs', 'tools'):
        for path in (ROOT / folder).rglob('*'):
            if path.suffix in ('.py', '.sh'):
                assert f'effvit_mm/.mim/{path.relative_to(ROOT)}' in names
    assert 'effvit_mm/.mim/model-index.yml' in names
    assert not [name for name in names if '__pycache__' in name or name.startswith('tests/')]


def test_wheel_carries_every_module(wheel):
    modules = (ROOT / 'effvit_mm').rglob('*.py')
    assert {str(m.relative_to(ROOT)) for m in modules if '.mim' not in m.parts} <= set(
        wheel.namelist()
    )


def test_source_distribution_carries_every_file_of_the_checkout(sdist):
    listing = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip('not a git checkout')
    names = [name for name in listing.stdout.splitlines() if not name.startswith('.')]
    assert not [n for n in names if (ROOT / n).is_file() and not (sdist / n).is_file()]


def test_what_the_wheel_installs_trains_tests_and_serves_timm(installed, tmp_path):
    """All of it comes from the wheel: package, tools and config, called from another folder."""
    pytest.importorskip('mmpretrain')
    environment = dict(PYTHONPATH=str(installed), CUDA_VISIBLE_DEVICES='-1')
    cwd, mim = tmp_path / 'elsewhere', installed / 'effvit_mm' / '.mim'
    cwd.mkdir()
    name = 'classifier_partialformer_b0_digits'
    find = f'import effvit_mm; print(effvit_mm.config_path({name!r}))'
    config = Path(run_python('-c', find, cwd=cwd, **environment).strip())
    assert config == (mim / 'configs' / f'{name}.py').resolve()

    def tool(script: str, *arguments: str | Path) -> str:
        return run_python(mim / 'tools' / script, *arguments, cwd=cwd, **environment)

    counts = ('--num-train', '1', '--num-val', '1')
    counts += ('--num-classification-train', '20', '--num-classification-val', '10')
    tool('prepare_digits.py', *counts)
    options = ('train_cfg.max_epochs=1', 'train_dataloader.batch_size=10')
    tool('train.py', config, '--cfg-options', *options)
    (weights,) = (cwd / 'work_dirs' / name).glob('epoch_1-*.pth')
    assert 'accuracy/top1' in tool('test.py', config, weights)
    load = 'import sys, timm, effvit_mm.timm_models\n'
    for kind in ('num_classes=10', 'features_only=True'):
        load += f"timm.create_model('partialformer_b0', {kind}, checkpoint_path=sys.argv[1])\n"
    run_python('-c', load, weights, cwd=cwd, **environment)


def test_model_index_names_existing_configs_and_no_weights():
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    collections = {collection['Name'] for collection in index['Collections']}
    for model in index['Models']:
        assert model['In Collection'] in collections
        assert (ROOT / model['Config']).is_file(), model['Config']
        assert Path(model['Config']).stem == model['Name']
        assert 'Weights' not in model
        if 'Results' in model:
            assert model['Metadata']['Published in Paper']


def test_no_file_names_a_machine_or_a_registry():
    listing = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip('not a git checkout')
    # in pieces, so that this file does not contain them
    words = ('/wo' + 'rk/', '/ro' + 'ot/', '/ho' + 'me/', 'pypi' + '.org', 'python' + 'hosted')
    for name in filter(None, listing.stdout.decode().split('\0')):
        text = (ROOT / name).read_text(errors='replace') if (ROOT / name).is_file() else ''
        assert not [word for word in words if word in text], name
