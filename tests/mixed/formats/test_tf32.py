"""TF32 is set by the policy inside a run, and torch's settings are restored after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import FP32, MASTER_BF16, TF32, level, prepare


def settings():
    backends = torch.backends
    return [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision]


class Spy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), []

    def forward(self, x):
        self.seen.append(settings())
        y = self.layer(x)
        y.register_hook(lambda grad: self.seen.append(settings()))
        if x.shape[0] > 5:
            raise RuntimeError("too many")
        return y


@pytest.mark.filterwarnings("ignore:TF32 is of NVIDIA GPUs:UserWarning")
@pytest.mark.parametrize(
    ("policy", "inside"),
    [(FP32, ["ieee"] * 3), (TF32, ["tf32"] * 3), (MASTER_BF16, None), (level("O0"), None)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_tf32_is_set_in_forward_and_backward_and_restored(policy, inside) -> None:
    before = settings()
    model = Spy()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    run.backward(run(torch.ones(1, 2)).sum())
    assert model.seen == [inside or before] * 2
    with pytest.raises(RuntimeError, match="too many"):
        run(torch.ones(6, 2))
    assert settings() == before


def test_tf32_on_other_hardware_warns() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="TF32 is of NVIDIA GPUs from Ampere on: here products are fp32 as without it"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), TF32)
    with pytest.raises(SettingError, match="tf32 must be True, False or None for torch's own setting, got 'yes'"):
        replace(FP32, tf32="yes")
