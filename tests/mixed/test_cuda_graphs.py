"""CUDA graphs: state stays in place, and settings that a graph would freeze are refused."""

from __future__ import annotations

import pytest
import torch
from mixed_runs import FIXED_SCALE, USER_WARNINGS
from torch import nn

from compresskit import mixed
from compresskit.base.errors import SettingError
from compresskit.mixed import (
    MASTER_BF16,
    prepare,
)

pytestmark = USER_WARNINGS


def pointers(run):
    tensors = [*run.model.parameters(), run._weights.steps, run.skipped]
    tensors += [h.remainder for h in run._weights.halves if h.remainder is not None]
    tensors += [v for s in run.scalers.values() for v in (s.scale, s.clean, s.tolerance, s.skipped, s.found_inf)]
    tensors += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("name", ["MASTER_BF16", "MASTER_FP16", "SPLIT_BF16", "KAHAN_BF16", "SR_BF16", "AMP_FP16"])
def test_a_step_moves_no_state_to_new_memory(name) -> None:
    """A replay writes where the recording wrote: nothing that a step carries over may move to new memory."""
    model = nn.Linear(4, 4)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True), getattr(mixed, name))
    for i in range(3):
        run.backward(run(torch.randn(2, 4)).sum())
        run.step()
        if i == 0:
            before = pointers(run)
    assert pointers(run) == before


def test_settings_that_a_graph_would_freeze_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(mixed.run, "capturing_cuda_graph", lambda device: True)

    def run(policy, make, **settings):
        model = nn.Linear(2, 2)
        made = prepare(model, make(model.parameters(), **settings), policy, scaler=None)
        made.backward(made(torch.ones(1, 2)).sum())
        return made

    rate = torch.tensor(0.1)
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    with pytest.raises(
        SettingError, match="lr=0.1 of SGD would be frozen into the graph; make the optimizer with lr=torch.tensor"
    ):
        run(MASTER_BF16, sgd, lr=0.1).step()
    with pytest.raises(SettingError, match="AdamW counts its steps on the host; make it with capturable=True"):
        run(MASTER_BF16, adamw, lr=rate, fused=True).step()
    with pytest.raises(SettingError, match="SGD reads the overflow flag back; make it with fused=True"):
        run(FIXED_SCALE, sgd, lr=rate).step()
    good = run(FIXED_SCALE, sgd, lr=rate, fused=True)
    pushed = []
    good._overflow.last.push = pushed.append
    good.step()
    assert not pushed  # no event may be asked for
    assert good.stats()["skipped"] == 0
