# SPDX-License-Identifier: Apache-2.0
"""Bring model-index.yml and docs/model_zoo.md up to date.

model-index.yml gets an entry for every config, with the parameters and multiply-accumulates of its
backbone (of the whole classifier for a classifier), by formula; what the papers publish is kept as
it stands there. docs/model_zoo.md is written from it. --check changes nothing and fails where one
of them is out of date.
"""

import argparse
import os.path as osp
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

import torch
import yaml
from mmengine.config import Config
from mmengine.registry import MODELS

import effvit_mm  # noqa: F401 (registers the backbones)
from effvit_mm.analysis.cost import analytical_macs
from effvit_mm.engine.faults import SetupError, run_or_explain

ROOT = Path(__file__).resolve().parents[1]
COLLECTIONS = dict(
    partialformer='PartialFormer',
    lavit='LaViT',
    integrated_deit='Integrated-DeiT',
    dgssa_swin='DGSSA-Swin',
)
# head of a config's name -> title, data set, and the size of its images (height, width)
HEADS = dict(
    classifier=('Classification', 'ImageNet-1k', (224, 224)),
    mask_rcnn=('Mask R-CNN 1×', 'COCO', (800, 1333)),
    retinanet=('RetinaNet 1×', 'COCO', (800, 1333)),
    semantic_fpn=('Semantic FPN', 'ADE20K', (512, 512)),
    upernet=('UPerNet', 'ADE20K', (512, 512)),
)
SIZES = ('b0', 'b1', 'b2', 'b3', 'b4', 'tiny', 'small', 'base')
ZOO_HEAD = """# Model zoo

<!-- written by `python tools/model_zoo.py`; do not edit -->

No weights of these models have been published, by the papers or by us. The column *paper* repeats
what the papers state. Parameters and multiply-accumulates (MACs) are those of this implementation,
by formula: of the classifier at 224×224, of the backbone at the other sizes. Speeds and memory
beside the peers are in [benchmarks.md](benchmarks.md); how sizes were derived is in
[fidelity.md](fidelity.md).
For each task and family there is also a config on the embedded digits, `*_digits.py`.
"""


class Inline(list):
    """A list that is written on one line."""


yaml.SafeDumper.add_representer(
    Inline,
    lambda dumper, data: dumper.represent_sequence('tag:yaml.org,2002:seq', data, flow_style=True),
)


def names() -> list[tuple[str, str, str]]:
    """Family, head and size of every config that is in the index, in its order."""
    return [
        (family, head, size)
        for family in COLLECTIONS
        for head in HEADS
        for size in SIZES
        if (ROOT / 'configs' / f'{head}_{family}_{size}.py').is_file()
    ]


def cost(config: Path, size: tuple[int, int]) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a config's backbone, with a classifier's head."""
    cfg = Config.fromfile(config)
    with torch.device('meta'):
        backbone = MODELS.build({**cfg.model.backbone, 'init_cfg': None})
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    macs = analytical_macs(backbone, *size)
    if cfg.default_scope == 'mmpretrain':
        head = backbone.out_channels[-1] * cfg.model.head.num_classes
        parameters += head + cfg.model.head.num_classes
        macs += head
    return parameters, macs


def entry(family: str, head: str, size: str, old: dict[str, Any]) -> dict[str, Any]:
    """The entry of one config; the published figures are those of the old one."""
    name = f'{head}_{family}_{size}'
    _, data, image = HEADS[head]
    parameters, macs = cost(ROOT / 'configs' / f'{name}.py', image)
    metadata = {'Training Data': data, 'Input Size': Inline(image)}
    metadata |= {'Parameters': parameters, 'FLOPs': macs}
    published = {
        key: value for key, value in old.get('Metadata', {}).items() if key.startswith('Published')
    }
    made = {
        'Name': name,
        'In Collection': COLLECTIONS[family],
        'Config': f'configs/{name}.py',
        'Metadata': metadata | published,
    }
    return made | ({'Results': old['Results']} if 'Results' in old else {})


def index_text(path: Path) -> str:
    """What model-index.yml should say."""
    text = path.read_text()
    index = yaml.safe_load(text)
    old = {model['Name']: model for model in index['Models']}
    listed = names()
    gone = set(old) - {f'{head}_{family}_{size}' for family, head, size in listed}
    if gone:
        raise SetupError(f'model-index.yml has {sorted(gone)[0]}, which is no config.')
    models = [
        entry(family, head, size, old.get(f'{head}_{family}_{size}', {}))
        for family, head, size in listed
    ]
    # the part before the models, with its comments, is written by hand
    dumped = yaml.safe_dump({'Models': models}, sort_keys=False, allow_unicode=True, width=100)
    return text[: text.index('Models:\n')] + dumped


def published(family: str, size: str, models: dict[str, dict[str, Any]]) -> str:
    """What the paper states about a size, in one cell."""
    metadata = models[f'classifier_{family}_{size}']['Metadata']
    cells = []
    if 'Published Parameters' in metadata:
        cells.append(f'{metadata["Published Parameters"] / 1e6:.1f} M')
    if 'Published FLOPs' in metadata:
        cells.append(f'{metadata["Published FLOPs"] / 1e9:.1f} G')
    if 'Published Throughput' in metadata:
        cells.append(f'{metadata["Published Throughput"]} throughput')
    if 'Published Top 1 Change' in metadata:
        cells.append(f'{metadata["Published Top 1 Change"]:+.1f} top-1')
    for head, (title, *_) in HEADS.items():
        for result in models.get(f'{head}_{family}_{size}', {}).get('Results', []):
            values = ', '.join(f'{value} {name}' for name, value in result['Metrics'].items())
            cells.append(f'{title}: {values}')
    return '; '.join(cells) or '–'


def zoo_text(index: dict[str, Any]) -> str:
    """What docs/model_zoo.md should say."""
    models = {model['Name']: model for model in index['Models']}
    lines = [ZOO_HEAD]
    for family, title in COLLECTIONS.items():
        lines += [f'## {title}', '']
        lines += [
            '| size | parameters (M) | GMACs 224×224 | 512×512 | 800×1333 | paper | configs |'
        ]
        lines += ['|---|---|---|---|---|---|---|']
        for size in SIZES:
            own = {h: models[f'{h}_{f}_{size}'] for f, h, s in names() if (f, s) == (family, size)}
            if not own:
                continue
            links = ', '.join(f'[{HEADS[head][0]}](../{own[head]["Config"]})' for head in own)
            costs = {head: own[head]['Metadata'] for head in own}
            macs = [
                f'{costs[h]["FLOPs"] / 1e9:.2f}' for h in ('classifier', 'upernet', 'mask_rcnn')
            ]
            lines.append(
                f'| {size} | {costs["classifier"]["Parameters"] / 1e6:.1f} | {" | ".join(macs)} '
                f'| {published(family, size, models)} | {links} |'
            )
        lines.append('')
    return '\n'.join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Write both files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='write nothing; fail if out of date')
    args = parser.parse_args(argv)
    index = ROOT / 'model-index.yml'
    wanted = {index: index_text(index)}
    wanted[ROOT / 'docs' / 'model_zoo.md'] = zoo_text(yaml.safe_load(wanted[index]))
    for path, text in wanted.items():
        if path.is_file() and path.read_text() == text:
            continue
        if args.check:
            raise SetupError(f'{path.name} is out of date: run python tools/model_zoo.py.')
        path.write_text(text)
        print(f'Wrote {path}')


if __name__ == '__main__':
    run_or_explain(main)
