# SPDX-License-Identifier: Apache-2.0
"""Export a backbone, a backbone with its neck, or a whole classifier to ONNX or torch.export.

  export.py CONFIG CHECKPOINT --out model.onnx
  export.py CONFIG CHECKPOINT --out backbone.pt2 --part backbone

The file is kept only if it computes what PyTorch does, at three image sizes and two batch sizes.
"""

import argparse
import os.path as osp
import sys
from collections.abc import Sequence

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope

from effvit_mm.engine.export import (
    MIN_OPSET,
    MIN_SIDE,
    PARTS,
    SUFFIXES,
    Difference,
    check_opset,
    choose_format,
    choose_part,
    export,
    require,
    wake_zeros,
)
from effvit_mm.engine.faults import SetupError, run_or_explain
from effvit_mm.engine.launch import SettingsAction, build_model, drop_teacher, load_config


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        'checkpoint', nargs='?', help='path or URL of the checkpoint; without it, random weights'
    )
    parser.add_argument('--out', required=True, metavar='FILE', help='the file: .onnx or .pt2')
    parser.add_argument(
        '--format', metavar='|'.join(SUFFIXES), help="default: by the file's suffix"
    )
    parser.add_argument(
        '--part',
        choices=PARTS,
        help='default: model for classifiers, else backbone-neck (backbone where there is no neck)',
    )
    parser.add_argument(
        '--size',
        nargs='+',
        type=int,
        default=[224],
        metavar='N',
        help='side, or height and width, in pixels that the file is compared at (default 224)',
    )
    parser.add_argument(
        '--fixed-size', action='store_true', help='make height and width constants, of --size'
    )
    parser.add_argument(
        '--opset', type=int, default=MIN_OPSET, help=f"ONNX's operators (default {MIN_OPSET})"
    )
    parser.add_argument(
        '--normalise', action='store_true', help='take pixels 0-255, normalise them in the model'
    )
    parser.add_argument(
        '--softmax', action='store_true', help="a classifier's scores instead of its logits"
    )
    parser.add_argument(
        '--tolerance',
        type=float,
        default=1e-4,
        help='largest difference to PyTorch, relative to the largest value (default 1e-4)',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=SettingsAction,
        metavar='KEY=VALUE',
        help='settings of the config to override',
    )
    parser.set_defaults(launcher='none', work_dir=None)
    return parser.parse_args(argv)


def image_size(args: argparse.Namespace) -> tuple[int, int]:
    """``--size`` as height and width."""
    least = 1 if args.fixed_size else MIN_SIDE
    if len(args.size) > 2 or min(args.size) < least:
        raise SetupError(f'--size is one or two numbers of at least {least}, not {args.size}.')
    return args.size[0], args.size[-1]


def report(difference: Difference) -> None:
    """Print a row of the table of differences."""
    batch, _, height, width = difference.shape
    shape = f'{batch} x {height} x {width}'
    print(f'{shape:<22}{difference.absolute:<14.1e}{difference.relative:.1e}', flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Check what can be checked at once, export, and say what the file is."""
    args = parse_args(argv)
    size = image_size(args)
    file_format = choose_format(args.out, args.format)
    if file_format == 'onnx':
        require('onnx', 'onnxruntime')
        check_opset(args.opset)
    cfg = load_config(args)
    drop_teacher(cfg)
    part = choose_part(cfg, args.part)
    MMLogger.get_current_instance().setLevel('WARNING')  # not how every weight was initialised
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = build_model(cfg, args.checkpoint)
    name = osp.splitext(osp.basename(args.config))[0]
    if args.checkpoint is None:
        wake_zeros(model)
        print('No checkpoint is given: the weights are random ones.')
    print(f'{part} of {name}, largest difference to PyTorch:')
    print(f'{"batch, image":<22}{"absolute":<14}relative')
    meta = export(
        cfg,
        model,
        args.out,
        name,
        format=file_format,
        part=part,
        size=size,
        fixed=args.fixed_size,
        opset=args.opset,
        normalise=args.normalise,
        softmax=args.softmax,
        tolerance=args.tolerance,
        checkpoint=args.checkpoint,
        report=report,
    )
    order = meta['channel_order'].upper()
    kind = f'{order} pixels 0-255' if args.normalise else f'normalised {order}'
    outputs = ', '.join(meta['output_names'])
    print(f'Wrote {args.out}, {osp.getsize(args.out) / 1e6:.1f} MB: image ({kind}) to {outputs}.')


if __name__ == '__main__':
    run_or_explain(main)
