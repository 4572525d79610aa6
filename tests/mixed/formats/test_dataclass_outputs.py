"""Outputs in a dataclass are cast as those in tuples and dicts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compresskit.mixed import MASTER_BF16, prepare


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    parts: list[torch.Tensor]
    name: str = "x"


class Model(nn.Linear):
    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        y = super().forward(x)
        return Output(y, [y])


def test_the_fields_of_a_dataclass_are_fp32() -> None:
    model = Model(8, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    output = run(torch.randn(2, 8))
    assert type(output) is Output
    assert output.name == "x"
    assert output.logits.dtype == output.parts[0].dtype == torch.float32
