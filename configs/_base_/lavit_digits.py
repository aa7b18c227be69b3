# SPDX-License-Identifier: Apache-2.0
# A small LaViT with the grids of a 64x64 image, the size of the single digits: 4x4 keys in every
# stage, and tiles of queries that are the whole maps. Scenes of 128x128 are tiled with them.
_base_ = ['./lavit.py']

lavit_digits = dict(
    type='LaViT',
    arch=dict(
        dims=(32, 64, 128, 192),
        depths=(2, 2, 6, 2),
        num_heads=(1, 2, 4, 6),
        reductions=(4, 2, 1, 1),
        key_grid=4,
        query_grids=(None, None, 4, 2),
    ),
)
