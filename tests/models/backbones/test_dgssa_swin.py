# SPDX-License-Identifier: Apache-2.0
import pytest
import timm
import torch

from effvit_mm.models.backbones import DGSSASwin
from effvit_mm.models.layers.grid import Tiling


@torch.no_grad()
def test_without_static_layers_it_is_timm_s_swin_with_its_weights():
    torch.manual_seed(0)
    original = timm.create_model('swin_tiny_patch4_window7_224', num_classes=0).eval()
    model = DGSSASwin(dict(base='tiny', static_layers=()), out_indices=(3,)).eval()
    state = {
        k.replace('norm.', 'norm3.') if k.startswith('norm.') else k: v
        for k, v in original.state_dict().items()
    }
    result = model.load_state_dict(state, strict=False)
    assert not result.missing_keys
    assert not [k for k in result.unexpected_keys if not k.startswith('head')]
    x = torch.randn(2, 3, 224, 224)
    expected = original.forward_features(x).permute(0, 3, 1, 2)
    torch.testing.assert_close(model(x)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('size', [(33, 33), (100, 133)])
def test_static_layers_give_maps_of_any_size_and_gradients(size):
    arch = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), static_layers=(1, 2, 3))
    outputs = DGSSASwin(arch)(torch.randn(2, 3, *size))
    for o, s in zip(outputs, (4, 8, 16, 32), strict=True):
        assert o.shape[2:] == (-(-size[0] // s), -(-size[1] // s))
    sum(o.square().sum() for o in outputs).backward()


def test_the_first_layer_is_never_static():
    with pytest.raises(ValueError, match='static_layers'):
        DGSSASwin(dict(base='tiny', static_layers=(0, 1)))


@pytest.mark.parametrize('size', [(33, 33), (37, 61), (100, 260), (130, 90)])
@torch.no_grad()
def test_what_windows_hold_beyond_the_map_is_not_seen(size, monkeypatch):
    torch.manual_seed(0)
    arch = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), static_layers=(1, 2, 3))
    model, x = DGSSASwin(arch).eval().double(), torch.randn(2, 3, *size).double()
    expected, cut = model(x), Tiling.cut

    def poisoned(self, tokens):
        outside = ~self.inside().repeat(self.batch, 1)[..., None] & (self.tile == (7, 7))
        return cut(self, tokens).masked_fill(outside, 50.0)

    monkeypatch.setattr(Tiling, 'cut', poisoned)
    for a, b in zip(model(x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
