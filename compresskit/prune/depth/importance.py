"""Importance of blocks: `(BlockScoring) -> {path: what is lost without the block}`, measured on data.

after_training   an estimate of what is lost once the rest was fitted or trained: no labels, one run for every block (the default)
output_error     how far the predictions move from the original model's: no labels, one run for every block
influence        how far the block's output is from its input, 1 - cosine: no labels, one run for all
first_order      the change of the loss to first order in the block's branch: labels and one backward pass for all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import call_checked, not_finite, not_finite_error, some_batches
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, Task, batch_size, first_tensor
from compresskit.distill.class_dim import class_dim
from compresskit.distill.losses.logits import match_predictions
from compresskit.graph.surgery import mode, no_attention_fastpath
from compresskit.graph.tracing import no_autocast
from compresskit.mixed.compiled_model import as_written
from compresskit.prune.depth.find_blocks import ResidualBlock
from compresskit.prune.evidence import readable
from compresskit.prune.structure.repeatable import state_restored
from compresskit.train.objective import task_losses


@dataclass(frozen=True, kw_only=True)
class BlockScoring:
    """What importances read.

    model: in eval mode, without the blocks that were removed before. blocks: those to score.
    batches: inputs. predictions: what the original model gave for each.
    task: for importances that need labels; None where there is none. samples: how many labelled samples to read.
    """

    model: nn.Module
    blocks: Sequence[ResidualBlock]
    batches: Sequence[Inputs]
    predictions: Sequence[Tensor]
    task: Task | None
    samples: int

    def predict(self, inputs: Inputs) -> Tensor:
        """The model's predictions."""
        with torch.no_grad(), no_attention_fastpath(), no_autocast():
            output = call_checked(self.model, inputs, "calibration data")
        return first_tensor(output) if self.task is None else self.task.predict(output)

    @cached_property
    def class_dim(self) -> int | None:
        """The dimension of the predictions that holds classes; None of numbers."""
        return dim_of_classes(self.model, self.predictions, self.task)

    def error(self) -> float:
        """How far the predictions are from the original model's, as `distill.losses.match_predictions` measures it."""
        return mean_error(map(self.predict, self.batches), self.predictions, self.class_dim)


def original_predictions(model: nn.Module, batches: Sequence[Inputs], task: Task | None) -> list[Tensor]:
    """A model's predictions for every batch, which others are compared with. Raises DataError where data make them nan."""
    predict, found = first_tensor if task is None else task.predict, list[Tensor]()
    for number, inputs in enumerate(batches, 1):
        with torch.no_grad(), no_attention_fastpath(), no_autocast():
            found.append(predict(call_checked(model, inputs, "calibration data")))
        if not_finite(found[-1]) == "nan" and not_finite(inputs):
            raise not_finite_error("calibration data", "a prediction of the model", [inputs], number)
    return found


def dim_of_classes(model: nn.Module, predictions: Sequence[Tensor], task: Task | None) -> int | None:
    """The dimension of predictions that holds classes, as far as the task says it; None of numbers, and where nothing does."""
    if task is None:
        return None if predictions[0].ndim == 3 else 1
    return class_dim(task, model, predictions[0], reads_loss=False).dim


def mean_error(got: Iterable[Tensor], wanted: Sequence[Tensor], dim: int | None) -> float:
    """`match_predictions` over batches, those of more rows counting more."""
    total = sum(float(match_predictions(a, b, dim=dim)) * len(b) for a, b in zip(got, wanted, strict=True))
    return total / sum(map(len, wanted))


Importance = Callable[[BlockScoring], dict[str, float]]


@contextmanager
def bypassed(model: nn.Module, blocks: Sequence[ResidualBlock]) -> Iterator[None]:
    """Remove blocks from a model while the block of code runs."""
    before = [(block, model.get_submodule(block.path)) for block in blocks]
    try:
        for block, _ in before:
            model.set_submodule(block.path, block.bypass().eval())
        yield
    finally:
        for block, module in before:
            model.set_submodule(block.path, module)


def output_error(scoring: BlockScoring) -> dict[str, float]:
    """How much the error of the predictions grows without a block.

    The error is `distill.losses.match_predictions`: KL divergence for two or more classes, else a relative squared error.
    """
    return _growth(scoring)


