# SPDX-License-Identifier: Apache-2.0
"""Compare models' speed and memory, interleaved in one process.

    python tools/benchmark.py PartialFormer:b3 timm:swin_tiny_patch4_window7_224
    python tools/benchmark.py PartialFormer:b3 mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py \
        --backbone --size 800 1333 --batch-size 1

Models are classifiers, or with --backbone feature pyramids. The last model is the one that the
ratios refer to.
"""

import argparse

import torch
from tqdm import tqdm

from effvit_mm.analysis.throughput import (
    build_backbone,
    build_classifier,
    peak_memory,
    time_interleaved,
)


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('models', nargs='+', help='Family:arch, timm:NAME, or a config')
    parser.add_argument('--backbone', action='store_true', help='feature pyramids, no classifiers')
    parser.add_argument('--size', nargs=2, type=int, default=(224, 224), metavar=('H', 'W'))
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--threads', type=int, help='CPU threads, all cores by default')
    parser.add_argument('--no-memory', action='store_true', help='do not measure peak memory')
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    build = build_backbone if args.backbone else build_classifier
    shape = (args.batch_size, 3, *args.size)
    memory = {}
    if not args.no_memory:
        for name in args.models:
            memory[name] = peak_memory(name, shape, args.device, build)
    models = {name: build(name).to(args.device) for name in args.models}
    params = {n: sum(p.numel() for p in m.parameters()) / 1e6 for n, m in models.items()}
    image = torch.rand(shape, device=args.device)
    with tqdm(total=args.rounds + 1, desc='rounds', leave=False) as bar:
        timings = time_interleaved(models, image, args.rounds, lambda _: bar.update())
    reference = args.models[-1]
    where = (
        torch.cuda.get_device_name()
        if args.device == 'cuda'
        else (f'{torch.get_num_threads()} CPU threads')
    )
    print(
        f'\n{args.batch_size} x {args.size[0]} x {args.size[1]}, eval, float32, {where}, '
        f'torch {torch.__version__}, {args.rounds} rounds\n'
    )
    print('| model | params (M) | images/s | median ms (low-high) | speed | peak memory (MiB) |')
    print('|---|---|---|---|---|---|')
    for name, t in timings.items():
        ratio = timings[reference].median / t.median
        peak = f'{memory[name]:.0f}' if name in memory else ''
        spread = f'{t.median * 1e3:.0f} ({t.low * 1e3:.0f}-{t.high * 1e3:.0f})'
        print(
            f'| {name} | {params[name]:.1f} | {args.batch_size / t.median:.1f} | {spread} '
            f'| {ratio:.2f}x | {peak} |'
        )


if __name__ == '__main__':
    main()
