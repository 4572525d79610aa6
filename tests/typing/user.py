"""What a user writes, checked by `mypy --strict` against the installed package: every result has a type. Never executed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import compresskit as ck

model = nn.Sequential(nn.Linear(8, 4))
batches: list[tuple[Tensor, Tensor]] = []
inputs = [(x,) for x, _ in batches]
task = ck.Task(train=batches, val=batches)

recipe = ck.Recipe(
    ck.Train(
        epochs=2, optimizer=partial(torch.optim.SGD, lr=0.1), schedule=ck.lr.Cosine(end=0.1), precision=ck.mixed.MASTER_BF16
    ),
    ck.Distill(student=lambda: nn.Sequential(nn.Linear(8, 4)), epochs=1),
    ck.Prune(budget=ck.keep(macs=0.5), criterion=ck.prune.criteria.taylor, steps=2, schedule=ck.prune.schedules.Cubic()),
    ck.Sparsify(budget=ck.remove(weights=0.9)),
    ck.QAT(epochs=1, target=ck.quant.X86, objective=ck.imitate()),
)
result = recipe.run(model, task, out="runs/typed")
assert_type(result, ck.Result)
assert_type(result.model, nn.Module)
assert_type(result.onnx, Path | None)

plan = ck.prune.plan_channels(model, (torch.zeros(2, 8),), budget=ck.keep(macs=0.5))
assert_type(plan, ck.prune.Plan)
assert_type(ck.prune.apply_(model, plan), nn.Module)

quantized = ck.quant.quantize_static(model, inputs, observer=ck.quant.observers.MinMax)
assert_type(quantized, ck.quant.Quantized)
trainable = ck.quant.prepare_qat(model, inputs)
assert_type(trainable, ck.quant.Quantized)
path = ck.export_onnx(quantized, "model.onnx", (torch.zeros(2, 8),))
assert_type(path, Path)
assert_type(ck.verify_onnx(path, quantized, inputs).passed, bool)

run = ck.mixed.prepare(model, torch.optim.AdamW(model.parameters()), ck.mixed.MASTER_BF16)
assert_type(run, ck.mixed.Run)
run.backward(torch.zeros(()))
assert_type(ck.distill.losses.soft_targets(torch.zeros(2, 4), torch.zeros(2, 4)), Tensor)
assert_type(ck.count_macs(model, (torch.zeros(2, 8),)), int)
assert_type(ck.evaluate(model, task), float)
assert_type(ck.load(model, "saved"), nn.Module)


class Largest:
    """A user's own criterion: one score for each row."""

    def __call__(self, slices: ck.prune.criteria.Slices) -> Tensor:
        return slices.weight.abs().amax(1)


def squared(student: Tensor, teacher: Tensor) -> Tensor:
    """A user's own loss."""
    return (student - teacher).square().mean()


ck.Prune(budget=ck.keep(parameters=0.5), criterion=Largest())
ck.imitate(loss=squared)