def after_training(scoring: BlockScoring) -> dict[str, float]:
    """How much the error of the predictions grows without a block, by BatchNorm's statistics of each batch, times its parameters.

    A training, or the fit of `refit_stream_`, brings back what a block did with the parameters that are left: one with many of
    them is worth more to the network afterwards than its error tells. `benchmarks/refit_blocks.md` has it beside `output_error`,
    `benchmarks/chain_cifar.md` in a chain.
    Where a batch has one row, which has no variance, BatchNorm stays as it is.
    """
    rows = min(batch_size(inputs) for inputs in scoring.batches)
    with batch_statistics(scoring.model) if rows > 1 else nullcontext():
        growth = _growth(scoring)
    return {block.path: growth[block.path] * max(1, block.parameters) for block in scoring.blocks}


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use the statistics of each batch, as after their re-estimation, while the block of code runs."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]
    momenta = [norm.momentum for norm in norms]
    with state_restored(model), mode(model, training=False):
        for norm in norms:
            norm.train()
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def _growth(scoring: BlockScoring) -> dict[str, float]:
    """What each block's absence adds to the error of the predictions."""
    before, errors = scoring.error(), {}
    for block in progress_bar(scoring.blocks, desc="score blocks", unit="block"):
        with bypassed(scoring.model, [block]):
            errors[block.path] = scoring.error() - before
    return errors


def influence(scoring: BlockScoring) -> dict[str, float]:
    """1 - cosine between a block's input and its output, the mean over samples (Men et al., 2403.03853)."""
    total = dict.fromkeys((block.path for block in scoring.blocks), 0.0)

    def add(path: str, before: Tensor, after: Tensor) -> None:
        total[path] += float((1 - F.cosine_similarity(before.flatten(1), after.flatten(1))).sum())

    with _watched_blocks(scoring, add):
        for inputs in scoring.batches:
            scoring.predict(inputs)
    return {path: value / sum(map(len, scoring.predictions)) for path, value in total.items()}


def first_order(scoring: BlockScoring) -> dict[str, float]:
    """|dL/dy . (x - y)| of a block y = x + f(x), the mean over batches: a Taylor expansion of the loss in its branch.

    As the criterion `taylor` (Molchanov et al., 1906.10771) with the branch as one unit.
    """
    task = scoring.task
    if task is None or task.train is None:
        raise SettingError("importance=first_order: it reads a loss; pass task=Task(train=...), or use output_error")
    total, seen = dict.fromkeys((block.path for block in scoring.blocks), 0.0), 0
    objective = task_losses(scoring.model, task)
    with readable(scoring.model):
        for number, batch in enumerate(some_batches(task, "train", scoring.samples, "score"), 1):
            kept: list[tuple[str, Tensor, Tensor]] = []
            with _watched_blocks(scoring, partial(_keep, kept)):
                loss = sum(objective(scoring.model, batch).values(), torch.zeros(()))
            if not_finite(loss):
                raise not_finite_error("importance=first_order", "the loss", [batch], number)
            grads = torch.autograd.grad(loss, [after for _, _, after in kept], allow_unused=True)
            for (path, before, after), grad in zip(kept, grads, strict=True):
                total[path] += 0.0 if grad is None else float((grad * (before - after).detach()).sum().abs())
            seen += 1
    if not seen:
        raise DataError("importance=first_order: Task(train=...) gave no batch")
    return {path: value / seen for path, value in total.items()}


def _keep(kept: list[tuple[str, Tensor, Tensor]], path: str, before: Tensor, after: Tensor) -> None:
    kept.append((path, before, after))


@contextmanager
def _watched_blocks(scoring: BlockScoring, visit: Callable[[str, Tensor, Tensor], Any]) -> Iterator[None]:
    """Call `visit(path, input, output)` for every block that runs."""

    def hook(block: ResidualBlock, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[block.argument] if isinstance(block.argument, int) else kwargs[block.argument]
        visit(block.path, before, output[block.index] if block.outputs else output)

    with ExitStack() as handles:
        for block in scoring.blocks:
            module = scoring.model.get_submodule(block.path)
            handles.callback(module.register_forward_hook(partial(hook, block), with_kwargs=True).remove)
        handles.enter_context(as_written())  # compiled code calls no hooks
        yield
