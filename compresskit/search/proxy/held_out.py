"""The part of the validation data that candidates are judged by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from compresskit.base.inputs import some_batches
from compresskit.base.task import Inputs, Task, batch_size, first_rows, rows_that_run
from compresskit.graph.capture import Dynamic
from compresskit.measure import run_once

EXAMPLE_ROWS = 8  # of the inputs that a candidate's stages take as an example; a finalist's take the whole first batch


@dataclass(frozen=True, kw_only=True, repr=False)
class HeldOut(Task):
    """A part of the validation data, with the example of all of them, since batches may differ in length.

    whole: inputs of the first batch, of shuffled data the first held-out one. few: its first rows, which stages run many times.
    """

    whole: Inputs
    few: Inputs

    def example(self) -> Inputs:
        return self.few


def held_out(task: Task, samples: int, dynamic: Dynamic, model: nn.Module | None = None) -> Task:
    """The task with about so many validation samples, in whole batches that are spread over all of them.

    dynamic: dimensions that may vary in the files. model: whose example has fewer rows than a batch, where it runs on them.
    """
    loader = task.batches("val")
    first, shuffled = next(iter(loader), None), isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler)
    val = list(_spread_batches(task, samples, first, shuffled=shuffled))
    if type(task) is not Task:  # a class of the user's has its own methods
        return replace(task, val=val)
    whole = few = task.inputs(val[0] if shuffled else first)
    if not isinstance(dynamic, Mapping) and 0 in dynamic and has_rows(whole):
        few = first_rows(whole, EXAMPLE_ROWS)
        few = few if model is None else rows_that_run(partial(run_once, model), few, whole)
    return HeldOut(**{each.name: getattr(task, each.name) for each in fields(task)} | {"val": val, "whole": whole, "few": few})


def has_rows(inputs: Inputs) -> bool:
    """Whether all inputs have one row a sample; of a graph, nodes and edges are not as many."""
    return len({len(value) for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.ndim}) == 1


def _spread_batches(task: Task, samples: int, first: Any, *, shuffled: bool) -> Iterable[Any]:
    """Whole validation batches of about so many samples, the same in every call: the first ones may be all of one class.

    Of a list every so-many-th batch, and so of a loader that reads one after another; of the data of a DataLoader, shuffled or
    not, every so-many-th sample, which costs no more than its first batches. One that draws a part of them gives its first.
    """
    loader, count = task.batches("val"), task.length("val")
    wanted = math.ceil(samples / max(1, batch_size(task.inputs(first))))
    if _reads_any_sample(loader) and (shuffled or wanted < count):
        return _every_so_many_th(loader, wanted * (loader.batch_size or 1))
    if wanted >= count or shuffled:
        return some_batches(task, "val", samples, "hold out")
    places = [i * count // wanted for i in range(wanted)]
    if isinstance(loader, list | tuple):
        return [loader[place] for place in places]
    return (batch for i, batch in enumerate(islice(loader, places[-1] + 1)) if i in places)


def _reads_any_sample(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader is one of torch's own whose samples are all of its data, in order or shuffled, so that any can be read."""
    if not isinstance(loader, DataLoader) or type(loader) is not DataLoader or loader.batch_size is None:
        return False  # without a size it has a batch_sampler of the user's
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler and (sampler.replacement or len(sampler) != len(sampler.data_source)):
        return False
    return type(sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) is BatchSampler


def _every_so_many_th(loader: DataLoader[Any], samples: int) -> DataLoader[Any]:
    """The loader with so many samples of its data, at equal distances, in batches of the same size; all where it has no more."""
    size, sampler = loader.batch_size or 1, loader.sampler
    assert isinstance(sampler, SequentialSampler | RandomSampler)
    held = len(loader) * size if loader.drop_last else len(sampler)
    samples = min(samples, held)
    chosen = [i * held // samples for i in range(samples)]
    same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    return DataLoader(
        loader.dataset,
        batch_sampler=[chosen[i : i + size] for i in range(0, samples, size)],
        **{name: getattr(loader, name) for name in same},
    )
