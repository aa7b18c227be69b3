# SPDX-License-Identifier: Apache-2.0
"""Evaluate a checkpoint with a config of MMPretrain, MMDetection or MMSegmentation."""

import argparse
import os.path as osp
import sys

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

from mmengine.config import Config
from mmengine.evaluator import DumpResults

from effvit_mm.engine.faults import SetupError, check_writable, run_or_explain
from effvit_mm.engine.launch import (
    add_common_arguments,
    build_runner,
    check_data,
    check_weights,
    drop_teacher,
    load_config,
    parse_args,
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path or URL of the checkpoint')
    parser.add_argument(
        '--out',
        help='where predictions go: a .pkl file, for MMSegmentation a folder of label images',
    )
    parser.add_argument('--show-dir', help='folder for images with the predictions drawn in')
    add_common_arguments(parser)
    return parser


def draw_into(cfg: Config, folder: str) -> None:
    """Turn on the framework's visualization hook."""
    if 'visualization' not in cfg.default_hooks:
        raise SetupError('--show-dir needs a visualization hook in default_hooks of the config.')
    hook = cfg.default_hooks.visualization
    folder = osp.abspath(folder)  # MMDetection would put a relative one into the work dir
    if cfg.default_scope == 'mmpretrain':
        hook.update(enable=True, interval=1, out_dir=folder)
    elif cfg.default_scope == 'mmseg':
        hook.update(draw=True, interval=1)
        cfg.visualizer.save_dir = folder
    else:
        hook.update(draw=True, interval=1, test_out_dir=folder)


def main() -> None:
    """Check what can be checked, then hand over to the Runner."""
    args = parse_args(make_parser())
    if '://' not in args.checkpoint and not osp.exists(args.checkpoint):
        raise SetupError(f'There is no checkpoint {args.checkpoint}.')
    cfg = load_config(args)
    drop_teacher(cfg)
    check_data(cfg, 'test')
    cfg.load_from, cfg.resume = args.checkpoint, False  # what was trained may have been resumed
    if args.show_dir:
        draw_into(cfg, args.show_dir)
    to_folder = cfg.default_scope == 'mmseg'
    if args.out and to_folder:
        cfg.test_evaluator.update(output_dir=args.out, keep_results=True)
    if args.out and not to_folder and not args.out.endswith(('.pkl', '.pickle')):
        raise SetupError(f'--out writes a pickle: {args.out} must end in .pkl or .pickle.')
    folders = [cfg.work_dir, args.show_dir, args.out if to_folder else osp.dirname(args.out or '')]
    for folder in filter(None, folders):
        check_writable(folder)
    runner = build_runner(cfg)
    check_weights(runner, args.checkpoint, test=True)
    if args.out and not to_folder:
        if cfg.default_scope == 'mmdet':
            from mmdet.evaluation import DumpDetResults as Dump
        else:
            Dump = DumpResults
        runner.test_evaluator.metrics.append(Dump(out_file_path=args.out))
    runner.test()


if __name__ == '__main__':
    run_or_explain(main)
