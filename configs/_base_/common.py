# SPDX-License-Identifier: Apache-2.0
# What all configs share, whichever framework they are for.
custom_imports = dict(imports=['effvit_mm'], allow_failed_imports=False)

# Norms, biases and other vectors, and what starts as a token or as a difference from the identity,
# are not decayed: decay would pull them to zero, not to what they mean.
no_decay = dict(
    norm_decay_mult=0.0,
    bias_decay_mult=0.0,
    flat_decay_mult=0.0,
    custom_keys={
        'abstract_token': dict(decay_mult=0.0),
        '.query': dict(decay_mult=0.0),
        'expand_delta': dict(decay_mult=0.0),
        'reduce_delta': dict(decay_mult=0.0),
        'theta_delta': dict(decay_mult=0.0),
        'psi_delta': dict(decay_mult=0.0),
        'head_mix': dict(decay_mult=0.0),
        'backbone.cls_token': dict(decay_mult=0.0),
        'backbone.pos_embed': dict(decay_mult=0.0),
        '.q_bias': dict(decay_mult=0.0),
        '.v_bias': dict(decay_mult=0.0),
        'attn.matrix': dict(decay_mult=0.0),
        'attn.logits': dict(decay_mult=0.0),
        'relative_position_bias_table': dict(decay_mult=0.0),
        'aggregations': dict(decay_mult=0.0),
        'teacher_glads': dict(decay_mult=0.0),
        'unprojections': dict(decay_mult=0.0),
    },
)

# At the end of training also write a file with the weights alone, which loads with
# torch.load(weights_only=True) and as `init_cfg` of another config.
published_keys = ['meta', 'state_dict']
