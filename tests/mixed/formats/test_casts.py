"""Casts: inputs, outputs, buffers, and what stays in fp32 inside a half model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mixed_runs import USER_WARNINGS
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.mixed import (
    MASTER_BF16,
    Policy,
    prepare,
)
from compresskit.mixed.formats import policy as policies

pytestmark = USER_WARNINGS


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def test_weights_and_buffers_are_cast_and_batch_norm_stays() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.norm = nn.LSTM(4, 4, batch_first=True), nn.BatchNorm1d(4)
            self.register_buffer("table", torch.randn(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            return self.norm(self.rnn(x)[0][:, -1] + self.table)

    model = Net()
    run = prepare(model, sgd(model), MASTER_BF16)
    assert {p.dtype for p in model.rnn.parameters()} == {model.table.dtype} == {torch.bfloat16}
    assert model.norm.weight.dtype == model.norm.running_var.dtype == torch.float32
    assert model.count.dtype == torch.int64
    run.backward(run(torch.randn(3, 5, 4)).square().sum())
    run.step()
    assert run.finish().table.dtype == torch.float32


def test_inputs_are_cast_and_outputs_are_fp32() -> None:
    class Boxes:
        def __init__(self, values):
            self.values = values

        def to(self, dtype):
            return Boxes(self.values.to(dtype))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, pair, boxes, array):
            assert boxes.values.dtype == pair[0].dtype == torch.bfloat16
            assert pair[1]["mask"].dtype == torch.bool
            assert array.dtype == np.float64
            return [self.layer(pair[0]), {"sum": boxes.values.sum(), "index": torch.arange(3)}]

    model = Net()
    run = prepare(model, sgd(model), MASTER_BF16)
    pair = (torch.randn(3, 2), {"mask": torch.ones(2, dtype=torch.bool)})
    out = run(pair, Boxes(torch.randn(2)), np.zeros(2))
    assert out[0].dtype == out[1]["sum"].dtype == torch.float32
    assert out[1]["index"].dtype == torch.int64


def test_nested_inputs_and_keyword_inputs_are_cast() -> None:
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, *, scale):
            assert batch["x"].dtype == torch.bfloat16
            assert batch["index"].dtype == torch.int64
            return {"y": self.layer(batch["x"]) * scale[0], "index": batch["index"]}

    model = Odd()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    out = run({"x": torch.randn(3, 2), "index": torch.arange(3)}, scale=[torch.ones(1)])
    assert out["y"].dtype == torch.float32
    assert out["index"].dtype == torch.int64


def test_constant_buffers_are_restored_exactly() -> None:
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
            self.register_buffer("seen", torch.zeros(1))
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            self.seen += 1
            return self.layer(x - self.mean)

    model = Normalised()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    run.backward(run(torch.randn(4, 3)).sum())
    run.step()
    run.finish()
    assert torch.equal(model.mean, torch.tensor([0.485, 0.456, 0.406]))
    assert model.seen.item() == 1


BF16 = torch.bfloat16


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (policies.BATCH_NORMS, {"2.1.weight", "2.1.bias"}),
        (("2",), {"2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}),
        ((nn.LayerNorm, "3"), {"1.weight", "1.bias", "3.weight", "3.bias"}),
        (("0.bias", *policies.BATCH_NORMS), {"0.bias", "2.1.weight", "2.1.bias"}),
        ((), set()),
    ],
)
def test_modules_stay_in_fp32_by_class_and_by_name(keep, kept) -> None:
    model = small()
    policy = Policy(name="P", param_dtype=BF16, master=True, keep_fp32=keep)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == kept
    if "0.bias" not in kept:  # a layer with weights of two dtypes is for models that expect it
        run.backward(run(torch.randn(8, 4)).square().mean())
        run.step()
    run.finish()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Attending(nn.Module):
    """A module of modules, and one of a class that torch builds of others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Head(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))


@pytest.mark.parametrize(("kind", "name"), [(nn.MultiheadAttention, "attention"), (Head, "head")])
def test_all_in_a_module_kept_by_class_stays_in_fp32_as_by_name(kind, name) -> None:
    for keep in (kind, name):
        model = Attending()
        run = prepare(model, sgd(model), Policy(name="P", param_dtype=BF16, master=True, keep_fp32=(keep,)))
        assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {
            n for n, _ in model.named_parameters() if n.startswith(f"{name}.")
        }
        run.backward(run(torch.randn(2, 3, 4)).square().mean())
        run.step()
        run.finish()


