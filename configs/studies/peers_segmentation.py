# SPDX-License-Identifier: Apache-2.0
# Semantic FPN on the digit scenes with each of our families, and with peers of the same cost.
_base_ = ['../_base_/peers_digits.py']

config = 'configs/semantic_fpn_partialformer_b0_digits.py'
metric = 'mIoU'
seeds = (0, 1, 2)
options = {}
variants = {
    name: {
        'model.backbone': dict(_delete_=True, **backbone),
        'model.neck.in_channels': _base_._channels_scenes[name],
        'custom_imports': _base_._imports,
    }
    for name, backbone in _base_._backbones_scenes.items()
}
measures = {
    'MMACs': 'effvit_mm.analysis.measures:backbone_mmacs',
    'training memory (MiB)': 'effvit_mm.analysis.measures:backbone_training_memory',
}
