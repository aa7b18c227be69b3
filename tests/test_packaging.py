# SPDX-License-Identifier: Apache-2.0
"""What a user gets who installs the package: light imports, agreeing versions, complete wheels."""

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


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter that runs ``code``."""
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
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
def metadata(wheel: ZipFile) -> Message:
    """The wheel's METADATA."""
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    return Parser().parsestr(wheel.read(name).decode())


def test_import_needs_torch_timm_and_mmengine_only():
    # not OpenCV: mmengine's own hooks import it, and AuxiliaryLossHook is one of them
    heavy = {'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'matplotlib', 'pycocotools', 'sklearn'}
    modules = run_python('import sys, effvit_mm; print(*sys.modules)').split()
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


def test_a_source_archive_carries_everything_under_version_control(tmp_path):
    listing = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip('not a git checkout')
    names = {name for name in listing.stdout.decode().split('\0') if name}
    names = {name for name in names if (ROOT / name).is_file()}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = 'from setuptools import build_meta; print(build_meta.build_sdist("dist"))'
    done = subprocess.run(
        [sys.executable, '-c', build], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / 'dist').glob('*.tar.gz')
    with tarfile.open(path) as archive:
        carried = {name.partition('/')[2] for name in archive.getnames()}
    hidden = {name for name in names if name.startswith('.')}
    assert names - hidden <= carried


def test_wheel_carries_every_module(wheel):
    modules = (ROOT / 'effvit_mm').rglob('*.py')
    assert {str(m.relative_to(ROOT)) for m in modules if '.mim' not in m.parts} <= set(
        wheel.namelist()
    )


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
