"""Shared fixtures. Nothing here needs a network or data that is not part of the project."""

from __future__ import annotations

import os

import pytest
import torch
from quick import make_quick

make_quick()

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one thread each, and for what they start
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
