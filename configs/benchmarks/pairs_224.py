# SPDX-License-Identifier: Apache-2.0
# Compressed models at 224², each taking turns with its original alone: what runs between two turns
# decides which memory is at hand, which on a CPU moves small models by a tenth.
_modes = ('inference', 'training')
tables = {
    f'integrated_deit_{size}_224': dict(
        models={
            f'Integrated-DeiT-{size[0].upper()}': f'ours:IntegratedDeiT/{size}',
            f'DeiT-{size[0].upper()} (timm)': f'timm:deit_{size}_patch16_224',
        },
        reference=f'DeiT-{size[0].upper()} (timm)',
        modes=_modes,
    )
    for size in ('tiny', 'small', 'base')
} | {
    f'dgssa_swin_{size}_224': dict(
        models={
            f'DGSSA-Swin-{size[0].upper()}': f'ours:DGSSASwin/{size}',
            f'Swin-{size[0].upper()} (timm)': f'timm:swin_{size}_patch4_window7_224',
        },
        reference=f'Swin-{size[0].upper()} (timm)',
        modes=_modes,
    )
    for size in ('tiny', 'small', 'base')
}
