"""Descriptions of settings."""

from __future__ import annotations

import copy
import json

from torch import nn

import compresskit as ck
from compresskit.base.fingerprint import describe, short_hash


def test_descriptions_hold_no_addresses() -> None:
    stage = ck.Prune(budget=ck.keep(macs=0.5), finetune=ck.Train(epochs=1, objective=ck.imitate(nn.Linear(2, 2).eval())))
    text = json.dumps(describe(stage))
    assert "0x" not in text
    assert '"quantity": "macs", "kept": 0.5' in text
    assert '"parameters": 6' in text
    assert describe(stage) == describe(copy.deepcopy(stage))


def test_a_short_hash_is_of_what_a_record_says() -> None:
    record = {"b": [1, 2.5], "a": None}
    assert short_hash(record) == short_hash(dict(sorted(record.items()))) != short_hash(record | {"a": 0})
    assert len(short_hash(record)) == 16
    assert short_hash(record).startswith(short_hash(record, 8))


def test_functions_are_described_by_what_they_do() -> None:
    def make(factor, names=frozenset({"a", "b", "c"})):
        return lambda x: x * factor if x in {"a", "b", "c"} else names

    assert describe(make(1)) == describe(make(1)) != describe(make(2))
    assert describe(make(1)).partition(" ")[0].endswith(".make.<locals>.<lambda>")
    assert describe(nn.functional.relu) == "torch.nn.functional.relu"

    class Metric:
        def measure(self, x):
            return x

        def double(self, x):
            return 2 * x

    bodies = {describe(method).rpartition(" ")[2] for method in (Metric().measure, Metric().measure, Metric().double)}
    assert len(bodies) == 2

    def endless(x):
        return endless(x)

    assert describe(endless) == describe(endless)
