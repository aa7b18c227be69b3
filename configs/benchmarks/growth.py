# SPDX-License-Identifier: Apache-2.0
# How the costs of backbones grow with an image's pixels: MACs, time, memory of one image.
common = dict(sizes=((224, 224), (448, 448), (896, 896), (1344, 1344)), batch_size=1, backbone=True)
swin_t = {'Swin-T (timm)': 'timm:swin_tiny_patch4_window7_224'}
deit_s = {'DeiT-S (timm)': 'timm:deit_small_patch16_224'}
tables = dict(
    partialformer_growth=dict(
        models={'PartialFormer-B3': 'ours:PartialFormer/b3', **swin_t}, **common
    ),
    lavit_growth=dict(
        models={'LaViT-S': 'ours:LaViT/small', 'PVTv2-B2 (timm)': 'timm:pvt_v2_b2'}, **common
    ),
    integrated_deit_growth=dict(
        models={'Integrated-DeiT-S': 'ours:IntegratedDeiT/small', **deit_s}, **common
    ),
    dgssa_swin_growth=dict(models={'DGSSA-Swin-T': 'ours:DGSSASwin/tiny', **swin_t}, **common),
)
