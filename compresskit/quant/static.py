"""Static quantization: ranges from calibration batches, no training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from tqdm import tqdm

from compresskit.errors import DataError, SettingError
from compresskit.quant.choose import slower_in_integers
from compresskit.quant.insert import Quantized, build
from compresskit.quant.observers import MinMax, Observer
from compresskit.quant.targets import X86, Target
from compresskit.task import Inputs, Task


def quantize_static(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    target: Target = X86,
    observer: Callable[[], Observer] = MinMax,
    skip: tuple[str, ...] = (),
    choose: Literal["rules", "measure"] = "rules",
) -> Quantized:
    """A quantized copy of a float model, its ranges found on batches of inputs (tuples or dicts).

    choose: "rules" puts in integers what the target's rules say; "measure" then takes back to float what runs faster so on this
    machine, timed in ONNX Runtime (some seconds for each part that is tried).

    The first batch is also the example that the model is captured with. Raises DataError where there is no batch.
    """
    check_choose(choose, "quantize_static")
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise DataError("quantize_static: no calibration batch was given; a few hundred samples show the ranges")
    floating = slower_in_integers(model, first, target, skip=skip) if choose == "measure" else {}
    quantized = build(model, first, target, observer, skip=skip, floating=floating)
    quantized.calibrate_(itertools.chain([first], batches))
    quantized.keep_masked_()
    return quantized


def check_choose(choose: str, where: str) -> None:
    """Raise SettingError for anything but the two ways of placing."""
    if choose not in ("rules", "measure"):
        raise SettingError(f'{where}(choose=...): wanted "rules" or "measure", got {choose!r}')


def calibration_inputs(task: Task, samples: int) -> Iterable[Inputs]:
    """Inputs of calibration batches until `samples` are reached, with a progress bar."""
    from compresskit.task import batch_size

    seen = 0
    with tqdm(total=samples, desc="calibrate", disable=None, leave=False, unit="sample") as bar:
        for batch in task.batches("calibration"):
            inputs, _ = task.split(batch)
            yield inputs
            rows = batch_size(inputs)
            seen += rows
            bar.update(rows)
            if seen >= samples:
                return


@dataclass(frozen=True, kw_only=True)
class StaticQuant:
    """Quantize after training.

    target: where the model will run.
    observer: makes one range observer for each rounded value.
    samples: how many calibration samples to look at, from `Task(calibration=...)` or the training data.
    skip: dotted names of modules that stay float.
    choose: "rules" or "measure", see `quantize_static`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    target: Target = X86
    observer: Callable[[], Observer] = MinMax
    samples: int = 512
    skip: tuple[str, ...] = ()
    choose: Literal["rules", "measure"] = "rules"

    def __post_init__(self) -> None:
        check_choose(self.choose, "StaticQuant")
        if self.samples < 1:
            raise SettingError(f"StaticQuant(samples=...): wanted a whole number >= 1, got {self.samples}")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device).eval()
        inputs = calibration_inputs(task, self.samples)
        return quantize_static(model, inputs, target=self.target, observer=self.observer, skip=self.skip, choose=self.choose)
