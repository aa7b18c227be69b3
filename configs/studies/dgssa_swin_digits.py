# SPDX-License-Identifier: Apache-2.0
# DGSSA-Swin's ablations on the digits: how static attention starts, and how many layers have it.
# Before:
#   python tools/compress.py build-study configs/studies/dgssa_swin_digits.py
config = 'configs/classifier_dgssa_swin_digits.py'
metric = 'accuracy/top1'
seeds = (0, 1, 2)
# five epochs of the config's eight
options = {'train_cfg.max_epochs': 5, 'param_scheduler.1.end': 5}
variants = {
    name: {**changes, 'load_from': f'work_dirs/starts/dgssa_swin_digits/{i}.pth'}
    for i, (name, changes) in enumerate(
        {
            'dynamic, layers 1-5': {},
            'random': {'model.backbone.arch.static_init': 'random'},
            'local': {'model.backbone.arch.static_init': 'local'},
            'no static layers': {'model.backbone.arch.static_layers': ()},
            'layers 1-3': {'model.backbone.arch.static_layers': (1, 2, 3)},
            'layers 1-7': {'model.backbone.arch.static_layers': (1, 2, 3, 4, 5, 6, 7)},
            'layers 1-9': {'model.backbone.arch.static_layers': (1, 2, 3, 4, 5, 6, 7, 8, 9)},
            'static: MLP': {'model.backbone.arch.static_block': 'mlp'},
        }.items()
    )
}
measures = {
    'teacher': 'effvit_mm.compression.evaluation:top1_of_teacher',
    'before training': 'effvit_mm.compression.evaluation:top1_before_training',
    'speed': 'effvit_mm.compression.evaluation:speed',
}
