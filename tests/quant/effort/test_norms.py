"""Channels of layer norms are evened out: the float model computes the same, and a norm that is read elsewhere stays as it is."""

from __future__ import annotations

import copy
import re

import oracles
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.surgery import copy_model
from compresskit.quant import X86, Bits, quantize_static, repair
from compresskit.quant.build import build_quantized
from compresskit.quant.calibration.smoothquant import even_norms_, norms_of
from compresskit.quant.numerics.observers import MinMax


class Attention(nn.Module):
    """Tokens (N, T, 32): one norm for q, k and v, a norm for the two layers behind it, and, last, a norm for the head."""

    def __init__(self, *, post: bool = False, tied: bool = False, bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.post, self.enter = post, nn.Linear(24, 32)
        self.one, self.two, self.last = (nn.LayerNorm(32, elementwise_affine=affine) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=bias) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=bias), nn.Linear(32, 5)
        if tied:
            self.k.weight = self.q.weight

    def forward(self, x):
        x = self.enter(x)
        y = self.one(x)
        mixed = (self.q(y) @ self.k(y).transpose(1, 2) / 32**0.5).softmax(2) @ self.v(y)
        x = (y if self.post else x) + self.out(mixed)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.two(x))))
        return self.head(self.last(x)).mean(1)


def uneven(**how: bool) -> nn.Module:
    """Channels of two norms are scaled and shifted, and the layers that read them undo it, as it is found in trained networks."""
    torch.manual_seed(0)
    model = Attention(**how).eval()
    with torch.no_grad():
        for norm, readers in ((model.one, (model.q, model.k, model.v)), (model.two, (model.up,))):
            if norm.weight is None:
                continue
            factor, shift = torch.logspace(-1, 1.5, 32)[torch.randperm(32)], torch.zeros(32)
            shift[:4] = torch.tensor([20.0, -15.0, 9.0, 3.0]) * factor[:4]
            norm.weight.mul_(factor)
            norm.bias.copy_(norm.bias * factor + shift)
            for weight in {id(reader.weight): reader.weight for reader in readers}.values():
                weight.div_(factor)
            for reader in readers:
                if reader.bias is not None:
                    reader.bias.sub_(reader.weight @ shift)
    return model


def tokens(n: int = 32) -> tuple[torch.Tensor]:
    return (torch.randn(n, 9, 24, generator=torch.Generator().manual_seed(n)),)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_function_is_kept_and_all_channels_get_one_range(bias, batch) -> None:
    model, x = uneven(bias=bias).double(), (tokens()[0].double(),)
    captured = capture(copy_model(model), x)
    assert even_norms_(captured, [x, (x[0][:7] * 0.5,)], 1.0) == 3
    other = tokens(batch)[0].double()
    with torch.no_grad():
        torch.testing.assert_close(captured.module(other), model(other), rtol=1e-9, atol=1e-9)
        state = captured.module.state_dict()
        entered = model.enter(torch.cat([x[0], x[0][:7] * 0.5]))
        y = nn.functional.layer_norm(entered, (32,), state["one.weight"], state["one.bias"], model.one.eps).flatten(0, 1)
    low, high = y.amin(0), y.amax(0)
    largest = torch.maximum(high, -low)
    torch.testing.assert_close(largest, largest[:1].expand(32), rtol=1e-6, atol=0)
    if bias:
        torch.testing.assert_close(low, -high, rtol=1e-6, atol=1e-6)  # one zero point, in the middle
    assert model.one.weight.max() > 300 * model.one.weight.min()


@pytest.mark.parametrize(
    ("how", "name", "why"),
    [
        ({"post": True}, "one", "other operators than products by a weight read it, too"),
        ({"tied": True}, "one", "the weight .*weight is used elsewhere, too"),
        ({"affine": False}, "two", "it has no weight and bias that are its own"),
    ],
)
def test_a_norm_to_which_it_does_not_apply_is_named(how, name, why) -> None:
    model = uneven(**how)
    links, others = norms_of(capture(copy_model(model), tokens()).module)
    assert list(others) == ([name] if "affine" not in how else ["one", "two", "last"])
    assert len(links) == 3 - len(others)
    assert re.search(why, others[name])


def test_norms_that_share_their_parameters_stay_as_they_are() -> None:
    model = uneven()
    model.two = model.one
    links, others = norms_of(capture(copy_model(model), tokens()).module)
    assert len(links) == 1
    assert set(others.values()) == {"it has no weight and bias that are its own"}


