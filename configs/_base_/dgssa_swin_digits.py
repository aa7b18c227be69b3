# SPDX-License-Identifier: Apache-2.0
# The Swin of classifier_swin_digits.py with static attention in half of its layers.
dgssa_swin_digits = dict(
    type='DGSSASwin',
    arch=dict(
        embed_dims=16,
        depths=(2, 2, 4, 2),
        num_heads=(1, 2, 4, 8),
        window_size=3,
        static_layers=(1, 2, 3, 4, 5),
    ),
)
