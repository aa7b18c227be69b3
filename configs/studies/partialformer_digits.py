# SPDX-License-Identifier: Apache-2.0
# PartialFormer's ablations on the digits: mixed or plain attention, the single-query attention and
# its MLP, the abstract token, and how many tokens are foreground.
config = 'configs/classifier_partialformer_b0_digits.py'
metric = 'accuracy/top1'
seeds = (0, 1, 2)
variants = {
    name: {'model.backbone.arch': dict(_delete_=True, base='b0', **changes)}
    for name, changes in {
        'PartialFormer-B0': {},
        'plain attention (no HeadMLP)': dict(head_expansion=0),
        'SQA with a linear layer': dict(sqa='linear'),
        'no SQA': dict(sqa='none'),
        'no abstract token': dict(abstract_token=False),
        'all tokens foreground': dict(foreground_ratios=(1, 1, 1, 1)),
        'foreground 1/16, 1/4, 1/2, 1': dict(foreground_ratios=('1/16', '1/4', '1/2', 1)),
        'foreground 1/64 everywhere': dict(foreground_ratios=('1/64',) * 4),
    }.items()
}
measures = {'MMACs': 'effvit_mm.analysis.measures:backbone_mmacs'}
