# SPDX-License-Identifier: Apache-2.0
"""Train a config of MMPretrain, MMDetection or MMSegmentation with mmengine's Runner."""

import argparse
import os.path as osp
import sys

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

import torch

from effvit_mm.engine.faults import SetupError, check_writable, run_or_explain
from effvit_mm.engine.launch import (
    add_common_arguments,
    build_runner,
    check_checkpoints,
    check_data,
    check_weights,
    latest_checkpoint,
    load_config,
    parse_args,
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from this checkpoint, or without a value from the latest in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision (needs a GPU)')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate to the batch size, from that of auto_scale_lr in the config',
    )
    add_common_arguments(parser)
    return parser


def main() -> None:
    """Check what can be checked, then hand over to the Runner."""
    args = parse_args(make_parser())
    if args.resume not in (None, 'auto') and not osp.isfile(args.resume):
        raise SetupError(f'There is no checkpoint {args.resume} to resume from.')
    cfg = load_config(args)
    check_data(cfg, 'train', 'val')
    if args.amp:
        wrapper = cfg.optim_wrapper.get('type', 'OptimWrapper')
        if wrapper not in ('OptimWrapper', 'AmpOptimWrapper'):
            raise SetupError(f'--amp replaces OptimWrapper; the config has {wrapper}.')
        if not torch.cuda.is_available():
            raise SetupError('--amp needs a GPU; mmengine has no mixed precision on the CPU.')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise SetupError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config.')
        cfg.auto_scale_lr.enable = True
    if args.resume == 'auto':  # with nothing to go on from yet, start as the config says
        cfg.resume = latest_checkpoint(cfg) is not None
        cfg.load_from = None if cfg.resume else cfg.get('load_from')
    elif args.resume is not None:
        cfg.resume, cfg.load_from = True, args.resume
    check_checkpoints(cfg)
    check_writable(cfg.work_dir)
    resume = bool(cfg.get('resume'))
    start = cfg.get('load_from') or (latest_checkpoint(cfg) if resume else None)
    runner = build_runner(cfg)
    check_weights(runner, start, resume)
    runner.train()


if __name__ == '__main__':
    run_or_explain(main, 'The same command with --resume goes on from the last checkpoint.')
