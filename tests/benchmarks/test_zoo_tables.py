"""The committed tables of the torchvision zoo."""

from __future__ import annotations

import json

import checkout
import pytest


def zoo() -> list[str]:
    text = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())
    return sorted(text["rows"])


def test_the_quantization_table_has_every_model() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert {name for name in torchvision.models.list_models() if "quantized" not in name} <= set(rows)
    assert all(row["verified"] for row in rows.values())


def test_the_pruning_table_has_every_model() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "prune_zoo.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert {name for name in torchvision.models.list_models() if "quantized" not in name} <= set(rows)
    for name, row in rows.items():
        assert row["left"] <= 0.51 * row["macs"], name
        assert row["eval"], name
        assert row["train"], name
        assert row["kind"] == "detection" or row["export"] == "yes", name


def test_the_quantization_table_gives_a_cause_for_every_failure() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert set(rows) <= set(torchvision.models.list_models())
    for name, row in rows.items():
        assert row["verified"] or row["cause"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_a_torchvision_model_is_still_verified(name) -> None:
    """The row of one model, measured again in a process of its own; the large ones take minutes and up to 8 GiB."""
    done = checkout.python(checkout.ROOT / "benchmarks" / "quantize_coverage.py", "--row", name, check=False)
    row = json.loads(done.stdout.splitlines()[-1])
    known = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"][name]
    assert row["verified"] or not known["verified"], row
    assert row["captured"] or not known["captured"]
