"""The committed table of families of published models."""

from __future__ import annotations

import json

import checkout


def rows() -> dict[str, dict]:
    return json.loads((checkout.ROOT / "benchmarks" / "families.json").read_text())["rows"]


def test_what_failed_has_a_reason() -> None:
    for name, row in rows().items():
        for part in ("export", "static", "dynamic"):
            if part in row:
                assert row[part].get("verified") or row[part].get("cause"), (name, part)
        if "prune" in row:
            assert row["prune"].get("left", 1) <= 0.505 or row["prune"]["cause"], name


def test_a_plan_equals_the_network_with_zeros() -> None:
    wrong = [name for name, row in rows().items() if row.get("prune", {}).get("difference", 0) > 1e-4]
    assert wrong == []


def test_every_row_says_what_it_was_measured_on() -> None:
    found = rows()
    assert len(found) > 90
    assert all(row["commit"] and (row.get("variant") or row["error"]) for row in found.values())
