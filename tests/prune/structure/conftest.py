"""Here a rule that fails ends a test; elsewhere it leaves a model less prunable, which no test would see."""

from __future__ import annotations

import pytest

from compresskit.prune.structure import propagate


@pytest.fixture(autouse=True)
def _rules_fail_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "RULE_FAILURES", ())
