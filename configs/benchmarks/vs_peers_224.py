# SPDX-License-Identifier: Apache-2.0
# Classifiers at 224², each family beside the models that its paper compares with.
tables = dict(
    partialformer_224=dict(
        models={
            'PartialFormer-B0': 'ours:PartialFormer/b0',
            'PartialFormer-B1': 'ours:PartialFormer/b1',
            'PartialFormer-B2': 'ours:PartialFormer/b2',
            'PartialFormer-B3': 'ours:PartialFormer/b3',
            'PartialFormer-B4': 'ours:PartialFormer/b4',
            'PVTv2-B2 (timm)': 'timm:pvt_v2_b2',
            'ConvNeXt-T (timm)': 'timm:convnext_tiny',
            'Swin-T (timm)': 'timm:swin_tiny_patch4_window7_224',
        },
        reference='Swin-T (timm)',
        modes=('inference', 'training'),
    ),
    lavit_224=dict(
        models={
            'LaViT-T': 'ours:LaViT/tiny(diagonality_loss=None)',
            'LaViT-S': 'ours:LaViT/small(diagonality_loss=None)',
            'LaViT-B': 'ours:LaViT/base(diagonality_loss=None)',
            'PVTv2-B1 (timm)': 'timm:pvt_v2_b1',
            'PVTv2-B2 (timm)': 'timm:pvt_v2_b2',
            'PVTv2-B3 (timm)': 'timm:pvt_v2_b3',
            'Swin-T (timm)': 'timm:swin_tiny_patch4_window7_224',
        },
        reference='PVTv2-B2 (timm)',
        modes=('inference', 'training'),
    ),
    integrated_deit_224=dict(
        models={
            'Integrated-DeiT-T': 'ours:IntegratedDeiT/tiny',
            'Integrated-DeiT-S': 'ours:IntegratedDeiT/small',
            'Integrated-DeiT-B': 'ours:IntegratedDeiT/base',
            'DeiT-T (timm)': 'timm:deit_tiny_patch16_224',
            'DeiT-S (timm)': 'timm:deit_small_patch16_224',
            'DeiT-B (timm)': 'timm:deit_base_patch16_224',
        },
        reference='DeiT-S (timm)',
        modes=('inference', 'training'),
    ),
    dgssa_swin_224=dict(
        models={
            'DGSSA-Swin-T': 'ours:DGSSASwin/tiny',
            'DGSSA-Swin-S': 'ours:DGSSASwin/small',
            'DGSSA-Swin-B': 'ours:DGSSASwin/base',
            'Swin-T (timm)': 'timm:swin_tiny_patch4_window7_224',
            'Swin-S (timm)': 'timm:swin_small_patch4_window7_224',
            'Swin-B (timm)': 'timm:swin_base_patch4_window7_224',
        },
        reference='Swin-T (timm)',
        modes=('inference', 'training'),
    ),
    lavit_scores=dict(
        kind='scores',
        models={'LaViT-S': 'ours:LaViT/small'},
        sizes=((224, 224), (800, 1333)),
    ),
)
