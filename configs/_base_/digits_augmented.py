# SPDX-License-Identifier: Apache-2.0
# Pictures of single digits for transformers without convolutions, which overfit few of them: moved
# in training. Nothing is mirrored: a mirrored digit is none.
_load = dict(type='LoadImageFromFile')
_move = dict(type='RandomCrop', crop_size=64, padding=6, padding_mode='reflect')
_enlarge = dict(type='Resize', scale=96)
_pack = dict(type='PackInputs')

moved_train_pipeline = [_load, _move, _pack]
enlarged_pipeline = [_load, _enlarge, _pack]
enlarged_train_pipeline = [_load, _move, _enlarge, _pack]