class Listed(nn.Module):
    """Calls the parts of a list, and not the list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(4, 4), nn.ModuleList([Head(), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("keep", [nn.ModuleList, "parts"])
def test_the_parts_of_a_list_stay_in_fp32(keep) -> None:
    model = Listed()
    run = prepare(model, sgd(model), Policy(name="P", param_dtype=BF16, master=True, keep_fp32=(keep,)))
    assert {p.dtype for p in model.parts.parameters()} == {torch.float32}
    assert model.first.weight.dtype == BF16
    run.backward(run(torch.randn(2, 4)).square().mean())
    run.step()
    run.finish()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Positive(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(weight)


def test_what_a_kept_weight_is_computed_from_stays_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.utils.parametrize.register_parametrization(model[1], "weight", Positive())
    nn.utils.parametrizations.spectral_norm(model[2])
    policy = Policy(name="P", param_dtype=BF16, master=True, keep_fp32=(*policies.BATCH_NORMS, "2"))
    for keep in (policy.keep_fp32, (*policies.BATCH_NORMS, nn.Linear)):
        run = prepare(model, sgd(model), Policy(name="P", param_dtype=BF16, master=True, keep_fp32=keep))
        assert {p.dtype for p in [*model[1].parameters(), *model[2].parameters()]} == {torch.float32}
        run.backward(run(torch.randn(8, 4)).square().mean())
        run.step()
        run.finish()


def test_what_a_batch_norm_calls_gets_half_values_and_is_half() -> None:
    class Conditional(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(4)
            self.scale = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale(x)

    model = nn.Sequential(nn.Linear(4, 4), Conditional())
    run = prepare(model, sgd(model), MASTER_BF16)
    assert (model[1].weight.dtype, model[1].scale.weight.dtype) == (torch.float32, BF16)  # type: ignore[union-attr]
    run.backward(run(torch.randn(8, 4)).square().mean())
    run.step()


def test_a_module_kept_by_name_gets_fp32_inputs() -> None:
    seen = []

    class Custom(nn.Module):
        def forward(self, x, *, scale):
            seen.append((x.dtype, scale.dtype))
            return x.exp() * scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.op, self.out = nn.Linear(4, 4), Custom(), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.op(self.lin(x), scale=x))

    model = Net()
    run = prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Policy(name="P", param_dtype=BF16, master=True, keep_fp32=("op",))
    )
    run(torch.randn(2, 4))
    assert seen == [(torch.float32, torch.float32)]


def test_keep_fp32_of_an_unknown_name_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    policy = Policy(name="P", param_dtype=BF16, master=True, keep_fp32=("weight",))
    with pytest.raises(ModelError, match=r"keep_fp32 names 'weight', which the model does not have; near it: 0.weight"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_quantizers_stay_in_fp32_under_half_policies() -> None:
    """A quantizer's scale in bf16 would be off by up to 0.4 %, and an observer's range with it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    batches = [(torch.randn(8, 3, 8, 8),) for _ in range(3)]
    quantized = ck.quant.quantize_static(model.eval(), batches)
    kept = [module for module in quantized.modules() if getattr(module, "keeps_fp32", False)]
    state = {name: b.clone() for name, b in quantized.named_buffers()}
    assert kept
    run = prepare(quantized, torch.optim.SGD(quantized.parameters(), lr=0.0), MASTER_BF16)
    assert {b.dtype for module in kept for b in module.buffers() if b.is_floating_point()} <= {torch.float32}
    assert any(p.dtype == torch.bfloat16 for p in quantized.parameters())
    out = run(batches[0][0])
    run.backward(out.square().mean())
    run.step()
    finished = run.finish()
    assert all(torch.equal(state[name], b) for name, b in finished.named_buffers() if "scale" in name or "zero" in name)
    torch.testing.assert_close(out, finished(batches[0][0]), atol=0.1, rtol=0.1)
