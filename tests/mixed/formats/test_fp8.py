"""Linear layers in fp8: results against a plain loop and torch's product, layers that stay out, hardware that is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import oracles
import pytest
import torch
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import FP8, FP32, MASTER_BF16, advise, prepare, to_float8
from compresskit.mixed.formats import fp8

EMULATED = replace(FP8, fp8="emulated")
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


def eighths(values, dtype):
    """What a tensor becomes in fp8 with one scale, in float64, by the oracle."""
    factor = values.abs().max() / FORMATS[dtype][2]
    return oracles.float8((values / factor).double(), *FORMATS[dtype]) * factor.double()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_values_are_the_nearest_of_fp8_and_the_largest_fills_the_range(dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 40) * torch.logspace(-6, 6, 40)
    small, factor = fp8.to_fp8(values, dtype)
    assert small.float().abs().max() == FORMATS[dtype][2]
    torch.testing.assert_close(small.double() * factor.double(), eighths(values, dtype), rtol=1e-6, atol=0)
    zeros, one = fp8.to_fp8(torch.zeros(4), dtype)
    assert not zeros.float().any()
    assert one == 1
    bad, factor = fp8.to_fp8(torch.tensor([1.0, float("inf")]), dtype)
    assert not torch.isfinite(bad.float() * factor).any()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_the_emulated_product_is_the_hardware_call(out) -> None:
    """`torch._scaled_mm` runs on a CPU too, slowly; on a GPU its sums differ in order alone."""
    torch.manual_seed(0)
    (a, a_factor), (b, b_factor) = (
        fp8.to_fp8(torch.randn(32, 64), fp8.FORWARD_DTYPE),
        fp8.to_fp8(torch.randn(48, 64), fp8.FORWARD_DTYPE),
    )
    got, wanted = (fp8.scaled_matmul(a, b, (a_factor, b_factor), out, mode=mode) for mode in ("emulated", "hardware"))
    assert got.dtype == wanted.dtype == out
    torch.testing.assert_close(got, wanted, rtol=2**-7 if out == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [16, 7])
def test_forward_and_gradients_equal_the_plain_loop(rows) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    x, grad = torch.randn(rows, 32), torch.randn(rows, 48)
    inside = fp8.Fp8Linear(layer, "emulated")
    own = x.clone().requires_grad_()
    y = inside(own.view(1, rows, 32))
    y.backward(grad.view(1, rows, 48))
    x8, w8, g8 = (
        eighths(x, fp8.FORWARD_DTYPE),
        eighths(layer.weight.detach(), fp8.FORWARD_DTYPE),
        eighths(grad, fp8.BACKWARD_DTYPE),
    )
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y[0].double(), x8 @ w8.T + layer.bias.double(), **near)
    torch.testing.assert_close(own.grad.double(), g8 @ w8, **near)
    torch.testing.assert_close(layer.weight.grad.double(), g8.T @ x8, **near)
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def test_what_is_kept_for_backward_takes_one_byte_a_value() -> None:
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append((t.numel(), t.element_size())), t)[1], lambda t: t):
        fp8.Fp8Linear(nn.Linear(64, 64), "emulated")(torch.randn(32, 64))
    assert sorted(sizes) == [(1, 4), (1, 4), (32 * 64, 1), (64 * 64, 1)]


def test_parameters_keep_their_names_and_undo_brings_the_layers_back() -> None:
    model = net()
    before, layers, state = dict(model.named_parameters()), list(model), copy.deepcopy(model.state_dict())
    done = to_float8(model, fp8="emulated")
    assert done.layers == ("0", "2")
    assert done.skipped == {"4": "out_features = 10 is no multiple of 16"}
    assert str(done) == "fp8: 2 of 3 linear layers\n  not 4: out_features = 10 is no multiple of 16"
    assert all(before[name] is p for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    model.eval()
    done.undo()
    assert all(a is b for a, b in zip(model, layers, strict=True))
    assert not model[0].training


def test_what_stays_out_is_named_with_its_reason() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"a": nn.Linear(16, 16), "b": Odd(16, 16), "c": nn.Linear(16, 16), "d": nn.Sequential(nn.Linear(16, 16))}
    )
    model["c"].register_forward_hook(lambda *_: None)
    done = to_float8(model, fp8="emulated", skip=("d",))
    assert done.layers == ("a",)
    assert done.skipped == {
        "b": "it is a Odd, which may compute something else",
        "c": "it has forward hooks, which would be lost",
        "d.0": "asked for",
    }
    for model, skip, message in (
        (net(), ("9",), "skip names '9', which the model does not have"),
        (
            nn.Linear(16, 16),
            (),
            r"no layer of the model can run in fp8 \(Linear: it is the model itself.*wrap it in nn.Sequential",
        ),
        (nn.Sequential(nn.ReLU()), (), "it has no nn.Linear"),
    ):
        with pytest.raises(ModelError, match=message):
            to_float8(model, fp8="emulated", skip=skip)


def test_fp8_is_refused_where_the_hardware_lacks_it(monkeypatch) -> None:
    model = net()
    with pytest.raises(
        SettingError, match="needs an NVIDIA GPU of compute capability 8.9 or more, the model is on cpu; use MASTER"
    ):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), FP8)
    assert model[0].weight.dtype == torch.float32
    assert type(model[0]) is nn.Linear
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability in ((9, 0), (8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        fp8.check_fp8("hardware", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(SettingError, match="A100 has 8.0; use MASTER_BF16, or fp8='emulated'"):
        fp8.check_fp8("hardware", cuda)
    with pytest.raises(SettingError, match="fp8 must be None, 'hardware' or 'emulated', got 'e4m3'"):
        replace(FP8, fp8="e4m3")


def trained(policy, steps=60):
    model = net()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), policy)
    text = repr(run)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = nn.functional.cross_entropy(run(x), x[:, :10].argmax(1))
        run.backward(loss)
        run.step()
    run.finish()
    assert all(type(layer) is nn.Linear for layer in (model[0], model[2], model[4]))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return loss.item(), text


def test_the_policy_trains_as_bf16_does_and_hands_plain_layers_back() -> None:
    (eighth, text), (half, _), (full, _) = (trained(policy) for policy in (EMULATED, MASTER_BF16, FP32))
    assert "fp8 products in linear layers (emulated)" in text
    assert "not 4: out_features = 10 is no multiple of 16" in text
    assert half == pytest.approx(full, abs=0.02)
    assert eighth == pytest.approx(full, abs=0.08)
    assert eighth != half  # it did compute in other numbers


def test_layers_kept_in_fp32_are_not_put_into_fp8() -> None:
    model = net()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), replace(EMULATED, keep_fp32=("2",)))
    assert run.float8.layers == ("0",)
    assert run.float8.skipped["2"] == "asked for"
    run.backward(run(torch.randn(16, 32)).square().mean())
    run.step()
    assert model[2].weight.dtype == torch.float32


def test_advice_names_sizes_that_fp8_cannot_take() -> None:
    layers = advise(net(), torch.randn(16, 32)).layers
    assert [layer.unaligned_fp8 for layer in layers] == [(), (), ("out_features",)]


class Head(nn.Sequential):
    pass


def test_layers_inside_of_a_kind_that_stays_in_fp32_stay() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Head(nn.Linear(16, 16)))
    found = fp8.convert_by_policy(model, replace(EMULATED, keep_fp32=(Head,)))
    assert (found.layers, found.skipped) == (("0",), {"1.0": "asked for"})
