# SPDX-License-Identifier: Apache-2.0
# Pictures of single digits for transformers without convolutions, which overfit few of them: grey,
# and in training moved and inverted. Nothing is mirrored: a mirrored digit is none.
_load = dict(type='LoadImageFromFile')
_grey = dict(type='RandomGrayscale', prob=1.0, keep_channels=True)
_move = dict(type='RandomCrop', crop_size=64, padding=6, padding_mode='reflect')
_invert = dict(type='Invert', prob=0.5)
_enlarge = dict(type='Resize', scale=96)
_pack = dict(type='PackInputs')

grey_pipeline = [_load, _grey, _pack]
grey_train_pipeline = [_load, _grey, _move, _invert, _pack]
enlarged_pipeline = [_load, _grey, _enlarge, _pack]
enlarged_train_pipeline = [_load, _grey, _move, _invert, _enlarge, _pack]
