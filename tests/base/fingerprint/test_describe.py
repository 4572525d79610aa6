"""Descriptions of settings."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import compresskit as ck
from compresskit.base.fingerprint import describe, describe_by_value, short_hash


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


def test_numbers_that_are_not_finite_are_texts_that_are_told_from_one_another() -> None:
    values = [math.inf, -math.inf, math.nan, "inf", 1.5]
    assert describe(values) == ["float inf", "float -inf", "float nan", "inf", 1.5]
    assert describe(functools.partial(nn.Linear, (np.float64("inf"), {"a": np.float32("nan")}))) == {
        "call": "torch.nn.modules.linear.Linear",
        "args": [["float inf", {"a": {"numpy": "float32", "value": "float nan"}}]],
    }


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


def with_attribute(value, scale):
    value.scale = scale
    return value


def of_class(base, scale):
    """A class of the user with a method that gives a scale."""
    return type("Mine", (base,), {"__module__": "mine", "scaled": (lambda self: 1.0) if scale == 1 else (lambda self: 2.0)})


def named(scale):
    class Named(NamedTuple):
        factor: float

        def scaled(self):
            return self.factor if scale == 1 else 2 * self.factor

    return Named(1.0)


CLASSES = {
    "dict": lambda scale: of_class(dict, scale)(a=1),
    "defaultdict": lambda scale: of_class(defaultdict, scale)(float, a=1),
    "list": lambda scale: of_class(list, scale)([1]),
    "tuple": lambda scale: of_class(tuple, scale)([1]),
    "set": lambda scale: of_class(set, scale)([1]),
    "float": lambda scale: of_class(float, scale)(1.0),
    "int": lambda scale: of_class(int, scale)(1),
    "text": lambda scale: of_class(str, scale)("a"),
    "named tuple": named,
    "tensor": lambda scale: torch.ones(2).as_subclass(of_class(torch.Tensor, scale)),
    "array": lambda scale: np.ones(2).view(of_class(np.ndarray, scale)),
    "attribute of a list": lambda scale: with_attribute(of_class(list, 1)([1]), scale),
    "attribute of a float": lambda scale: with_attribute(of_class(float, 1)(1.0), scale),
    "attribute of a tensor": lambda scale: with_attribute(torch.ones(2), scale),
    "what a defaultdict makes": lambda scale: defaultdict((lambda: 1.0) if scale == 1 else (lambda: 2.0), a=1),
    "key of another type": lambda scale: {1: 2.0} if scale == 1 else {"1": 2.0},
    "key that is nothing": lambda scale: {None: 2.0} if scale == 1 else {"null": 2.0},
    "key of a class": lambda scale: {float: 2.0} if scale == 1 else {json.dumps(describe(float)): 2.0},
    "key in quotes": lambda scale: {"1": 2.0} if scale == 1 else {"'1'": 2.0},
    "entry beside one of another type": lambda scale: {1: scale, "1": 3},
    "entry beside one of the same description": lambda scale: {(lambda: 0): scale, (lambda: 0): 3},
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_of_the_user_counts_beside_the_values_that_it_holds(kind) -> None:
    one, again, other = (describe_by_value(CLASSES[kind](scale)) for scale in (1, 1, 2))
    assert one.unknown == other.unknown == ()
    assert one == again != other
    json.dumps(one.record)


def test_plain_values_are_told_by_their_values_alone() -> None:
    """As before there were records of classes: a stage of which nothing has changed is reused."""
    plain = {"a": [1, 2.0, None], "0.weight": (True, "x"), "x1": {2, 1}}
    assert describe(plain) == {"a": [1, 2.0, None], "0.weight": [True, "x"], "x1": [1, 2]}
    assert describe({1: "a", 0.5: "b", None: "c"}) == {"1": "a", "0.5": "b", "null": "c"}
    assert describe([OrderedDict(a=1), Counter("a"), torch.Size([2]), np.float64(0.5)]) == [{"a": 1}, {"a": 1}, [2], 0.5]
    tensor = describe(torch.ones(2))
    assert tensor == f"tensor float32 (2,) {tensor[-16:]}"
    assert describe(nn.Parameter(torch.ones(2))) == describe(nn.Buffer(torch.ones(2))) == tensor


def test_a_list_of_batches_of_a_class_of_the_user_counts_with_it() -> None:
    one, other = (describe_by_value(of_class(list, scale)([torch.ones(2)]), data=True) for scale in (1, 2))
    assert one != other
    loaders = [of_class(DataLoader, scale)([1.0, 2.0]) for scale in (1, 1, 2)]
    one, again, other = (describe_by_value(loader, data=True) for loader in loaders)
    assert one == again != other


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_count(kind) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = [describe(model)]
    for hook in (lambda grad: 0 * grad, lambda grad: 2 * grad):
        handle = getattr(model[0].weight, kind)(hook)
        found += [describe(model)]
        handle.remove()
    assert describe(model) == found[0]
    assert len({short_hash(record) for record in found}) == 3
