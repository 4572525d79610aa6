"""A sample of what a loader gives, and its settings, read without moving any random number generator."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from compresskit.base import randomness

SAMPLES = 32  # of a data set
BATCHES = 64  # of a list of batches
FIRST = 2  # batches of a loader that can only be iterated


def sample_of(loader: Iterable[Any]) -> list[Any]:
    """A sample of what a loader gives: batches of a list, samples of a data set, or the first batches of anything else."""
    with undisturbed(loader):
        if isinstance(loader, list | tuple):
            return [loader[i] for i in _spread(len(loader), BATCHES)]
        if isinstance(loader, DataLoader):
            dataset = loader.dataset
            if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
                return list(islice(iter(dataset), SAMPLES))
            if isinstance(dataset, Dataset | Sequence):
                return [dataset[i] for i in _spread(len(dataset), SAMPLES)]
        return list(islice(iter(loader), FIRST))


def loader_settings(loader: DataLoader[Any] | Sequence[Any]) -> dict[str, Any]:
    """The settings of a DataLoader, or of a list of batches, on which its batches depend."""
    if not isinstance(loader, DataLoader):
        return {"batches": len(loader)}
    sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if isinstance(sampler, DistributedSampler):  # the number of processes may change
        sampler = ["DistributedSampler", sampler.shuffle, sampler.seed, sampler.drop_last]
    return {
        "samples": len(loader.dataset) if isinstance(loader.dataset, Sized) else None,
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "sampler": sampler,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
    }


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` indices below a length, evenly spread, the first and the last among them."""
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)}) if length > most else list(range(length))


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Seed all generators that a loader may draw from, and leave them, and the loader's attributes, as they were."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    things = [thing for thing in (loader, dataset) if hasattr(thing, "__dict__")]
    attributes = [dict(vars(thing)) for thing in things]
    state, generators = randomness.rng_state(), randomness.generators_in(loader)
    states = [randomness.generator_state(generator) for generator in generators]
    try:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  what data sets of users draw from
        for generator in generators:
            randomness.reseed_(generator, 0)
        yield
    finally:
        for thing, before in zip(things, attributes, strict=True):
            vars(thing).clear()
            vars(thing).update(before)
        for generator, saved in zip(generators, states, strict=True):
            randomness.set_generator_state_(generator, saved)
        randomness.set_rng_state_(state)
