# SPDX-License-Identifier: Apache-2.0
# Parameters, gradients and the optimizer's state shared out among processes, for a config to take
# from (docs/distributed.md).
runner_type = 'FlexibleRunner'
# 'full': checkpoints are those of ordinary runs, for any number of processes
strategy = dict(type='BackboneFSDPStrategy', state_dict_cfg='full')

fsdp_imports = dict(imports=['effvit_mm', 'effvit_mm.engine.fsdp'], allow_failed_imports=False)
# sharded parameters have one dimension; what is flat by itself is named in custom_keys
fsdp_paramwise_cfg = dict(flat_decay_mult=None)
