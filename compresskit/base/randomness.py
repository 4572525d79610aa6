"""State of random number generators: the global ones of torch, numpy and Python, and those that data loaders hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST_LIST = 64  # a longer list is not searched for generators: it holds samples, not transforms
DEEPEST = 6  # attributes of attributes that are searched
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain values."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  what data loaders of users draw from
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": _of_numpy(numpy), "python": _of_python(random.getstate())}


def set_rng_state_(state: dict[str, Any]) -> None:
    """Set the global generators to a state that `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    set_host_rng_state_(state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators back, at the end of the block, to where they were before it."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state_(state)


def set_host_rng_state_(state: dict[str, Any]) -> None:
    """Set numpy's and Python's global generators to a state that `rng_state` returned; torch's is not changed."""
    np.random.set_state(_to_numpy(state["numpy"]))  # noqa: NPY002
    random.setstate(_to_python(state["python"]))


def fork_rng_state(state: Tensor, salt: int = 0) -> Tensor:
    """Return a new state for a torch generator, seeded from another state.

    Args:
        state: of a torch generator, which is not changed.
        salt: another number gives another state.
    """
    parent = torch.Generator()
    parent.set_state(state)
    seed = int(torch.randint(2**62, (), generator=parent, device="cpu")) ^ (salt * 0x9E3779B97F4A7C15 & (2**62 - 1))
    return torch.Generator().manual_seed(seed).get_state()


def generators_in(loader: Any) -> list[Generator]:
    """Return the generators in the attributes of a loader, its samplers, its data set and their transforms, each once."""
    generators: dict[int, Generator] = {}
    _search(loader, generators, set(), DEEPEST)
    return list(generators.values())


def _search(thing: Any, generators: dict[int, Generator], seen: set[int], depth: int) -> None:
    if id(thing) in seen or depth < 0 or isinstance(thing, type | ModuleType | Tensor | np.ndarray):
        return
    seen.add(id(thing))
    if isinstance(thing, Generator):
        generators[id(thing)] = thing
    elif isinstance(thing, list | tuple):
        for part in thing if len(thing) <= LONGEST_LIST else ():
            _search(part, generators, seen, depth - 1)
    else:
        for part in vars(thing).values() if hasattr(thing, "__dict__") else ():
            _search(part, generators, seen, depth - 1)


def reseed_(generator: Generator, seed: int) -> None:
    """Seed a generator."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def seed_generators_(seed: int, *loaders: Any) -> None:
    """Seed the global generators of torch, numpy and random, and those that data loaders hold; None is no loader."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  users' data loaders draw from it
    for loader in loaders:
        for generator in generators_in(loader):
            reseed_(generator, seed)


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator as tensors and plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _of_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _of_numpy(generator.get_state(legacy=False))
    return _of_python(generator.getstate())


def set_generator_state_(generator: Generator, state: Any) -> None:
    """Set a generator to a state that `generator_state` returned."""
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
    return {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"), "gauss": gauss}


def _to_python(state: dict[str, Any]) -> Any:
    return state["version"], tuple(state["numbers"].tolist()), state["gauss"]
