# SPDX-License-Identifier: Apache-2.0
"""Draw what a trained model looks at, or what it finds.

  foreground   PartialFormer's foreground tokens in each stage, one picture per image
  attention    what chosen places attend to in LaViT's layers, one picture per image, and how
               similar each layer's attention is to that of the layer before (saturation)
  similarity   how alike foreground and background queries of PartialFormer attend, one chart
  static       the static attention of an Integrated-DeiT or DGSSA-Swin, one picture
  tokens       which patches feed which token of an Integrated-DeiT, one picture per image
  predictions  a detector's boxes and masks beside the ground truth, one picture of all images

Examples:

  visualize.py foreground CONFIG CHECKPOINT --images street.jpg garden.jpg
  visualize.py attention CONFIG CHECKPOINT --stage 3 --queries 0.5,0.5 0.2,0.7
  visualize.py attention CONFIG CHECKPOINT --compare OTHER_CONFIG OTHER_CHECKPOINT
  visualize.py static CONFIG CHECKPOINT
  visualize.py tokens CONFIG CHECKPOINT --images street.jpg
  visualize.py predictions CONFIG CHECKPOINT --num 8 --score-threshold 0.5

Without --images the first images of the config's test data are taken.
"""

import argparse
import os.path as osp
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DATASETS, init_default_scope
from torch import Tensor, nn

from effvit_mm.analysis.attention import attention_of, layer_similarity, query_similarity
from effvit_mm.analysis.compressed import (
    draw_static,
    draw_tokens,
    layers_after_glads,
    static_matrices,
)
from effvit_mm.analysis.observe import find_backbone
from effvit_mm.analysis.pictures import (
    draw_attention,
    draw_detections,
    draw_foreground,
    draw_similarity,
    foreground_maps,
)
from effvit_mm.compression.report import glad_sources
from effvit_mm.engine.faults import (
    UNREADABLE,
    SetupError,
    check_device,
    check_writable,
    run_or_explain,
)
from effvit_mm.engine.launch import (
    SettingsAction,
    build_model,
    check_data,
    drop_teacher,
    load_config,
)
from effvit_mm.models.backbones import IntegratedDeiT


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    foreground = commands.add_parser('foreground', help="PartialFormer's foreground tokens")
    foreground.add_argument(
        '--every-block', action='store_true', help='show all blocks, not only the last of a stage'
    )
    attention = commands.add_parser('attention', help="LaViT's attention, layer by layer")
    attention.add_argument(
        '--stage', type=int, choices=(1, 2, 3, 4), default=3, help='stage to draw (default 3)'
    )
    attention.add_argument(
        '--queries',
        nargs='+',
        type=place,
        default=[(0.5, 0.5), (0.25, 0.25), (0.75, 0.75)],
        metavar='Y,X',
        help='places as shares of height and width (default 0.5,0.5 0.25,0.25 0.75,0.75)',
    )
    attention.add_argument(
        '--compare',
        nargs=2,
        metavar=('CONFIG', 'CHECKPOINT'),
        help='another LaViT, such as one without less attention, in the chart of similarities',
    )
    similarity = commands.add_parser('similarity', help="how alike PartialFormer's queries attend")
    static = commands.add_parser('static', help='static attention (DGSSA)')
    static.add_argument(
        '--max-heads', type=int, default=6, help='draw no more heads of a layer (default 6)'
    )
    tokens = commands.add_parser('tokens', help='which patches feed which token (GLAD)')
    predictions = commands.add_parser('predictions', help="a detector's boxes and masks")
    predictions.add_argument(
        '--score-threshold', type=float, default=0.3, help='draw no lower scores (default 0.3)'
    )
    for command in (foreground, attention, similarity, static, tokens, predictions):
        command.add_argument('config', help='path of the config')
        command.add_argument('checkpoint', help='path or URL of the checkpoint')
        command.add_argument('--images', nargs='+', metavar='PATH', help='images of your own')
        command.add_argument(
            '--num', type=int, default=4, help='how many images of the test data (default 4)'
        )
        command.add_argument(
            '--out-dir', help='where pictures go; default: work_dirs/<config name>/pictures'
        )
        command.add_argument(
            '--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cpu, cuda, …'
        )
        command.add_argument(
            '--cfg-options',
            nargs='+',
            action=SettingsAction,
            metavar='KEY=VALUE',
            help='settings of the config to override',
        )
        command.set_defaults(launcher='none', work_dir=None)
    return parser.parse_args(argv)


