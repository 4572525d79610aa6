"""The benchmark scripts run from end to end, on sizes that say nothing; compiling makes it minutes."""

from __future__ import annotations

import checkout
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed_cpu", "mixed_gpu", "mixed_divergence", "sources"])
def test_smoke(name) -> None:
    done = checkout.python(checkout.ROOT / "benchmarks" / f"{name}.py", "--smoke")
    failed = [line for line in done.stdout.splitlines() if "failed:" in line]
    assert not failed
    assert "MASTER_FP16" in done.stdout or name in ("mixed_cpu", "sources")
