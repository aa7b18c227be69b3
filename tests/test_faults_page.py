# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md quotes what the code says, and the memory that large images need."""

import ast
import re
from pathlib import Path

import pytest

from effvit_mm import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer
from effvit_mm.analysis.cost import peak_memory
from effvit_mm.models.layers.utils import TORCH_2_4

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'faults.md').read_text()
SOURCES = [*ROOT.glob('effvit_mm/**/*.py'), *ROOT.glob('tools/*.py')]


def sentences():
    """What the tables' second column quotes."""
    rows = [line.split(' | ') for line in PAGE.splitlines() if line.count(' | ') == 2]
    quoted = [text for row in rows for text in re.findall(r'`([^`]+)`', row[1])]
    assert len(quoted) > 35
    return quoted


def template(node):
    """A string of the code with … for what is put into it, None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return ''.join(template(value) or '…' for value in node.values)
    return None


@pytest.fixture(scope='module')
def said():
    """All strings of the code."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    found = (template(node) for tree in trees for node in ast.walk(tree))
    return [text for text in found if text]


@pytest.mark.parametrize('sentence', sentences())
def test_the_page_quotes_what_the_code_says(sentence, said):
    sentence = sentence.removeprefix('Interrupted. ')  # which all tools say
    parts = [
        re.escape(part.strip()) for part in sentence.split('…') if len(part.strip(" .:;'")) > 1
    ]
    assert parts
    pattern = re.compile('.*'.join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in said), parts


BACKBONES = {
    'Integrated-DeiT-S': lambda: IntegratedDeiT('small'),
    'LaViT-S': lambda: LaViT('small', diagonality_loss=None),
    'DGSSA-Swin-T': lambda: DGSSASwin('tiny'),
    'PartialFormer-B0': lambda: PartialFormer('b0'),
}


@pytest.mark.parametrize('name', BACKBONES)
def test_an_image_of_4000_x_4000_needs_the_memory_that_the_page_states(name):
    row = next(line for line in PAGE.splitlines() if line.startswith(f'| {name} |'))
    inference, training = (float(cell) for cell in re.findall(r'\d+\.\d', row))
    model = BACKBONES[name]()
    for stated, is_training in ((inference, False), (training, True)):
        counted = peak_memory(model, 4000, 4000, training=is_training) / 2**30
        # PyTorch 2.1 needs up to 2.2 % more
        assert counted == pytest.approx(stated, rel=0.02 if TORCH_2_4 else 0.03)