def place(text: str) -> tuple[float, float]:
    """A place given as ``Y,X``, shares of the image's height and width."""
    try:
        y, x = (float(part) for part in text.split(','))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a place such as 0.5,0.25') from None
    if not (0 <= y <= 1 and 0 <= x <= 1):
        raise argparse.ArgumentTypeError(f'{text!r} does not lie between 0,0 and 1,1')
    return y, x


def load_data(cfg: Config, images: Sequence[str] | None, num: int) -> Iterator[dict]:
    """What the config's test pipeline makes of the user's images, or of the first test data.

    Raises:
        SetupError: An image, or the test data, are not there.
    """
    if not images:
        check_data(Config(dict(test_dataloader=cfg.test_dataloader)), 'test')  # no evaluator here
        dataset = DATASETS.build(cfg.test_dataloader.dataset)
        for i in range(min(num, len(dataset))):
            yield dataset[i]
        return
    for path in images:
        if not osp.isfile(path):
            raise SetupError(f'There is no image {path}.')
    steps = cfg.test_dataloader.dataset.pipeline
    pipeline = Compose([step for step in steps if 'LoadAnnotations' not in step['type']])
    for i, path in enumerate(images):
        try:
            data = pipeline(dict(img_path=path, img_id=i))
        except UNREADABLE as error:
            raise SetupError(f'{path} is not a readable image: {error}') from error
        yield data


def network_input(model: nn.Module, data: dict) -> tuple[Tensor, np.ndarray]:
    """The batch of one that the backbone gets, and the same image to look at, RGB ``(H, W, 3)``.

    Both after the pipeline's resizing and with the preprocessor's padding, so cells fall in place.
    """
    batch = model.data_preprocessor(pseudo_collate([data]), False)['inputs']
    bgr = data['inputs'].permute(1, 2, 0).numpy()
    picture = np.zeros((*batch.shape[2:], 3), np.uint8)
    picture[: bgr.shape[0], : bgr.shape[1]] = bgr[..., ::-1]
    return batch, picture


