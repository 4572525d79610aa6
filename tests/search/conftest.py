"""Searches of these tests do not measure which convolutions are faster as one, which takes seconds and depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compresskit.search.proxy import Workshop


@pytest.fixture(autouse=True, scope="module")
def _no_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workshop, "_ranked_runs", lambda self, least: ())
        yield
