# SPDX-License-Identifier: Apache-2.0
# Our families and their peers at the same cost, for the studies peers_*.py: 33 to 42 million
# multiply-accumulates for a digit of 64x64 pixels, 126 to 146 million for a scene of 128x128. What
# is compressed elsewhere is trained from scratch here, like everything else. The DeiT is
# Integrated-DeiT without static layers and aggregations, which is timm's DeiT, so that detectors
# get maps of strides 4 to 32 from both in the same way.
_swin = dict(embed_dims=32, depths=(2, 2, 4, 2), num_heads=(1, 2, 4, 8))
_deit = dict(depth=8, num_heads=4, patch_size=8, image_size=64)
_integrated = dict(**_deit, static_layers=(1, 2), pyramid=((3, 26), (5, 18), (7, 10)))
_plain = dict(**_deit, static_layers=(), pyramid=())

_backbones = {
    'PartialFormer': dict(type='PartialFormer', arch='b0'),
    'LaViT': dict(
        type='LaViT',
        arch=dict(
            dims=(32, 64, 128, 192),
            depths=(2, 2, 5, 2),
            num_heads=(1, 2, 4, 6),
            reductions=(4, 2, 1, 1),
            key_grid=4,
            query_grids=(None, None, 4, 2),
        ),
        diagonality_loss=None,
    ),
    'Integrated-DeiT': dict(type='IntegratedDeiT', arch=dict(**_integrated, embed_dims=104)),
    'DGSSA-Swin': dict(
        type='DGSSASwin', arch=dict(**_swin, window_size=4, static_layers=(1, 2, 3, 4, 5))
    ),
    'PVTv2': dict(type='mmdet.PyramidVisionTransformerV2', embed_dims=28, num_layers=[2, 2, 2, 2]),
    'Swin': dict(type='mmdet.SwinTransformer', **_swin, window_size=4, drop_path_rate=0.0),
    'DeiT': dict(type='IntegratedDeiT', arch=dict(**_plain, embed_dims=80)),
}
# MMDetection's return lists, which MMPretrain's necks refuse
_classifiers = {
    **_backbones,
    'PVTv2': dict(
        type='mmpretrain.TIMMBackbone', model_name='pvt_v2_b0', embed_dims=(28, 56, 140, 224)
    ),
    'Swin': dict(
        type='mmpretrain.SwinTransformer',
        arch=_swin,
        img_size=64,
        window_size=4,
        pad_small_map=True,
        drop_path_rate=0.0,
    ),
}
_channels = {
    'PartialFormer': [32, 64, 128, 256],
    'LaViT': [32, 64, 128, 192],
    'Integrated-DeiT': [104, 104, 104, 104],
    'DGSSA-Swin': [32, 64, 128, 256],
    'PVTv2': [28, 56, 140, 224],
    'Swin': [32, 64, 128, 256],
    'DeiT': [80, 80, 80, 80],
}
# with maps, and four windows, these two cost more
_backbones_scenes = {
    **_backbones,
    'Integrated-DeiT': dict(type='IntegratedDeiT', arch=dict(**_integrated, embed_dims=96)),
    'DeiT': dict(type='IntegratedDeiT', arch=dict(**_plain, embed_dims=68)),
}
_channels_scenes = {**_channels, 'Integrated-DeiT': [96] * 4, 'DeiT': [68] * 4}
_imports = dict(imports=['effvit_mm', 'mmdet.models'], allow_failed_imports=False)
