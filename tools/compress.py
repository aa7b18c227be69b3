# SPDX-License-Identifier: Apache-2.0
"""Compress a pretrained DeiT or Swin (DGSSA and GLAD): docs/compression.md is the guide.

compress.py stats deit_small_patch16_224 --data IMAGES --max-images 5000 --out s.safetensors
compress.py search s.safetensors --static 2 --glads 3 --eta 0.5 --out s.json
compress.py build CONFIG.py --weights timm:deit_small_patch16_224 --stats s.safetensors
compress.py report s.safetensors --search s.json --out-dir report
"""

import argparse
import os.path as osp
import sys
from collections.abc import Sequence

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

from effvit_mm.compression import build_command, report, stats_command
from effvit_mm.engine.faults import run_or_explain

COMMANDS = (stats_command, build_command, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for module in COMMANDS:
        module.add_parsers(commands)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == '__main__':
    run_or_explain(main)
