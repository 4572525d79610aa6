"""Where random numbers come from: the global generators of torch, numpy and Python, and those that loaders hold."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

LISTED = 64  # entries of a list that is searched for generators: transforms, not samples
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def captured() -> dict[str, Any]:
    """The global generators as tensors and plain values."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  what data loaders of users draw from
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": _of_numpy(numpy), "python": _of_python(random.getstate())}


def restore_(state: dict[str, Any]) -> None:
    """Put the global generators where they were."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    restore_plain_(state)


def restore_plain_(state: dict[str, Any]) -> None:
    """Put numpy's and Python's global generators where they were."""
    np.random.set_state(_to_numpy(state["numpy"]))  # noqa: NPY002
    random.setstate(_to_python(state["python"]))


def forked(state: Tensor, salt: int = 0) -> Tensor:
    """A state of torch's generator that follows from another and has nothing else in common with it."""
    parent = torch.Generator()
    parent.set_state(state)
    seed = int(torch.randint(2**62, (), generator=parent)) ^ (salt * 0x9E3779B97F4A7C15 & (2**62 - 1))
    return torch.Generator().manual_seed(seed).get_state()


def held_by(loader: Any) -> list[Generator]:
    """Generators that a loader, its samplers, its data set or their transforms hold in their attributes, each once."""
    found: dict[int, Generator] = {}
    _look(loader, found, set(), 6)
    return list(found.values())


def _look(thing: Any, found: dict[int, Generator], seen: set[int], depth: int) -> None:
    if id(thing) in seen or depth < 0 or isinstance(thing, type | ModuleType | Tensor | np.ndarray):
        return
    seen.add(id(thing))
    if isinstance(thing, Generator):
        found[id(thing)] = thing
    elif isinstance(thing, list | tuple):
        for part in thing if len(thing) <= LISTED else ():
            _look(part, found, seen, depth - 1)
    else:
        for part in getattr(thing, "__dict__", {}).values():
            _look(part, found, seen, depth - 1)


def seed_(generator: Generator, seed: int) -> None:
    """Start a generator afresh."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def state_of(generator: Generator) -> Any:
    """The state of a generator, as tensors and plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _of_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _of_numpy(generator.get_state(legacy=False))
    return _of_python(generator.getstate())


def put_(generator: Generator, state: Any) -> None:
    """Give a generator a state that `state_of` took."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _to_numpy(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    else:
        generator.setstate(_to_python(state))


def _of_numpy(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _of_numpy(value) for key, value in state.items()}
    return torch.from_numpy(state.astype(np.int64)) if isinstance(state, np.ndarray) else state


def _to_numpy(state: Any, dtype: type[np.unsignedinteger[Any]] = np.uint64) -> Any:
    if isinstance(state, dict):
        kind = np.uint32 if state.get("bit_generator") == "MT19937" else dtype
        return {key: _to_numpy(value, kind) for key, value in state.items()}
    return state.numpy().astype(dtype) if isinstance(state, Tensor) else state


def _of_python(state: Any) -> dict[str, Any]:
    version, numbers, gauss = state
    return {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss}


def _to_python(state: dict[str, Any]) -> Any:
    return state["version"], tuple(state["numbers"].tolist()), state["gauss"]
