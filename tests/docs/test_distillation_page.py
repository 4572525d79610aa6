"""docs/distillation.md names what users type."""

from __future__ import annotations

import re

import checkout

from compresskit import distill as kd


def test_the_page_names_every_public_function_that_users_write() -> None:
    page = (checkout.ROOT / "docs" / "distillation.md").read_text()
    helpers = {
        "DistillLoss",
        "Cached",
        "MemoryBank",
        "find_taps",
        "tapped",
        "pooled_head",
        "with_indices",
        "indexed_loader",
        "mixup",
    }
    assert [name for name in (*kd.__all__, *kd.losses.__all__) if name not in helpers and name not in page] == []
    for name in re.findall(r"kd\.(\w+)", page):
        assert hasattr(kd, name)
    for name in re.findall(r"kd\.losses\.(\w+)", page):
        assert hasattr(kd.losses, name)
