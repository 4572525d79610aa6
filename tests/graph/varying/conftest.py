"""What the tests of sizes that vary share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quick import as_torch_traces


@pytest.fixture(autouse=True)
def _all_conditions() -> Iterator[None]:
    """What a trace decides by sizes is what these tests are about."""
    with as_torch_traces():
        yield
