# SPDX-License-Identifier: Apache-2.0
"""What the pages say can be followed: links lead somewhere, and Python in them is Python."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / 'README.md', *(ROOT / 'docs').glob('*.md'), *ROOT.glob('examples/**/*.md')])


@pytest.fixture(params=PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def page(request):
    return request.param


def test_relative_links_lead_to_files(page):
    text = re.sub(r'```.*?```', '', page.read_text(), flags=re.DOTALL)
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if '://' not in target and not target.startswith('#'):
            path, _, anchor = target.partition('#')
            assert (page.parent / path).exists(), f'{page.name} links to {target}'
            if anchor:
                headings = re.findall(r'^#+ (.*)$', (page.parent / path).read_text(), re.MULTILINE)
                names = [re.sub(r'[^\w -]', '', h).lower().replace(' ', '-') for h in headings]
                assert anchor in names, f'{page.name} links to {target}'


def test_python_in_the_pages_is_python(page):
    for block in re.findall(r'```python\n(.*?)```', page.read_text(), flags=re.DOTALL):
        ast.parse(block)


def test_paths_of_ours_in_commands_exist(page):
    names = re.findall(
        r'(?:python |^)((?:tools|configs)/[\w/]+\.(?:py|sh))', page.read_text(), re.M
    )
    for name in names:
        assert (ROOT / name).is_file(), f'{page.name} names {name}'


FIDELITY = ROOT / 'docs' / 'fidelity.md'
TEST = re.compile(r'`(tests/[\w/]+\.py)::(\w+)`')


def test_every_test_that_the_page_on_fidelity_names_exists():
    text = FIDELITY.read_text()
    for name, function in TEST.findall(text):
        tree = ast.parse((ROOT / name).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in found, f'{FIDELITY.name} names {name}::{function}'
    # and none is named in another way, which would not be looked up
    spans = [span for span in re.findall(r'`[^`\n]+`', text) if 'test_' in span]
    assert [span for span in spans if not TEST.fullmatch(span)] == []


def test_every_fact_on_the_page_on_fidelity_has_a_test():
    rows, checked = 0, False
    for line in FIDELITY.read_text().splitlines():
        cells = line[1:-1].split('|')
        if not line.startswith('|'):
            checked = False
        elif line.endswith('| checked by |'):
            checked = True
        elif checked and not line.startswith('|---'):
            assert len(cells) == 4 and TEST.search(cells[3]), line
            rows += 1
    assert rows > 50


def test_the_cost_of_an_architecture_is_computed_as_the_page_on_extending_says(capsys):
    text = (ROOT / 'docs' / 'extending.md').read_text()
    block = next(b for b in re.findall(r'```python\n(.*?)```', text, re.DOTALL) if 'macs' in b)
    exec(block, {})
    gmacs, exponent = map(float, capsys.readouterr().out.split())
    assert 41 < gmacs < 60 and 1 < exponent < 1.15


def test_measured_costs_of_every_family_grow_almost_linearly_with_pixels():
    page = (ROOT / 'docs' / 'benchmarks.md').read_text()
    for name in ('partialformer', 'lavit', 'integrated_deit', 'dgssa_swin'):
        table = page.split(f'results: {name}_growth begin')[1].split('results:')[0]
        rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()]
        rows = [row for row in rows if row and '(timm)' not in row[0]]
        found = {row[1].split()[0]: float(row[-1]) for row in rows if row[1].endswith(')')}
        assert found.keys() == {'MACs', 'time', 'memory'}, name
        assert max(found.values()) <= 1.15, name