def foreground(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File names and figures of the foreground tokens, image by image."""
    for i, data in enumerate(load_data(cfg, args.images, args.num)):
        batch, picture = network_input(model, data)
        maps = _or_explain(foreground_maps, model, batch)
        name = osp.splitext(osp.basename(data['data_samples'].img_path))[0]
        maps = [[mask[0] for mask in stage] for stage in maps]
        yield f'foreground_{i}_{name}.png', draw_foreground(picture, maps, args.every_block)


def attention(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File names and figures of LaViT's attention, and the chart of similarities."""
    models = {osp.splitext(osp.basename(args.config))[0]: (model, cfg)}
    if args.compare:
        other = argparse.Namespace(**{**vars(args), 'config': args.compare[0], 'cfg_options': None})
        other_cfg = load_config(other)
        name = osp.splitext(osp.basename(args.compare[0]))[0]
        name = f'{name}, compared' if name in models else name
        models[name] = (build_model(other_cfg, args.compare[1], args.device), other_cfg)
    curves = {}
    for name, (one, one_cfg) in models.items():
        seen = []
        for i, data in enumerate(load_data(one_cfg, args.images, args.num)):
            batch, picture = network_input(one, data)
            layers = _or_explain(attention_of, one, batch)
            seen.append(layer_similarity(layers))
            if one is model:
                stage = [layer for layer in layers if layer.stage == args.stage - 1]
                if not stage:
                    raise SetupError(f'The backbone has no stage {args.stage}.')
                image = osp.splitext(osp.basename(data['data_samples'].img_path))[0]
                figure = draw_attention(picture, stage, args.queries)
                yield f'attention_{i}_{image}.png', figure
        curves[name] = [
            (stage, layer, float(np.mean([image[k][2] for image in seen])))
            for k, (stage, layer, _) in enumerate(seen[0])
        ]
    yield 'attention_similarity.png', draw_similarity(curves)


def similarity(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File name and chart of how alike PartialFormer's queries attend; prints the values."""
    seen = []
    for data in load_data(cfg, args.images, args.num):
        batch, _ = network_input(model, data)
        seen.append(_or_explain(query_similarity, model, batch))
    curves: dict[str, list] = {'foreground queries': [], 'background queries': []}
    print('stage.block  foreground  background')
    for blocks in zip(*seen, strict=True):
        stage, block, *_ = blocks[0]
        values = np.array([values for _, _, *values in blocks])
        means = [
            column[~np.isnan(column)].mean() if (~np.isnan(column)).any() else np.nan
            for column in values.T
        ]
        print(f'{stage + 1}.{block + 1:<11}{means[0]:<12.2f}{means[1]:.2f}')
        for curve, mean in zip(curves.values(), means, strict=True):
            curve.append((stage, block, mean))
    label = "mean cosine similarity of\ntwo queries' weights"
    yield 'query_similarity.png', draw_similarity(curves, label)


def static(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File name and figure of the static attention."""
    if args.max_heads < 1:
        raise SetupError(f'--max-heads must be at least 1, not {args.max_heads}.')
    matrices = {k: v.cpu() for k, v in _or_explain(static_matrices, model).items()}
    name = osp.splitext(osp.basename(args.config))[0]
    figure = draw_static(matrices, name, args.max_heads, layers_after_glads(model))
    yield 'static_attention.png', figure


def tokens(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File names and figures of the tokens that patches feed, image by image."""
    backbone = _or_explain(find_backbone, model, IntegratedDeiT, 'tokens to show')
    sources = _or_explain(glad_sources, backbone.state_dict())
    sources = {layer: value.cpu() for layer, value in sources.items()}
    for i, data in enumerate(load_data(cfg, args.images, args.num)):
        _, picture = network_input(model, data)
        name = osp.splitext(osp.basename(data['data_samples'].img_path))[0]
        patch = backbone.arch_settings['patch_size']
        yield f'tokens_{i}_{name}.png', draw_tokens(picture, sources, patch)


def _or_explain(function: Callable, *args: Any) -> Any:
    """The result of a function whose errors are for the user."""
    try:
        return function(*args)
    except ValueError as error:
        raise SetupError(str(error)) from error


def predictions(model: nn.Module, args: argparse.Namespace, cfg: Config) -> Iterator[tuple]:
    """File name and figure of the predictions on all images."""
    if cfg.default_scope != 'mmdet':
        raise SetupError("'predictions' draws boxes and masks: it needs a config of MMDetection.")
    import mmcv

    images, samples = [], []
    for data in load_data(cfg, args.images, args.num):
        with torch.no_grad():
            samples += model.test_step(pseudo_collate([data]))
        # predictions are in the coordinates of the file, not of the resized image
        images.append(mmcv.imread(data['data_samples'].img_path, channel_order='rgb'))
    classes = DATASETS.build({**cfg.test_dataloader.dataset, 'lazy_init': True}).metainfo['classes']
    yield 'predictions.png', draw_detections(images, samples, classes, args.score_threshold)


def main(argv: Sequence[str] | None = None) -> None:
    """Build the model, draw, and say where the pictures are."""
    args = parse_args(argv)
    cfg = load_config(args)
    drop_teacher(cfg)
    init_default_scope(cfg.default_scope)
    if args.num < 1:
        raise SetupError(f'--num must be at least 1, not {args.num}.')
    check_device(args.device)
    out_dir = args.out_dir or osp.join(cfg.work_dir, 'pictures')
    check_writable(out_dir)
    model = build_model(cfg, args.checkpoint, args.device)
    draw = dict(
        foreground=foreground,
        attention=attention,
        similarity=similarity,
        static=static,
        tokens=tokens,
        predictions=predictions,
    )[args.command]
    for name, figure in draw(model, args, cfg):
        figure.savefig(osp.join(out_dir, name))
        print(f'Wrote {osp.join(out_dir, name)}')


if __name__ == '__main__':
    run_or_explain(main)
