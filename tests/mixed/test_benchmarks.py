"""The benchmark scripts run from end to end, on sizes that say nothing; compiling makes it minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed_cpu", "mixed_gpu", "mixed_divergence"])
def test_smoke(name) -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", "--smoke"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    failed = [line for line in done.stdout.splitlines() if "failed:" in line]
    assert not failed
    assert "MASTER_FP16" in done.stdout or name == "mixed_cpu"
