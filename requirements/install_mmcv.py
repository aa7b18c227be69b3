# SPDX-License-Identifier: Apache-2.0
"""Install mmcv with its compiled operators; compile them only once per machine.

    python requirements/install_mmcv.py requirements/onedl.txt

takes the pinned version of mmcv from the file and installs it into the environment of this Python,
which must already hold the packages of the build file beside it (requirements/onedl-build.txt).
The wheel stays in $XDG_CACHE_HOME/effvit_mm/wheels (~/.cache by default), under the versions of
mmcv, torch, Python and CUDA that it was compiled for: other environments of the same kind get it
from there within seconds, and a new torch gets a wheel of its own.

Environment: FORCE_CUDA=1 compiles for CUDA on a machine without a visible GPU, TORCH_CUDA_ARCH_LIST
says for which GPUs; MAX_JOBS limits the parallel compilers.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

HEARTBEAT = 60  # seconds
MEMORY_PER_JOB = 2.5e9  # bytes; the largest files take 2.3 GB to compile


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(f'[mmcv] {text}', flush=True)


def minutes(start: float) -> str:
    """Time since ``start``, such as ``3:05 min``."""
    seconds = round(time.monotonic() - start)
    return f'{seconds // 60}:{seconds % 60:02d} min'


def pinned_mmcv(requirements: Path) -> tuple[str, str]:
    """Distribution and version of the mmcv that a requirements file pins."""
    match = re.search(r'^((?:onedl-)?mmcv)==([\w.]+)', requirements.read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f'error: {requirements} pins no mmcv.')
    return match[1], match[2]


def target() -> str:
    """What operators will be compiled for: ``cpu``, or the version of CUDA and the GPUs."""
    import torch

    if not torch.cuda.is_available() and os.environ.get('FORCE_CUDA') != '1':
        return 'cpu'
    if torch.version.hip:
        return f'hip{torch.version.hip}'
    if torch.version.cuda is None:
        sys.exit('error: FORCE_CUDA=1 is set, but the installed torch is one without CUDA.')
    gpus = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    archs = os.environ.get('TORCH_CUDA_ARCH_LIST')
    archs = archs or ' '.join(f'{major}.{minor}' for major, minor in sorted(gpus)) or 'all'
    return f'cu{torch.version.cuda}-{archs}'


def wheel_folder(version: str, device: str) -> Path:
    """Where the wheel for this mmcv, torch, Python and device is kept."""
    import torch

    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    python = f'cp{sys.version_info.major}{sys.version_info.minor}'
    name = f'{version}-torch{torch.__version__}-{python}-{device}'
    return cache / 'effvit_mm' / 'wheels' / re.sub(r'[^\w.+-]+', '_', name)


def find_wheel(folder: Path) -> Path | None:
    """The finished wheel in a folder, if it is there."""
    return next(iter(sorted(folder.glob(f'*{platform.machine()}.whl'))), None)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a second process waits here instead of compiling the same."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say('another process is compiling this wheel; waiting for it …')
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_compiler(device: str) -> None:
    """Exit with one sentence where compiling cannot work."""
    compiler = os.environ.get('CXX', 'c++').split()[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f'error: compiling mmcv needs a C++ compiler, and there is no {compiler} '
            '(Debian, Ubuntu: apt-get install g++).'
        )
    if not Path(sysconfig.get_path('include'), 'Python.h').is_file():
        sys.exit(
            'error: compiling mmcv needs the headers of Python '
            f'{platform.python_version()} (Debian, Ubuntu: apt-get install python3-dev).'
        )
    if device.startswith('cu'):
        check_nvcc()


def check_nvcc() -> None:
    """Exit with one sentence if there is no nvcc, or one of another major version than torch's."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    wanted, found = torch.version.cuda, 'none'
    nvcc = Path(CUDA_HOME or '', 'bin', 'nvcc')
    if nvcc.is_file():
        version = subprocess.check_output([str(nvcc), '--version'], text=True)
        release = re.search(r'release ([\d.]+)', version)
        found = release[1] if release else 'an unknown one'
    if found.split('.')[0] != wanted.split('.')[0]:
        sys.exit(
            f'error: operators for CUDA need nvcc {wanted}, and there is {found}: set CUDA_HOME to '
            'a CUDA toolkit of that version, or install a prebuilt mmcv (README, "On a GPU"), or '
            'compile for the CPU only with CUDA_VISIBLE_DEVICES=-1.'
        )


