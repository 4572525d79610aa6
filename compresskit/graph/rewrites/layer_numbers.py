"""The numbers by which a KV cache tells the layers of a decoder apart, where one of them goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_LAYER = re.compile(r"(.*\.)?\d+(?=\.|$)")  # a name up to its last number


def renumber_behind_(model: nn.Module, path: str) -> None:
    """Give the layers behind a block that goes, of its kind, the number of the one before each, in place: `numbers_without`."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name, number in numbers_without(model, path).items():
        modules[name].layer_idx = number


def numbers_without(model: nn.Module, path: str) -> dict[str, int]:
    """The layers whose number changes where a block goes, by dotted name, with the number of the one before each.

    By the `layer_idx` of Hugging Face's layers their cache finds what each has stored. It asks the first layer of a kind, with a
    sliding window or without, how long that is.
    """
    modules = dict(model.named_modules())
    before = {name: module.layer_idx for name, module in modules.items() if type(vars(module).get("layer_idx")) is int}
    numbers = dict(before)
    kinds = {name: _kind_of_layer(modules, numbers, name) for name in numbers}
    gone = [name for name in numbers if f"{name}.".startswith(f"{path}.")]
    for name in sorted(gone, key=lambda name: -numbers[name]):
        number = numbers[name]
        alike = [other for other in numbers if kinds[other] == kinds[name] and _differ_once(other, name) and other not in gone]
        behind = [other for other in alike if numbers[other] > number]
        for other in sorted(behind, key=lambda other: numbers[other]):
            number, numbers[other] = numbers[other], number
    return {name: number for name, number in numbers.items() if number != before[name]}


def _kind_of_layer(
    modules: Mapping[str, nn.Module], numbers: Mapping[str, int], name: str
) -> list[tuple[str, type, dict[str, Any]]]:
    """The layer's name, and of what it is in, and of all that has a number in the same layer, the class and the flags."""
    names = name.split(".")
    layer = found[0] if (found := _LAYER.match(name)) else name
    same = [".".join(names[: i + 1]) for i in range(len(names))]
    same += [other for other in numbers if f"{other}.".startswith(f"{layer}.")]
    return [(re.sub(r"\b\d+\b", "#", each), type(modules[each]), _flags(modules[each])) for each in same]


def _differ_once(a: str, b: str) -> bool:
    """Whether two names of as many parts differ in one of them."""
    return sum(x != y for x, y in zip(a.split("."), b.split("."), strict=True)) == 1


def _flags(module: nn.Module) -> dict[str, Any]:
    """The truths and words that a module has, such as `is_sliding`, and the types of its other attributes."""
    own = {key: value for key, value in vars(module).items() if key[0] != "_" and key != "training"}
    return {key: value if isinstance(value, bool | str | None) else type(value) for key, value in own.items()}
