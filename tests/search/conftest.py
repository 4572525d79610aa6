"""A network and its task for searches, which do not measure here which convolutions are faster as one, and tune quantized
candidates for a few steps: that takes seconds, and is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import networks
import pytest
import torch
from formula import figures_by_formula

import compresskit as ck
from compresskit.search.proxy.workshop import Workshop


@pytest.fixture(autouse=True, scope="module")
def _no_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workshop, "_ranked_runs", lambda self, least: ())
        patch.setattr("compresskit.quant.effort.improve.TUNING_STEPS", {"balanced": 4, "best": 8})
        yield


@pytest.fixture(scope="module")
def task() -> ck.Task:
    torch.manual_seed(0)
    return networks.images_task(ck)


@pytest.fixture(scope="module")
def model(task: ck.Task) -> torch.nn.Module:
    return ck.Train(epochs=3)(networks.build(networks.WideChain), task)


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are not made: their figures come from a formula. What is chosen of them is run."""
    monkeypatch.setattr(Workshop, "_measured", figures_by_formula)
