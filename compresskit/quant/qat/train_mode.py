"""What a float model computes in train mode alone: random numbers, and the parameters that the gradient reaches through them.
Also those that it reaches in eval mode, and the graph does not have.
"""

from __future__ import annotations

import linecache
import os
import random
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.randomness import generators_kept
from compresskit.base.task import Inputs, call, copied_tensors, repeated_rows
from compresskit.graph.quantized import float_names
from compresskit.graph.surgery import copy_model, mode
from compresskit.quant.model import Quantized

_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_LIBRARY = str(Path(__file__).parents[2]) + os.sep
#: Arguments that say how much is dropped at random: where they are 0, nothing is.
_DROPPED = ("p", "dropout", "dropout_p")
_TRAINING = ("train", "training")
#: Parts of the names of operators that drop at random what a layer's rate says.
_DROPPING = ("bernoulli", "dropout", "attention", "rnn", "gru", "lstm")
_ROWS = 2  # BatchNorm in train mode wants more than one value for each channel
_ON_HOST = "some line that draws from Python's random or numpy.random"


@dataclass(frozen=True, kw_only=True)
class RandomPlace:
    """Where a forward pass draws random numbers.

    module: dotted name of the innermost module that is running, or the model's class. line: `model.py:12 (x = x + noise)`, the
        innermost line of the user's code, "" where all code is torch's. drops: whether it is dropout, by its operator.
    """

    module: str
    line: str
    drops: bool


@dataclass(frozen=True, kw_only=True)
class TrainMode:
    """What is in train mode alone, or in the float model alone.

    places: where random numbers are drawn, in the order of the run. on_host: whether some are of Python or numpy.
    parameters: names of those that the gradient of an output reaches there, but that of the same output in eval mode does not.
        None where the outputs are others in eval mode, as those of a detector or of auxiliary heads.
    constant: names of those that the gradient reaches in eval mode, but that were no parameters of the graph: it has values that
        the model computed of them before.
    """

    places: tuple[RandomPlace, ...] = ()
    on_host: bool = False
    parameters: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

    def random_places(self, said: Collection[str]) -> list[str]:
        """Where it is random, each line once, but for the dropout of modules whose names are given."""
        modules: dict[str, list[str]] = {}
        for place in self.places:
            if not (place.drops and place.module in said):
                modules.setdefault(place.line or repr(place.module), []).append(place.module)
        found = [
            line if line == repr(names[0]) else f"{line} of {names[0]!r}" + " and others" * (len(set(names)) > 1)
            for line, names in modules.items()
        ]
        return found + [_ON_HOST] * self.on_host


def train_mode_alone(model: nn.Module, example: Inputs, quantized: Quantized) -> TrainMode:
    """Compare a run of a model in train mode with one in eval mode, each of few rows; nothing is changed.

    Where the model cannot be copied, nothing is found; where it wants more than the example in train mode, such as targets, no
    more than constants.

    Args:
        model: the float model. example: its inputs.
        quantized: the graph that is trained: a parameter that the gradient reaches there is not left out.
    """
    with suppress(Exception), generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's code, which said it to the user before
        copied = copy_model(model)
        trained = evaluated = None
        for inputs in _rows_to_try(example):
            with suppress(Exception):
                evaluated = _recorded_run(copied, inputs, training=False)
                trained = _recorded_run(copied, inputs, training=True)  # on the same rows, since shapes are compared
                break
        if evaluated is None:
            return TrainMode()
        here: dict[str, set[str]] | None = None
        with suppress(Exception):  # code that takes no gradient in eval mode
            here = _reached_in_graph(quantized, example)
        names = [name for name, _ in copied.named_parameters()]
        read = {quantized.tied.get(name, name) for name in quantized.origin.read}  # what is merged into others is among them
        constant = _lost_parameters(evaluated.reached, here or {}) - read
        found = TrainMode(constant=tuple(name for name in names if name in constant))
        if trained is None:
            return found
        known = {(place.module, place.line) for place in evaluated.places}
        lost = _reached_alone(trained, evaluated)
        if here is not None:  # experts that these rows do not reach
            lost &= _lost_parameters(trained.reached, here)
        return replace(
            found,
            places=tuple(place for place in trained.places if (place.module, place.line) not in known),
            on_host=trained.on_host and not evaluated.on_host,
            parameters=tuple(name for name in names if name in lost),
        )
    return TrainMode()


def _rows_to_try(example: Inputs) -> Iterator[Inputs]:
    """Two rows where all inputs have the same number of rows, then the example: nodes that edges name cannot be cut."""
    rows = {len(v) if v.ndim else 0 for v in pytree.tree_leaves(example) if isinstance(v, Tensor)}
    if len(rows) == 1 and 0 not in rows:
        yield repeated_rows(example, _ROWS)
    yield example


