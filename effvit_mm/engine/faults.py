# SPDX-License-Identifier: Apache-2.0
"""What a user reads when something is wrong: one sentence that says what to do, not a traceback.

docs/faults.md lists them. What is none of these is an error of the program, and keeps its
traceback.
"""

import contextlib
import errno
import os
import os.path as osp
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from mmengine.runner import CheckpointLoader

from ..models.checkpoint import CheckpointError, find_weights, read_checkpoint


class SetupError(Exception):
    """Something to be set right before a run can start; the tools print it without a traceback."""


def run_or_explain(main: Callable[[], None], interrupted: str = '') -> None:
    """Call ``main``; what a user can set right ends the process with a sentence.

    While it runs, checkpoints are read without running code from them, by mmengine as well.

    Args:
        main: The tool.
        interrupted: What to do after Ctrl-C.
    """
    try:
        with safe_checkpoints():
            main()
    except KeyboardInterrupt:
        print(f'\nInterrupted. {interrupted}'.rstrip(), file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        sys.exit(f'error: {sentence}')


@contextlib.contextmanager
def safe_checkpoints() -> Iterator[None]:
    """Within this, mmengine reads files and URLs as :func:`read_checkpoint` does. Its own loader
    would run the code in a file that it cannot read otherwise."""
    before = dict(CheckpointLoader._schemes)
    CheckpointLoader.register_scheme(('', 'http://', 'https://'), load_from_file, force=True)
    try:
        yield
    finally:
        CheckpointLoader._schemes = before


def load_from_file(filename: str, map_location: Any = None) -> dict[str, Any]:
    """A loader for mmengine, whose weights are under ``state_dict`` wherever the file has them."""
    content = read_checkpoint(filename, map_location)
    if isinstance(content, dict) and 'state_dict' in content:
        return content
    return dict(state_dict=find_weights(content, filename))


#: what Pillow, OpenCV (which returns None) and the steps after them do with a damaged image
UNREADABLE = (OSError, SyntaxError, AttributeError, TypeError, AssertionError)
#: what there is to do where a file cannot be written
_ADVICE = {
    errno.ENOSPC: 'The disk is full: make room',
    errno.EDQUOT: 'Your quota of disk space is used up: make room',
    errno.EFBIG: 'The file is larger than the limit on file sizes (ulimit -f): raise it',
    errno.EACCES: 'There is no permission to: choose another place, or change the permissions',
    errno.EPERM: 'There is no permission to: choose another place, or change the permissions',
    errno.EROFS: 'The disk is read-only: choose another place',
}
_OWN = osp.join(osp.dirname(osp.dirname(osp.abspath(__file__))), '')


def explain(error: BaseException) -> str | None:
    """What a user reads instead of a traceback; None: the error is not the user's to set right."""
    text = ' '.join(str(error).split())
    if isinstance(error, (SetupError, CheckpointError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _ADVICE:
        what = f' ({error.filename})' if error.filename else ''
        return f'{_ADVICE[error.errno]}{what}. A training goes on with --resume.'
    if (
        isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
        or "can't allocate memory" in text
    ):
        return (
            'There is not enough memory: take smaller images or batches, or train with '
            f'model.backbone.with_cp=True (docs/faq.md, "How large?"). PyTorch says: {text[:200]}'
        )
    images = re.findall(r'failed to load image: (\S+)', text)
    if images:  # of a worker the text is a traceback, whose last line is the message
        return f'{images[-1]} is not a readable image: replace it, or take it out of the data.'
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = frames[-1] if frames else ''
    unknown = re.search(r'(\w+) is not in the (\S+) registry', text)
    if isinstance(error, KeyError) and unknown:
        return (
            f'{unknown[1]} is not in the {unknown[2]} registry: is it spelt as its class is, and '
            'does custom_imports of the config name the module that registers it?'
        )
    # of the call by the registry, not of one in the code that was called
    called = innermost.endswith(osp.join('registry', 'build_functions.py'))
    if isinstance(error, TypeError) and called and 'argument' in text:
        return (
            f'The config does not fit: {text}. Is it spelt right? Of another type than in the '
            '_base_ it needs _delete_=True.'
        )
    if isinstance(error, ValueError) and innermost.startswith(_OWN):
        return text
    return None


def check_writable(folder: str) -> None:
    """Make a folder where there is none, and write something.

    Raises:
        SetupError: One of the two cannot be done.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b'.')
            file.flush()
    except OSError as error:
        raise SetupError(
            f'Nothing can be written to the folder {folder}: {error.strerror or error}. Choose '
            'another one.'
        ) from error


def check_device(name: str) -> None:
    """Refuse a device that is not there.

    Raises:
        SetupError: Names it.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split('. ')[0]
        raise SetupError(f'--device {name} cannot be used: {reason}. --device cpu can.') from error
