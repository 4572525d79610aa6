"""Rows of the seeds' checklist that no other file holds: what is cast, who owns what, what is handed back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from compresskit.mixed import AMP_FP16, MASTER_BF16, MASTER_FP16, LossScaler, prepare

pytestmark = pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
EIGHT = replace(MASTER_FP16, loss_scale=8.0)


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def test_n1_n2_the_numbers_of_fp16() -> None:
    info = torch.finfo(torch.float16)
    assert (info.max, info.smallest_normal, info.eps) == (65504, 2.0**-14, 2.0**-10)
    assert torch.tensor(2.0**-24).half() > 0
    assert torch.tensor(2.0**-26).half() == 0
    assert (torch.tensor(1.0).half() + torch.tensor(1e-4).half()) == 1


def test_n10_masters_add_half_of_the_weights_memory() -> None:
    model = nn.Linear(64, 64, bias=False)
    run = prepare(model, sgd(model), MASTER_BF16)
    full = 64 * 64 * 4
    masters = sum(m.untyped_storage().nbytes() for m in run.masters())
    assert masters + model.weight.untyped_storage().nbytes() == 1.5 * full


def test_b1_weights_and_buffers_go_half_and_batch_norm_stays() -> None:
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


def test_b2_b3_inputs_are_cast_and_outputs_are_fp32_before_the_loss() -> None:
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


def test_b4_b5_masters_keep_the_groups_and_frozen_weights_never_move() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters()), "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    run = prepare(model, optimizer, MASTER_BF16)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(2, 0.5, 0), (2, 0.1, 0.1)]
    before = run.named_masters()["0.weight"].clone()
    for frozen in (True, False):  # unfreezing later needs nothing else
        model[0].weight.requires_grad_(not frozen)
        run.backward(run(torch.randn(4, 2)).square().sum())
        run.step()
        assert torch.equal(before, run.named_masters()["0.weight"]) is frozen


def test_b7_a_missing_gradient_gives_the_master_none() -> None:
    """Zeros in its place would let weight decay and momentum move it."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    run = prepare(model, sgd(model, weight_decay=0.5), MASTER_BF16)
    before = run.named_masters()["1.weight"].clone()
    run.backward(model[0](torch.ones(1, 2).bfloat16()).sum())
    run.step()
    assert torch.equal(before, run.named_masters()["1.weight"])


def test_b8_b23_masters_are_copied_back_and_gradients_dropped() -> None:
    model = nn.Linear(4, 2)
    run = prepare(model, sgd(model), EIGHT)
    run.backward(run(torch.randn(3, 4)).sum())
    assert model.weight.grad is not None
    run.step()
    assert all(p.grad is None for p in model.parameters())
    for name, master in run.named_masters().items():
        assert torch.equal(model.get_parameter(name), master.half())


def test_b11_the_loss_is_scaled_in_training_only_and_not_where_it_is_logged() -> None:
    model = nn.Linear(2, 1)
    run = prepare(model, sgd(model), EIGHT)
    loss = run(torch.ones(1, 2)).sum()
    value = loss.item()
    run.backward(loss)
    assert loss.item() == value
    assert model.bias.grad.item() == 8.0
    with torch.no_grad():
        assert run(torch.ones(1, 2)).sum().item() == value


def test_b12_the_model_handed_back_is_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), MASTER_BF16)
    for _ in range(4):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
    assert model.weight.item() == 1.0
    assert run.finish().weight.item() == pytest.approx(1.0004, abs=1e-7)


def test_b19_clipping_and_a_static_scale_work_together_with_a_state() -> None:
    model = nn.Linear(2, 2)
    run = prepare(model, sgd(model), AMP_FP16, clip=1.0, scaler=lambda: LossScaler.fixed(512.0))
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.stats()["scale"] == 512.0
    assert run.state_dict()["scalers"][""]["scale"] == 512.0
