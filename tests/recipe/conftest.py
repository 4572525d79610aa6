"""A finished run that the tests of this folder read, or copy before they change it."""

from __future__ import annotations

import pytest
import short_run
import torch
from networks import images_task

import compresskit as ck


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """(folder, task, result) of `short_run.run`."""
    torch.manual_seed(0)
    out, task = tmp_path_factory.mktemp("runs") / "first", images_task(ck, samples=64)
    return out, task, short_run.run(out, task)
