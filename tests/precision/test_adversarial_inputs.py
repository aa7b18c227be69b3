# SPDX-License-Identifier: Apache-2.0
"""Training steps in half precision stay finite, whatever the image.

``tests/contract`` has noise of 30 times the usual size; here are images that nobody means to train
with, and weights with which attention logits pass the range of float16.
"""

import pytest
import torch
from contract.families import FAMILIES, awaken, image
from contract.test_training import with_large_activations
from torch import nn
from versions import need_cpu_autocast, need_cpu_type

from effvit_mm import AuxiliaryLossHook

SIZE = 96
LARGE = 1e3


def constant(value):
    """Norms divide by a standard deviation of 0."""
    return torch.full((2, 3, SIZE, SIZE), float(value))


def one_pixel():
    """The largest power of two below what float16 can hold."""
    x = image(SIZE, SIZE)
    x[:, :, 40, 50] = 2.0**15
    return x


def edge():
    x = constant(0)
    x[..., SIZE // 2 :] = LARGE
    return x


IMAGES = {
    'noise': lambda: (LARGE * image(SIZE, SIZE)).clamp(-LARGE, LARGE),
    'signs': lambda: LARGE * image(SIZE, SIZE).sign(),
    'bright': lambda: constant(LARGE),
    'dark': lambda: constant(-LARGE),
    'nothing': lambda: constant(0),
    'one pixel': one_pixel,
    'edge': edge,
}
#: standard deviation of what a linear layer makes of inputs with 1; what initialisation gives is
#: below 1, and 4 in all layers makes logits of thousands
WEIGHTS = {
    'initial': lambda family: family.build(awake=False),
    'trained': lambda family: family.build(),
    'large': lambda family: awaken(family.build(awake=False), gain=4.0),
    'large norms': with_large_activations,
}
#: what float16's losses are multiplied by. mmengine halves the factor as long as a gradient is
#: beyond 65504: the true gradients of these steps are up to 500, and with large norms, each of
#: which multiplies them by 120, up to 10**6
SCALES = {'initial': 64, 'trained': 64, 'large': 64, 'large norms': 2**-10}
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


class Model(nn.Module):
    """A backbone and ten classes on each of its maps; losses as the frameworks have them."""

    def __init__(self, backbone):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = backbone
        self.heads = nn.ModuleList(nn.Linear(dim, 10) for dim in backbone.out_channels)

    def forward(self, x, mode='loss'):
        self.features = self.backbone(x)
        logits = [head(f.mean((2, 3))) for head, f in zip(self.heads, self.features, strict=True)]
        labels = torch.tensor([0, 1])
        return {'loss_cls': sum(nn.functional.cross_entropy(i.float(), labels) for i in logits)}


def collecting(backbone):
    """A model whose auxiliary losses, if it has any, are collected."""
    model = Model(backbone).train()
    if hasattr(backbone, 'take_losses'):
        AuxiliaryLossHook().attach(model)
    return model


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_step_of_mixed_precision_is_finite(family, dtype, weights):
    need_cpu_autocast(dtype)
    scale = SCALES[weights] if dtype == torch.float16 else 1
    for name, make in IMAGES.items():
        model = collecting(WEIGHTS[weights](family))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        with torch.autocast('cpu', dtype=dtype):
            losses = model(make(), mode='loss')
        assert all(f.isfinite().all() for f in model.features), name
        assert all(loss.isfinite() for loss in losses.values()), name
        (scale * sum(losses.values())).backward()
        for parameter_name, p in model.named_parameters():
            assert p.grad.isfinite().all(), (name, parameter_name)
            p.grad /= scale
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters()), name


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_model_of_half_precision_is_finite(family, dtype):
    """``model.half()`` and ``model.bfloat16()``: without autocast, all weights are of that type."""
    need_cpu_type(dtype)
    for name, make in IMAGES.items():
        for weights in ('initial', 'large'):
            model = WEIGHTS[weights](family).to(dtype).train()
            outputs = model(make().to(dtype))
            assert all(f.dtype == dtype and f.isfinite().all() for f in outputs), (name, weights)
            sum(f.float().square().mean() for f in outputs).backward()
            for parameter_name, p in model.named_parameters():
                assert p.grad.isfinite().all(), (name, weights, parameter_name)


def test_the_logits_of_large_weights_pass_the_range_of_float16():
    """Otherwise these tests would say nothing."""
    from effvit_mm.models.layers.partial_attention import MixedMultiHeadAttention

    largest = []
    model = with_large_activations(FAMILIES[0]).train()
    for module in model.modules():
        if isinstance(module, MixedMultiHeadAttention):
            module.head_mlp.register_forward_pre_hook(
                lambda module, args: largest.append(float(args[0].abs().max()))
            )
    model(IMAGES['noise']())
    model(30 * image(SIZE, SIZE))
    assert max(largest) > torch.finfo(torch.float16).max


@pytest.mark.parametrize('name', ['nothing', 'edge'])
def test_blank_images_and_padding_do_not_blow_up_the_gradients_of_an_untrained_model(family, name):
    """A norm of a token that is 0 multiplies its gradient by 1000."""
    largest = {}
    for key in ('noise', name):
        model = collecting(family.build(awake=False))
        sum(model(IMAGES[key](), mode='loss').values()).backward()
        largest[key] = max(float(p.grad.abs().max()) for p in model.parameters())
    assert largest[name] < 100 * largest['noise']
