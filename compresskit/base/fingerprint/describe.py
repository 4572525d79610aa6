"""JSON-ready descriptions of settings by value: what they are, and a hash of everything that they do."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compresskit.base import randomness
from compresskit.base.fingerprint.data import loader_settings, sample_of
from compresskit.base.fingerprint.functions import (
    attributes_beside_values,
    attributes_of,
    class_members,
    code_record,
    described_module,
    enclosed_values,
    function_of_library,
    globals_read,
    of_library,
    without_modules,
)
from compresskit.base.fingerprint.tensors import array_digest
from compresskit.base.settings import NO_EFFECT

DEEPEST_VALUE = 60  # values within values
LONGEST = 64  # entries of a list or mapping that are written out
MOST_SAMPLED = 1024  # entries of a list of a data set that are read
_PLAIN = (NoneType, bool, int, float, str)
_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex, slice, range, type(...), PurePath)
_NO_VALUE = (type(threading.Lock()), type(threading.RLock()), logging.Logger)
#: Keys that are texts and read as a number, as True, False or None, or as what stands for a key of another type.
_NO_TEXT = re.compile(r"""-?\d+(\.\d+)?(e[-+]\d+)?|-?inf|nan|True|False|null|['"\[{].*""", re.DOTALL)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOK_ENDS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_OF_MODULES = frozenset(
    {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl", "_graph", "meta", "compresskit_training_mode"}
)


@dataclass(frozen=True)
class Description:
    """A description of a value.

    Attributes:
        record: JSON-ready, the same in every process for the same value.
        unknown: where in it something cannot be described, and its type.
    """

    record: Any
    unknown: tuple[str, ...] = ()


def describe(value: Any) -> Any:
    """Return a JSON-ready description of settings, without memory addresses.

    Dataclasses are described by their fields, modules by their class and hashes of their state and their attributes, functions by
    their name. To functions and classes from outside torch and compresskit a hash is added of their code and of all values that
    they read.

    >>> describe(functools.partial(torch.optim.SGD, lr=0.1))
    {'call': 'torch.optim.sgd.SGD', 'lr': 0.1}
    """
    return describe_by_value(value).record


def describe_by_value(
    value: Any, where: str = "", *, weights: bool = True, modes: bool = True, data: bool = False
) -> Description:
    """Describe a value by everything that it does, and say what of it cannot be described.

    Args:
        value: anything.
        where: name of the value, for messages.
        weights: whether the values of parameters and buffers of modules count.
        modes: whether it counts if a module is in train or eval mode.
        data: whether the value is a loader; it is described by its settings and a sample of what it gives.
    """
    describer = _Describer(where, weights=weights, modes=modes)
    record = describer.loader(value) if data else describer.describe(value)
    return Description(_finite_numbers(record), tuple(dict.fromkeys(describer.unknown)))


def _finite_numbers(record: Any) -> Any:
    """A record with texts in the place of infinities and nan, for which JSON has no numbers.

    Those in parts of which a record has a hash are hashed as they are.
    """
    if isinstance(record, dict):
        return {key: _finite_numbers(entry) for key, entry in record.items()}
    if isinstance(record, list):
        return [_finite_numbers(entry) for entry in record]
    return f"float {record}" if isinstance(record, float) and not math.isfinite(record) else record


def short_hash(record: Any, length: int = 16) -> str:
    """So many hexadecimal digits of the SHA-256 of a JSON-ready record; the order of its keys does not count."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:length]


def _name(thing: Any) -> str:
    return f"{described_module(str(thing.__module__))}.{thing.__qualname__}"


class _Describer:
    """Describes values within one another; each object once, and one that holds itself by how far up it stands."""

    def __init__(self, where: str, *, weights: bool, modes: bool) -> None:
        self.weights, self.modes, self.sampled = weights, modes, False
        self.unknown: list[str] = []
        self.path = [where] if where else []
        self.above: list[int] = []
        self.known: dict[tuple[int, bool], tuple[Any, Any]] = {}  # with the object, whose address is taken as long as it lives

    def describe(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        key = (id(value), self.sampled)
        if key in self.known:
            return self.known[key][1]
        if id(value) in self.above:
            return f"{len(self.above) - self.above.index(id(value))} up"
        self.above.append(id(value))
        try:
            record = self._lost(value) if len(self.above) > DEEPEST_VALUE else self._record(value)
        finally:
            self.above.pop()
        self.known[key] = (value, record)
        return record

    def part(self, name: str, value: Any) -> Any:
        """The description of a part, whose name stands in messages."""
        self.path.append(name)
        try:
            return self.describe(value)
        finally:
            self.path.pop()

    def parts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.part(name, value) for name, value in values.items()}

    def _lost(self, value: Any) -> str:
        self.unknown.append(f"{'.'.join(self.path) or 'the value'} ({type(value).__qualname__})")
        return f"{_name(type(value))} that cannot be described"

    def _record(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, int | float | str) and not isinstance(value, Enum):
            return self._of_class(value, value)
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._of_class(value, self._array(value))
        if isinstance(value, functools.partial):
            record = {"call": self.part("func", value.func)}
            if value.args:
                record["args"] = self.part("args", value.args)
            return record | self.parts(value.keywords)
        if isinstance(value, Mapping | tuple | list | set | frozenset):
            return self._of_class(value, self._container(value))
        if isinstance(value, DataLoader):
            return self.loader(value)
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType | BuiltinMethodType | type):
            return self._callable(value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return f"{_name(type(value))}.{value.name}"
        if is_dataclass(value):
            return self._dataclass(value)
        if isinstance(value, _BY_TEXT):
            return str(value)
        if isinstance(value, bytes | bytearray):
            return f"bytes {hashlib.sha256(value).hexdigest()[:16]}"
        if isinstance(value, ModuleType):
            return described_module(value.__name__)
        if isinstance(value, _NO_VALUE):
            return _name(type(value))
        if isinstance(value, weakref.ref):
            return self.describe(value())
        if isinstance(value, property):
            return [self.describe(part) for part in (value.fget, value.fset)]
        if isinstance(value, staticmethod | classmethod | functools.cached_property):
            return self.describe(value.func if isinstance(value, functools.cached_property) else value.__func__)
        if isinstance(value, randomness.Generator) and self.sampled:
            return _name(type(value))  # a run seeds those of its loaders
        if isinstance(value, torch.Generator):
            return f"torch.Generator {value.initial_seed()}"
        if isinstance(value, torch.fx.Graph | torch.fx.Node):
            return str(value)
        if isinstance(value, torch.jit.ScriptFunction):
            return f"{value.name} {short_hash(value.code)}"
        return self._object(value)

    def _of_class(self, value: Any, record: Any) -> Any:
        """The record of a number, a text, a container or a tensor, with what a class of the user adds to its values.

        Of other classes only what a defaultdict makes and attributes of tensors, without the flags that libraries write on them.
        """
        cls, more = type(value), dict[str, Any]()
        of_user = not of_library(str(cls.__module__))
        if of_user:
            more["class"] = self.describe(cls)
        if (of_user or isinstance(value, Tensor)) and not isinstance(value, nn.Parameter | nn.Buffer):  # these are copied without
            attributes = attributes_beside_values(value)
            public = {name: entry for name, entry in attributes.items() if of_user or not name.startswith("_")}
            more |= {"attributes": self.parts(public)} if public else {}
        if isinstance(value, defaultdict):
            more["default_factory"] = self.part("default_factory", value.default_factory)
        return f"{_name(cls)} {short_hash([record, more])}" if more else record

    def _array(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return {"numpy": value.dtype.name, "value": self.part("value", value.item())}
        kind = f"{'array' if isinstance(value, np.ndarray) else 'tensor'} {str(value.dtype).removeprefix('torch.')}"
        kind = f"{kind} {tuple(value.shape)}"
        if isinstance(value, Tensor) and (not self.weights and value.requires_grad):
            return kind
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return [kind, self.part("values", value.tolist())]
        try:
            return f"{kind} {array_digest(value, sampled=self.sampled)}"
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return self._lost(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            keys = [self._key(key) for key in islice(value, self._most(len(value)))]
            entries = [self.part(key, entry) for key, entry in zip(keys, value.values(), strict=False)]
            record: Any = dict(zip(keys, entries, strict=True))
            if len(record) < len(keys):  # keys of one description, such as two objects of the same class
                record = list(zip(keys, entries, strict=True))
        else:
            entries = list(value)
            step = max(1, len(entries) // self._most(len(entries)))
            record = [self.part(str(i), entry) for i, entry in enumerate(entries[::step])]
            if isinstance(value, set | frozenset):
                record = sorted(record, key=lambda entry: json.dumps(entry, sort_keys=True))
        return record if len(value) <= LONGEST else {"entries": len(value), "hash": short_hash(record)}

    def _key(self, key: Any) -> str:
        """A key of a mapping in a record; one that reads as a key of another type is quoted."""
        if isinstance(key, str):
            return f"'{key}'" if _NO_TEXT.fullmatch(key) else str(key)
        return str(key) if isinstance(key, int | float) else json.dumps(self.describe(key))

    def _most(self, length: int) -> int:
        return min(length, MOST_SAMPLED) or 1 if self.sampled else max(length, 1)

    def _dataclass(self, value: Any) -> Any:
        declared = [field.name for field in fields(value)]
        effective = [field.name for field in fields(value) if not field.metadata.items() >= NO_EFFECT.items()]
        record = {"kind": type(value).__name__, **self.parts({name: getattr(value, name) for name in effective})}
        more = {name: entry for name, entry in (attributes_of(value) or {}).items() if name not in declared}
        if more:
            record["attributes"] = short_hash(self.parts(more))
        if not of_library(type(value).__module__):
            record["code"] = self.describe(type(value))
        return record

    def _module(self, value: nn.Module) -> Any:
        if type(value).__name__ == "OptimizedModule" and "_orig_mod" in value._modules:  # torch.compile
            return {"compiled": self.describe(value._modules["_orig_mod"])}
        state = "not compared"
        if self.weights:
            tensors = [*value.named_parameters(), *value.named_buffers()]
            state = short_hash([[name, self.part(name, tensor)] for name, tensor in tensors])
        attributes = {} if isinstance(value, torch.jit.ScriptModule) else vars(value)
        attributes = {name: v for name, v in attributes.items() if name not in _OF_MODULES and not name.endswith(_HOOK_ENDS)}
        inside = {
            "training": value.training and self.modes,
            "class": self.describe(type(value)),
            "attributes": self.parts(attributes),
            "hooks": [self.part(name, list(vars(value).get(name, {}).values())) for name in _HOOKS],
            "children": self.parts({name: child for name, child in value._modules.items() if child is not None}),
            "code": value.code if isinstance(value, torch.fx.GraphModule | torch.jit.ScriptModule) else "",
        }
        numbers = [(name, p) for name, p in value.named_parameters() if p.is_floating_point() or p.is_complex()]
        frozen = sorted(name for name, p in numbers if not p.requires_grad)
        if 0 < len(frozen) < len(numbers):  # a training leaves them as they are; where all are, as in a teacher, there is none
            inside["frozen"] = frozen
        if hooks := self._gradient_hooks(value):
            inside["gradient hooks"] = hooks
        count = sum(p.numel() for p in value.parameters())
        return {"module": _name(type(value)), "parameters": count, "state": state, "settings": short_hash(inside)}

    def _gradient_hooks(self, value: nn.Module) -> dict[str, Any]:
        """What a training does to the gradients of a module's own parameters, by name; the others are those of its children."""
        found = {}
        for name, parameter in value.named_parameters(recurse=False):
            hooks = {kind: list((getattr(parameter, kind, None) or {}).values()) for kind in _GRADIENT_HOOKS}
            if any(hooks.values()):
                found[name] = self.parts(hooks)
        return found

    def _callable(self, value: Any) -> Any:
        if isinstance(value, type):
            members = {} if of_library(value.__module__) else class_members(value)
            return f"{_name(value)} {short_hash(self.parts(members))}" if members else _name(value)
        if isinstance(value, MethodType):
            return f"{_name(value)} {short_hash([self.describe(value.__func__), self.part('self', value.__self__)])}"
        if not isinstance(value, FunctionType):  # of C
            owner = value.__self__
            bound = owner is not None and not isinstance(owner, ModuleType | type)
            name = f"{value.__module__}.{value.__qualname__}"
            return f"{name} {short_hash(self.part('self', owner))}" if bound else name
        if "_torchdynamo_orig_callable" in vars(value):  # torch.compile
            return self.describe(vars(value)["_torchdynamo_orig_callable"])
        library = function_of_library(value)
        enclosed = self.parts(without_modules(enclosed_values(value), value.__code__))
        attributes = {name: self.part(name, entry) for name, entry in vars(value).items()}
        if library and not enclosed and "__wrapped__" not in attributes:
            return _name(value)
        record = [_name(value), code_record(value.__code__), enclosed, attributes]
        if not library:
            defaults = [self.part("defaults", value.__defaults__), self.part("defaults", value.__kwdefaults__)]
            record += [defaults, self.parts(globals_read(value))]
        return f"{_name(value)} {short_hash(record)}"

    def _object(self, value: Any) -> Any:
        attributes = attributes_of(value)
        if attributes is None and self.sampled:
            return _name(type(value))  # its samples stand for it
        if attributes is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = value.__reduce_ex__(4)
            except Exception:
                return self._lost(value)
            if isinstance(made, str):
                return f"{_name(type(value))} {made}"
            if any(entry is value for entry in made[1]):
                return self._lost(value)
            return f"{_name(type(value))} {short_hash([self.part(str(i), _listed(p)) for i, p in enumerate(made)])}"
        return f"{_name(type(value))} {short_hash([self.describe(type(value)), self.parts(attributes)])}"

    def loader(self, loader: Iterable[Any]) -> Any:
        """A loader by its settings and a sample of what it gives."""
        with self._sampling():
            if isinstance(loader, DataLoader | list | tuple):
                settings: Any = self.parts(loader_settings(loader))
                if not of_library(str(type(loader).__module__)):
                    settings["class"] = self.describe(type(loader))
            else:
                settings = self._object(loader)
            try:
                sample = self.part("samples", sample_of(loader))
                if not isinstance(loader, list | tuple) and sample != self.part("samples", sample_of(loader)):
                    self.unknown.append(f"{'.'.join(self.path)} (it gives other samples every time)")
            except Exception as error:
                self.unknown.append(f"{'.'.join(self.path)} (its first samples: {type(error).__name__})")
                sample = None
        return f"{_name(type(loader))} {short_hash([settings, sample])}"

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        before, self.sampled = self.sampled, True
        try:
            yield
        finally:
            self.sampled = before


def _listed(part: Any) -> Any:
    return list(part) if isinstance(part, Iterator) else part
