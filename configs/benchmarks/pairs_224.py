# SPDX-License-Identifier: Apache-2.0
# Compressed models at 224², each taking turns with its original alone: what runs between two turns
# decides which memory is at hand, which on a CPU moves small models by a tenth.
tables = {
    f'{table}_{size}_224': dict(
        models={
            f'{ours}-{size[0].upper()}': f'ours:{family}/{size}',
            f'{original}-{size[0].upper()} (timm)': f'timm:{original.lower()}_{size}_{patches}_224',
        },
        reference=f'{original}-{size[0].upper()} (timm)',
        modes=('inference', 'training'),
    )
    for table, ours, family, original, patches in (
        ('integrated_deit', 'Integrated-DeiT', 'IntegratedDeiT', 'DeiT', 'patch16'),
        ('dgssa_swin', 'DGSSA-Swin', 'DGSSASwin', 'Swin', 'patch4_window7'),
    )
    for size in ('tiny', 'small', 'base')
}
