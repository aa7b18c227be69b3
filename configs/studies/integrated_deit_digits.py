# SPDX-License-Identifier: Apache-2.0
# Integrated-DeiT's ablations on the digits, all distilled from the same DeiT. Before:
#   python tools/compress.py build-study configs/studies/integrated_deit_digits.py
config = 'configs/classifier_integrated_deit_digits.py'
metric = 'accuracy/top1'
seeds = (0, 1, 2)
# five epochs of the config's eight
options = {'train_cfg.max_epochs': 5, 'param_scheduler.1.end': 5}
variants = {
    name: {**changes, 'load_from': f'work_dirs/starts/integrated_deit_digits/{i}.pth'}
    for i, (name, changes) in enumerate(
        {
            # where static attention and aggregations start from
            'DGSSA + GLAD': {},
            'static: random': {'model.backbone.arch.static_init': 'random'},
            'static: local': {'model.backbone.arch.static_init': 'local'},
            'static: MLP': {'model.backbone.arch.static_block': 'mlp'},
            'GLAD: random start': {'compression.glad_init': 'random'},
            # parts
            'DGSSA only': {'model.backbone.arch.pyramid': ()},
            'GLAD only': {'model.backbone.arch.static_layers': ()},
            'static layers 1-4': {'model.backbone.arch.static_layers': (1, 2, 3, 4)},
            'static layers 1-6': {'model.backbone.arch.static_layers': (1, 2, 3, 4, 5, 6)},
            # one mechanism also in the place of the other (the paper's A1 and A2)
            'DGSSA in all layers but the first, no GLAD': {
                'model.backbone.arch.static_layers': (1, 2, 3, 4, 5, 6, 7),
                'model.backbone.arch.pyramid': (),
            },
            'GLAD before layer 1, no DGSSA': {
                'model.backbone.arch.static_layers': (),
                'model.backbone.arch.pyramid': ((1, 24), (4, 20), (6, 19)),
            },
            # fewer GLADs, as the search places them for the same cost
            'Q = 2': {'model.backbone.arch.pyramid': ((3, 21), (6, 19))},
            'Q = 1': {'model.backbone.arch.pyramid': ((3, 20),)},
            # local aggregation instead, for about the same cost
            'concat': {
                'model.backbone.arch.aggregation': 'concat',
                'model.backbone.arch.pyramid': ((4, 17), (5, 5)),
            },
            'downsample': {
                'model.backbone.arch.aggregation': 'downsample',
                'model.backbone.arch.pyramid': ((4, 17), (5, 5)),
            },
            # parts of GLAD
            'GLAD without LN and GELU': {'model.backbone.arch.glad_norm': False},
            'GLAD without E': {'model.backbone.arch.glad_pos_embed': False},
            # training
            'no token distillation': {'model.token_loss': None},
            'token distillation, weight 1': {'model.token_loss.loss_weight': 1.0},
            'no distillation, labels': {
                'model.token_loss': None,
                'model.distillation_weight': 0.0,
                'model.hard_weight': 1.0,
            },
            'distillation and labels': {'model.hard_weight': 1.0},
        }.items()
    )
}
measures = {
    'teacher': 'effvit_mm.compression.evaluation:top1_of_teacher',
    'before training': 'effvit_mm.compression.evaluation:top1_before_training',
    'speed': 'effvit_mm.compression.evaluation:speed',
}
