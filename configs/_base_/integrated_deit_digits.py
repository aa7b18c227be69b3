# SPDX-License-Identifier: Apache-2.0
# classifier_deit_digits.py compressed to half its cost; docs/compression.md says how the pyramid
# was found. Scenes of 128 pixels are four windows of the pretraining's 64.
integrated_deit_digits = dict(
    type='IntegratedDeiT',
    arch=dict(
        embed_dims=64,
        depth=8,
        num_heads=4,
        patch_size=8,
        image_size=64,
        static_layers=(1, 2),
        pyramid=((3, 26), (5, 18), (7, 10)),
    ),
)
