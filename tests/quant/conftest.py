"""What the tests of quantization share."""

from __future__ import annotations

import pytest

from compresskit.quant.effort import improve, least_noise
from compresskit.quant.numerics.targets import Target


@pytest.fixture(autouse=True)
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Efforts time nothing, so that what a test finds does not depend on the machine."""
    monkeypatch.setattr(Target, "runs_here", property(lambda self: False))


@pytest.fixture(autouse=True)
def few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Efforts train nothing for more than a few steps, unless a test asks for `all_steps`."""
    if "all_steps" not in request.fixturenames:
        monkeypatch.setattr(improve, "TUNING_STEPS", {"balanced": 1, "best": 1})
        monkeypatch.setattr(least_noise, "STEPS", 20)


@pytest.fixture
def all_steps() -> None:
    """Efforts train for as long as they do for users, where a test is about what that brings."""
