"""The buffers of a half model: shared ones stay shared, and those that forward writes into are named."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from compresskit.mixed import AMP_BF16, MASTER_BF16, MASTER_FP16, prepare


class Holder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("again", table)


class Sharing(nn.Module):
    """A buffer under four names, in two modules."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        table = torch.tensor([0.1], dtype=dtype)
        self.layer, self.a, self.b = nn.Linear(4, 2, dtype=dtype), Holder(table), Holder(table)

    def forward(self, x):
        return self.layer(x) + self.a.table

    def tables(self):
        return [self.a.table, self.a.again, self.b.table, self.b.again]


class Counting(nn.Module):
    """Writes into a buffer in the way that `write` names."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.inner, self.write = nn.Linear(4, 2), nn.Module(), write
        self.inner.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mean", torch.full((1,), 0.1))

    def forward(self, x):
        if self.write == "in place":
            self.inner.steps += 1
        elif self.write == "by data":
            self.inner.steps.data += 1
        elif self.write == "anew":
            self.inner.steps = self.inner.steps + 1
        return self.layer(x - self.mean)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(run, steps):
    for _ in range(steps):
        run.backward(run(torch.ones(3, 4)).square().mean())
        run.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_that_modules_share_stays_one_tensor(dtype) -> None:
    model = Sharing(dtype)
    first = model.a.table.float()
    run = prepare(model, sgd(model), MASTER_BF16)
    assert all(table is model.a.table for table in model.tables())
    assert model.a.table.dtype == torch.bfloat16
    train(run, 2)
    run.finish()
    assert all(table is model.a.table for table in model.tables())
    assert torch.equal(model.a.table, first)
    run = prepare(model, sgd(model), MASTER_BF16)
    model.a.table.fill_(3.0)
    run.finish()
    assert all(table is model.a.table for table in model.tables())
    assert model.b.table.tolist() == [3.0]


@pytest.mark.parametrize("keep", ["a", "b.table"])
def test_a_shared_buffer_that_one_module_keeps_in_fp32_stays_one_tensor(keep) -> None:
    model = Sharing()
    prepare(model, sgd(model), replace(MASTER_BF16, keep_fp32=(keep,)))
    assert all(table is model.a.table for table in model.tables())
    assert model.a.table.dtype == torch.float32


@pytest.mark.parametrize("write", ["in place", "by data", "anew"])
def test_buffers_that_forward_writes_into_are_named(write) -> None:
    model = Counting(write)
    run = prepare(model, sgd(model), MASTER_BF16)
    with pytest.warns(
        UserWarning, match="MASTER_BF16: forward writes into the buffer inner.steps .1 in all.* stops at 256"
    ) as said:
        train(run, 300)
    assert len(said) == 1
    assert "keep_fp32=(*policy.keep_fp32, 'inner.steps')" in str(said[0].message)
    assert said[0].filename == __file__
    assert run.finish().inner.steps.item() == 256
    model = Counting(write)
    run = prepare(model, sgd(model), replace(MASTER_BF16, keep_fp32=(*MASTER_BF16.keep_fp32, "inner.steps")))
    train(run, 300)
    assert run.finish().inner.steps.item() == 300


@pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
def test_the_watch_of_buffers_ends_after_the_first_passes() -> None:
    model = Counting("not yet")
    run = prepare(model, sgd(model), MASTER_FP16)
    with torch.no_grad():
        model.eval()
        for _ in range(5):  # do not count
            run(torch.ones(3, 4))
    model.train()
    train(run, 2)
    model.write = "in place"
    with pytest.warns(UserWarning, match="which is float16: a counter stops at 2048"):
        train(run, 1)
    model = Counting("not yet")
    run = prepare(model, sgd(model), MASTER_FP16)
    train(run, 3)
    model.write = "in place"
    train(run, 1)


def test_constants_and_fp32_buffers_are_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy, write in ((MASTER_BF16, ""), (AMP_BF16, "in place")):
            model = Counting(write)
            run = prepare(model, sgd(model), policy)
            model.mean.copy_(model.mean.clone())  # not in a forward pass
            train(run, 4)
            run.finish()


def test_a_buffer_that_the_model_took_out_does_not_end_finish() -> None:
    model = Counting("")
    run = prepare(model, sgd(model), MASTER_BF16)
    model.inner.steps = None
    assert run.finish().mean.dtype == torch.float32
