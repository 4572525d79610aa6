"""Shared fixtures. Nothing here needs a network or data that is not part of the project."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests in folders can import oracles and networks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
