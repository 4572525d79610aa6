"""Shared fixtures. Nothing here needs a network or data that is not part of the project."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from compresskit.measure import latency
from compresskit.recipe import engine

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one thread each, and for what they start
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _short_latency_measurements(monkeypatch) -> None:
    """Recipes measure each file for a second, which is most of the time that a tiny run takes."""
    monkeypatch.setattr(engine, "latency", partial(latency, seconds=0.05))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