def test_effort_keeps_it_where_it_pays_and_names_it(tmp_path) -> None:
    model = uneven()
    before = copy.deepcopy(model.state_dict())
    found = quantize_static(model, [tokens(64)], smooth=False, effort="balanced", float_macs=0)
    remedy = next(remedy for remedy in found.origin.remedies if remedy.name.startswith("even channels of one, two, last"))
    assert remedy.kept
    assert remedy.after > remedy.before + 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    path = ck.export_onnx(found, tmp_path / "q.onnx", tokens(2))
    assert ck.verify_onnx(path, found, [tokens(7), tokens(1)]).passed


def test_a_network_without_norms_has_no_such_remedy() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    found = quantize_static(model, [torch.randn(64, 8)], effort="balanced")
    assert not [remedy for remedy in found.origin.remedies if remedy.name.startswith("even channels")]


def test_repair_plans_it_and_lists_what_it_leaves_out() -> None:
    _, report = repair(uneven(post=True), [tokens(64)], smooth=False, drop=99)
    planned = next(planned for planned in report.plan if planned.name.startswith("even channels"))
    assert planned.name == "even channels of two, last (not one: other operators than products by a weight read it, too)"
    _, report = repair(uneven(affine=False), [tokens(64)], smooth=False, drop=99)
    planned = next(planned for planned in report.plan if planned.name.startswith("even channels"))
    assert "not two: it has no weight and bias that are its own" in planned.skipped
    _, report = repair(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(64, 8)], drop=99)
    assert next(planned for planned in report.plan if planned.name == "even channels of layer norms").skipped == "there are none"


def test_smoothing_looks_at_the_bits_of_the_weights() -> None:
    """Factors that suit 8 bits make weights of 3 bits worse; chosen for 3 bits, they lose no more than none at all."""
    model, x = uneven(), tokens(64)
    with torch.no_grad():
        wanted = model(*x)
        lost = {}
        for smooth in (True, False):
            got = quantize_static(model, [x], smooth=smooth, bits=Bits(weights=3))(*x)
            lost[smooth] = float((got - wanted).square().sum() / wanted.square().sum())
    assert lost[True] < lost[False]


@pytest.mark.parametrize(("padding", "norms"), [([0, 0, 0, 0], 1), ([0, 0, 0, 1], 0)])
def test_tokens_may_be_rolled_but_not_padded(padding, norms) -> None:
    """Windows of attention roll tokens; a token of zeros that is added would not be shifted with the others."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(nn.functional.pad(self.norm(x), padding).roll(2, 1).flatten(0, 1))

    model, x = Windows().eval(), torch.randn(3, 5, 8) * torch.logspace(-1, 1, 8)
    captured = capture(copy_model(model), (x,))
    assert even_norms_(captured, [(x,)], 1.0) == norms
    with torch.no_grad():
        torch.testing.assert_close(captured.module(x), model(x))


READ_ELSEWHERE = "other operators than products by a weight read it, too"


def published(name: str) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    small = {"depths": (2, 1), "img_size": 64, "window_size": 4} if "swin" in name else {"depth": 2, "img_size": 64}
    model = timm.create_model(name, pretrained=False, num_classes=10, **small).eval()
    with torch.no_grad():
        for block in model.modules():
            if not hasattr(block, "norm1"):
                continue
            for norm, reader in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                factor = torch.logspace(-1, 1.2, norm.weight.numel())[torch.randperm(norm.weight.numel())]
                shift = torch.zeros_like(factor)
                shift[:4] = 5 * factor[:4]
                norm.weight.mul_(factor)
                norm.bias.copy_(norm.bias * factor + shift)
                reader.weight.div_(factor)
                reader.bias.sub_(reader.weight @ shift)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norms", "others"),
    [
        ("vit_tiny_patch16_224", 5, {}),
        ("deit_tiny_patch16_224", 5, {}),
        ("swin_tiny_patch4_window7_224", 7, dict.fromkeys(("patch_embed.norm", "norm"), READ_ELSEWHERE)),
    ],
)
def test_published_networks_lose_less_with_even_norms(name, norms, others) -> None:
    model, x = published(name), (torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3)),)
    found, left = norms_of(capture(copy_model(model), x).module)
    with torch.no_grad():
        wanted, quality = model(*x), {}
        for even in (False, True):
            adjust = (lambda captured: even_norms_(captured, [x], 1.0)) if even else None
            quantized = build_quantized(model, x, X86, MinMax, adjust=adjust).eval()
            quantized.calibrate_([x])
            quality[even] = float(oracles.sqnr(wanted, quantized(*x)))
    assert quality[True] > quality[False] + 6
    assert (len(found), left) == (norms, others)
