# SPDX-License-Identifier: Apache-2.0
# Single digits with each of our families, and with peers of the same cost.
_base_ = ['../_base_/peers_digits.py']

config = 'configs/classifier_partialformer_b0_digits.py'
metric = 'accuracy/top1'
seeds = (0, 1, 2)
options = {}
variants = {
    name: {
        'model.backbone': dict(
            _delete_=True,
            **backbone,
            **({} if 'model_name' in backbone else dict(out_indices=(3,))),
            **(dict(out_type='cls_token') if 'DeiT' in name else {}),
        ),
        'model.head.in_channels': _base_._channels[name][-1],
        'custom_imports': _base_._imports,
        **({'model.neck': None} if 'DeiT' in name else {}),
    }
    for name, backbone in _base_._classifiers.items()
}
measures = {
    'MMACs': 'effvit_mm.analysis.measures:backbone_mmacs',
    'training memory (MiB)': 'effvit_mm.analysis.measures:backbone_training_memory',
}
