# SPDX-License-Identifier: Apache-2.0
"""Statistics are what their definitions say, by plain loops over images, windows and heads."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.swin_transformer import SwinTransformer, window_partition
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from effvit_mm.compression import collect_statistics, load_statistics
from effvit_mm.compression.statistics import (
    compute_attention,
    observed,
    weights_fingerprint,
    write_tensors,
)


@pytest.fixture(scope='module')
def deit():
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=0
    )
    with torch.no_grad():
        for block in model.blocks:  # attention that is far from uniform
            block.attn.qkv.weight.mul_(15)
    return model.eval()


@pytest.fixture(scope='module')
def swin():
    torch.manual_seed(0)
    model = SwinTransformer(
        img_size=64, embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=0
    )
    with torch.no_grad():
        for stage in model.layers:
            for block in stage.blocks:
                block.attn.qkv.weight.mul_(15)
                block.attn.relative_position_bias_table.normal_()
    return model.eval()


def images(number=5, size=32, seed=1):
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(seed))


def recorded(model, x):
    """Attention and mask of every layer."""
    seen = {}
    with torch.no_grad(), observed(model, lambda i, a, m: seen.update({i: (a, m)})):
        model.forward_features(x)
    return seen


@pytest.mark.parametrize('kind', ['deit', 'swin'])
def test_recomputed_attention_gives_the_output_of_timms_attention(kind, request):
    model = request.getfixturevalue(kind)
    calls = []

    def compare(attn, args, kwargs, out):
        x, mask = args[0], kwargs.get('mask')
        a = compute_attention(attn, x, mask)
        v = attn.qkv(x).chunk(3, dim=2)[2].unflatten(2, (attn.num_heads, -1)).transpose(1, 2)
        expected = attn.proj((a @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        calls.append(mask is not None)

    handles = [
        m.register_forward_hook(compare, with_kwargs=True)
        for name, m in model.named_modules()
        if name.endswith('.attn')
    ]
    with torch.no_grad():
        model.forward_features(images(2, 64 if kind == 'swin' else 32))
    for handle in handles:
        handle.remove()
    # windows of the first stage's second block are shifted, and of the second's (8 x 8 cells) too
    assert calls == ([False, True, False, True] if kind == 'swin' else [False] * 3)


def test_model_is_left_as_it_was(deit):
    deit.train()
    before = {name: value.clone() for name, value in deit.state_dict().items()}
    collect_statistics(deit, [images(2)])
    assert all(module.training for module in deit.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in deit.modules())
    for name, value in deit.state_dict().items():
        assert torch.equal(value, before[name])
    deit.eval()


def test_statistics_of_a_deit_are_those_of_a_loop_over_images_and_heads(deit):
    x = images()
    found = collect_statistics(deit, x.split(2)).tensors
    entering = {}
    handles = [
        block.register_forward_pre_hook(lambda _, args, i=i: entering.update({i: args[0]}))
        for i, block in enumerate(deit.blocks)
    ]
    attention = recorded(deit, x)
    for handle in handles:
        handle.remove()
    for layer in range(3):
        a = attention[layer][0].double()
        mean = sum(a) / len(a)
        torch.testing.assert_close(found[f'attention_mean.{layer}'].double(), mean, **CLOSE)
        sigma = torch.stack([torch.linalg.svdvals(m) for image in a for m in image]).mean(dim=0)
        torch.testing.assert_close(found[f'singular_values.{layer}'], sigma, **CLOSE)
        tokens = entering[layer].double()
        gram = sum(t @ t.T for t in tokens) / len(tokens) / 24
        torch.testing.assert_close(found[f'gram.{layer}'], gram, **CLOSE)
        std = torch.stack([t.std(unbiased=False) for image in tokens for t in image]).mean()
        torch.testing.assert_close(found[f'token_std.{layer}'], std, **CLOSE)
        distance = sum((m - mean).square() for m in a).sum(dim=(1, 2))
        norm = sum(m.square() for m in a).sum(dim=(1, 2))
        torch.testing.assert_close(found[f'difference.{layer}'], distance / norm, **CLOSE)


CLOSE = dict(rtol=1e-4, atol=1e-6)


def test_mean_of_a_swin_counts_only_pairs_that_the_shift_mask_shows(swin):
    x = images(3, 64)
    found = collect_statistics(swin, x.split(2)).tensors
    attention = recorded(swin, x)
    for layer, (a, mask) in attention.items():
        windows = len(a) // 3
        total, square = torch.zeros(2, *a.shape[1:], dtype=torch.float64)
        count = torch.zeros(16, 16)
        for i, weights in enumerate(a.double()):
            seen = torch.ones(16, 16) if mask is None else (mask[i % windows] == 0).float()
            total += weights * seen
            square += weights.square() * seen
            count += seen
        mean = total / count
        torch.testing.assert_close(found[f'attention_mean.{layer}'].double(), mean, **CLOSE)
        difference = 1 - mean.square().sum(dim=(1, 2)) / (square / count).sum(dim=(1, 2))
        torch.testing.assert_close(found[f'difference.{layer}'], difference, **CLOSE)
        assert (count.min() < count.max()) == (mask is not None)


def test_masked_pairs_would_have_lowered_the_mean(swin):
    """What is masked in some windows is averaged over the others, so it is not diluted."""
    a, mask = recorded(swin, images(3, 64))[1]
    found = collect_statistics(swin, [images(3, 64)]).tensors['attention_mean.1']
    hidden = (mask != 0).any(dim=0)
    plain = a.mean(dim=0)
    assert (found[:, hidden] > plain[:, hidden]).all()
    torch.testing.assert_close(found[:, ~hidden], plain[:, ~hidden])


def test_windows_are_those_of_timm_in_rows(swin):
    """Windows of an image follow one another, as the masks do."""
    x = torch.arange(2 * 64.0).view(2, 8, 8, 1)
    assert window_partition(x, (4, 4))[:4, 0, 0, 0].tolist() == [0, 4, 32, 36]


def test_identical_images_do_not_differ_and_different_ones_do(deit):
    same = images(1).repeat(4, 1, 1, 1)
    for layer in range(3):
        found = collect_statistics(deit, [same]).tensors[f'difference.{layer}']
        assert found.abs().max() < 1e-10
        assert (collect_statistics(deit, [images()]).tensors[f'difference.{layer}'] > 1e-3).all()


def test_rows_of_the_mean_attention_sum_to_one(deit):
    for layer in range(3):
        mean = collect_statistics(deit, [images()]).tensors[f'attention_mean.{layer}']
        torch.testing.assert_close(mean.sum(dim=2), torch.ones(3, 17))


@pytest.mark.parametrize('batch', [1, 3, 5])
def test_batches_do_not_matter(deit, batch):
    expected = collect_statistics(deit, [images()]).tensors
    found = collect_statistics(deit, images().split(batch)).tensors
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)


def test_file_holds_tensors_and_metadata(deit, tmp_path):
    path = str(tmp_path / 'new' / 'stats.safetensors')
    stats = collect_statistics(deit, [images()], model='tiny', dataset='noise')
    stats.save(path)
    read = load_statistics(path)
    assert read.metadata == stats.metadata
    assert all(torch.equal(load_file(path)[name], value) for name, value in read.tensors.items())
    meta = read.metadata
    assert (meta['model'], meta['dataset'], meta['image_count']) == ('tiny', 'noise', 5)
    assert (meta['kind'], meta['depth'], meta['heads']) == ('deit', 3, [3, 3, 3])
    assert (meta['tokens'], meta['dims'], meta['image_size']) == ([17] * 3, [24] * 3, [32, 32])
    assert (meta['mlp_ratio'], meta['patch_size']) == (4, 8)
    assert set(meta['versions']) == {'effvit_mm', 'torch', 'timm'}
    assert read.singular_values().shape == (3, 17)
    assert [p.name for p in (tmp_path / 'new').iterdir()] == ['stats.safetensors']


def test_layers_of_a_swin_count_through_all_stages(swin):
    stats = collect_statistics(swin, [images(1, 64)])
    assert stats.metadata['heads'] == [2, 2, 4, 4] and stats.metadata['dims'] == [8, 8, 16, 16]
    assert stats.metadata['tokens'] == [16] * 4
    shapes = [tuple(stats.tensors[f'attention_mean.{i}'].shape) for i in range(4)]
    assert shapes == [(2, 16, 16)] * 2 + [(4, 16, 16)] * 2
    assert not [name for name in stats.tensors if name.startswith(('gram', 'token_std'))]
    with pytest.raises(ValueError, match='Only a DeiT has tokens to aggregate'):
        stats.singular_values()


def test_fingerprint_is_of_the_weights_without_the_head(deit):
    state = deit.state_dict()
    expected = weights_fingerprint(state)
    assert weights_fingerprint({**state, 'head.weight': torch.ones(2)}) == expected
    changed = {**state, 'norm.bias': state['norm.bias'] + 1e-3}
    assert weights_fingerprint(changed) != expected


def test_damaged_and_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='There is no file'):
        load_statistics(str(tmp_path / 'none'))
    (tmp_path / 'cut').write_bytes(b'\x10\0\0\0\0\0\0\0{"a"')
    with pytest.raises(ValueError, match='cut is not a complete file of statistics'):
        load_statistics(str(tmp_path / 'cut'))
    save_file(dict(a=torch.ones(1)), tmp_path / 'other')
    with pytest.raises(ValueError, match='other holds no statistics'):
        load_statistics(str(tmp_path / 'other'))


def test_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'stats'
    write_tensors(str(path), dict(a=torch.ones(3)), {})
    before = path.read_bytes()

    def fail(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('effvit_mm.compression.statistics.os.replace', fail)
    with pytest.raises(OSError, match='No space left'):
        write_tensors(str(path), dict(a=torch.zeros(3)), {})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ['stats']


@pytest.mark.parametrize(
    'model, message',
    [
        (lambda: nn.Linear(2, 2), 'Linear is neither'),
        (lambda: timm.create_model('deit_tiny_distilled_patch16_224'), 'it has 2'),
        (lambda: timm.create_model('swin_tiny_patch4_window7_224', img_size=256), 'would pad'),
        (lambda: timm.create_model('resnet10t'), 'ResNet is neither'),
    ],
)
def test_models_that_are_not_compressed_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        collect_statistics(model(), [])


def test_no_images_are_refused(deit):
    with pytest.raises(ValueError, match='no images'):
        collect_statistics(deit, [])
