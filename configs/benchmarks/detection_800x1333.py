# SPDX-License-Identifier: Apache-2.0
# Backbones at the size of COCO images, one image, beside those of MMDetection.
common = dict(sizes=((800, 1333),), batch_size=1, backbone=True, modes=('inference', 'training'))
swin_t = {'Swin-T (MMDetection)': 'mmdet:SwinTransformer/tiny'}
pvt_v2_b2 = {'PVTv2-B2 (MMDetection)': 'mmdet:PyramidVisionTransformerV2/b2'}
tables = dict(
    partialformer_800x1333=dict(
        models={'PartialFormer-B3': 'ours:PartialFormer/b3', **swin_t}, **common
    ),
    lavit_800x1333=dict(
        models={
            'LaViT-T': 'ours:LaViT/tiny(diagonality_loss=None)',
            'LaViT-S': 'ours:LaViT/small(diagonality_loss=None)',
            **swin_t,
            **pvt_v2_b2,
        },
        **common,
    ),
    integrated_deit_800x1333=dict(
        models={
            'Integrated-DeiT-S': 'ours:IntegratedDeiT/small',
            'DeiT-S (timm)': 'timm:deit_small_patch16_224',
            **swin_t,
        },
        reference='DeiT-S (timm)',
        **common,
    ),
    dgssa_swin_800x1333=dict(models={'DGSSA-Swin-T': 'ours:DGSSASwin/tiny', **swin_t}, **common),
)