@dataclass(frozen=True, kw_only=True)
class _RecordedRun:
    """places, on_host: as in `TrainMode`. shapes: of each output, None of what is no tensor. reached: output -> parameters that
    its gradient reaches.
    """

    places: list[RandomPlace]
    on_host: bool
    shapes: dict[str, torch.Size | None]
    reached: dict[str, set[str]]


def _recorded_run(model: nn.Module, inputs: Inputs, *, training: bool) -> _RecordedRun:
    recorder, before = _RandomOperators(model), _host_state()
    with torch.enable_grad(), mode(model, training=training), recorder:
        output = call(model, copied_tensors(inputs))
    reached = _reached_parameters(output, {id(p): name for name, p in model.named_parameters()})
    on_host = _host_state() != before
    leaves = pytree.tree_flatten_with_path(output)[0]
    shapes = {pytree.keystr(path): v.shape if isinstance(v, Tensor) else None for path, v in leaves}
    return _RecordedRun(places=recorder.places, on_host=on_host, shapes=shapes, reached=reached)


def _host_state() -> tuple[Any, ...]:
    _, words, position, *_ = np.random.get_state()  # noqa: NPY002  models draw from the global state
    return random.getstate(), np.asarray(words).tobytes(), position


class _RandomOperators(TorchDispatchMode):
    """Notes where operators draw random numbers; those that drop a fraction of 0 do not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root = type(model).__name__
        self.names = {id(module): name or self.root for name, module in model.named_modules()}
        self.places: list[RandomPlace] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs):
            self.places.append(self._place(any(kind in str(func) for kind in _DROPPING)))
        return func(*args, **kwargs)

    def _place(self, drops: bool) -> RandomPlace:
        module, line = None, ""
        inside = (found for found in traceback.walk_stack(None) if found[0].f_code.co_filename != __file__)
        for frame, number in inside:
            file = frame.f_code.co_filename
            if file.startswith(_OF_LIBRARY):
                break  # which called the model
            if not line and not file.startswith((_OF_TORCH, "<")):
                line = f"{file}:{number} ({linecache.getline(file, number).strip()})"
            if module is None:
                module = self.names.get(id(frame.f_locals.get("self")))
        return RandomPlace(module=module or self.root, line=line, drops=drops)


def _drops_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that can be random is not, as attention with a dropout of 0, or a layer of its own eval mode."""
    arguments = func._schema.arguments
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)}
    return any(given.get(name) == 0.0 for name in _DROPPED if isinstance(given.get(name), float)) or any(
        given.get(name) is False for name in _TRAINING
    )


def _reached_parameters(output: Any, names: Mapping[int, str]) -> dict[str, set[str]]:
    """Output, by its place -> names of the parameters that its gradient reaches; outputs that have no gradient are left out."""
    leaves = pytree.tree_flatten_with_path(output)[0]
    found = {pytree.keystr(path): v.grad_fn for path, v in leaves if isinstance(v, Tensor) and v.grad_fn is not None}
    return {place: {names[key] for key in _leaves_behind(function) if key in names} for place, function in found.items()}


def _leaves_behind(function: Any) -> Iterator[int]:
    """Ids of the tensors for which a gradient is accumulated."""
    seen, pending = {function}, [function]
    while pending:
        here = pending.pop()
        if type(here).__name__ == "AccumulateGrad":
            yield id(here.variable)
        for before, _ in here.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                pending.append(before)


def _reached_alone(trained: _RecordedRun, evaluated: _RecordedRun) -> set[str]:
    """Parameters that an output reaches in train mode alone.

    Outputs of other places or shapes cannot be compared, nor can one that reaches parameters in eval mode alone: it is another.
    """
    if trained.shapes != evaluated.shapes:
        return set()
    same = {place: names for place, names in evaluated.reached.items() if names <= trained.reached.get(place, set())}
    return _lost_parameters(trained.reached, same)


def _lost_parameters(there: Mapping[str, set[str]], here: Mapping[str, set[str]]) -> set[str]:
    """Parameters that an output reaches there but not here; outputs that are not in both do not count."""
    return {name for place in there if place in here for name in there[place] - here[place]}


def _reached_in_graph(quantized: Quantized, example: Inputs) -> dict[str, set[str]]:
    graph = copy_model(quantized)
    names = float_names(graph)
    with torch.enable_grad(), mode(graph, training=True):
        output = call(graph, copied_tensors(example))
    return _reached_parameters(output, {id(p): names[name] for name, p in graph.named_parameters()})