def parallel_jobs() -> int:
    """All cores, as far as there is memory for that many compilers."""
    import psutil

    if 'MAX_JOBS' in os.environ:
        return int(os.environ['MAX_JOBS'])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return max(1, min(cores or 1, int(psutil.virtual_memory().available / MEMORY_PER_JOB)))


def progress(scratch: Path) -> str:
    """How many of the files that ninja was told to compile are done."""
    for ninja in scratch.rglob('build.ninja'):
        total = ninja.read_text().count('\nbuild ')
        done = sum(1 for _ in ninja.parent.rglob('*.o'))
        return f', {done} of {total} files'
    return ''


def compile_wheel(requirement: str, folder: Path, device: str) -> Path:
    """Compile the wheel in a scratch folder and move it into ``folder`` when it is complete."""
    jobs = parallel_jobs()
    say(f'compiling the operators of {requirement} for {device} with {jobs} parallel jobs.')
    say('This happens once per machine; it takes about 12 minutes on two cores, less with more')
    say(f'(and longer for CUDA). The wheel is kept in {folder}')
    start = time.monotonic()
    log = folder / 'build.log'
    with tempfile.TemporaryDirectory(prefix='effvit_mm-mmcv-') as scratch, open(log, 'w') as out:
        # not from pip's own cache, which does not tell one torch from another
        command = [sys.executable, '-m', 'pip', 'wheel', requirement, '--wheel-dir', scratch]
        command += ['--no-deps', '--no-build-isolation', '--no-cache-dir', '--verbose']
        env = dict(os.environ, MMCV_WITH_OPS='1', MAX_JOBS=str(jobs), TMPDIR=scratch)
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                process.wait(HEARTBEAT)
            except subprocess.TimeoutExpired:
                say(f'{minutes(start)}{progress(Path(scratch))}')
        wheel = find_wheel(Path(scratch))
        if process.returncode != 0 or wheel is None:
            tail = log.read_text(errors='replace').splitlines()[-30:]
            print(*tail, sep='\n', file=sys.stderr)
            sys.exit(f'error: {requirement} did not compile; the whole output is in {log}')
        if not any(name.startswith('mmcv/_ext.') for name in ZipFile(wheel).namelist()):
            sys.exit(f'error: the wheel of {requirement} has no operators; see {log}')
        partial = folder / f'{wheel.name}.partial'
        shutil.copyfile(wheel, partial)
        partial.replace(folder / wheel.name)
    say(f'compiled in {minutes(start)}')
    return folder / wheel.name


def main() -> None:
    """Find or compile the wheel, and install it."""
    if len(sys.argv) != 2:
        sys.exit(f'usage: {sys.argv[0]} REQUIREMENTS_FILE')
    name, version = pinned_mmcv(Path(sys.argv[1]))
    try:
        device = target()
    except ModuleNotFoundError as error:
        sys.exit(f'error: install torch first ({error}).')
    folder = wheel_folder(version, device)
    wheel = find_wheel(folder)
    if wheel is None:
        check_compiler(device)
        with only_one(folder):
            wheel = find_wheel(folder) or compile_wheel(f'{name}=={version}', folder, device)
    else:
        say(f'already compiled for this torch: {wheel}')
    pip = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--force-reinstall', str(wheel)]
    sys.exit(subprocess.call(pip))


if __name__ == '__main__':
    main()
