# SPDX-License-Identifier: Apache-2.0
# LaViT's ablations on the digits: vanilla attention in all layers, less attention, attention
# residual, diagonality-preserving loss. Six of eight layers of stage 3 could saturate.
config = 'configs/classifier_lavit_digits.py'
metric = 'accuracy/top1'
seeds = (0, 1, 2)
options = {'model.backbone.diagonality_loss': None}
variants = {
    'VA in all layers': {
        'model.backbone.arch.vanilla_layers': (2, 2, 6, 2),
        'model.backbone.arch.attention_residual': False,
    },
    'VA in all layers, residual': {'model.backbone.arch.vanilla_layers': (2, 2, 6, 2)},
    'LA': {'model.backbone.arch.attention_residual': False},
    'LA, residual': {},
    'LA, residual, loss on scores': {'model.backbone.diagonality_loss': dict(on='scores')},
    'LA, residual, loss on probabilities': {'model.backbone.diagonality_loss': dict(on='probs')},
}
measures = {'saturation': 'effvit_mm.analysis.attention:saturation'}
