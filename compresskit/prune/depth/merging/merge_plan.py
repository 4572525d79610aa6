"""A plan of merges: it prints, serializes, and applies to models of one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.base.files import sealed, unsealed
from compresskit.graph.masks import masks_of
from compresskit.prune.depth.merging.merge_runs import Convolution, ConvolutionRun, gather_, merge_

SEALED_RUNS = ("runs", "sizes")  # what a plan of merges changes, whose digest it has


@dataclass(frozen=True, kw_only=True)
class MergeLine:
    """What a plan knows of one run it merges: what is lost without its activations, and what one convolution saves."""

    name: str
    importance: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Runs of convolutions to merge, not yet merged; `print(plan)` lists them, `plan.apply_(model)` merges them.

    runs: what is merged. lines: why, in the same order. unit: of the lines' costs.
    kernels: of the one convolution that each becomes. sizes: shapes of the weights of the layers.
    macs, macs_before: multiply-accumulates of one sample. convolutions: how many the model has before.
    locked: name of a run that stays -> reason. note: what was measured of the exported file, where the budget is one.
    """

    runs: tuple[ConvolutionRun, ...]
    lines: tuple[MergeLine, ...]
    unit: str
    kernels: tuple[tuple[int, ...], ...]
    sizes: dict[str, tuple[int, ...]]
    macs: int
    macs_before: int
    convolutions: int
    locked: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs that are merged."""
        return tuple(run.name for run in self.runs)

    def __str__(self) -> str:
        gone = sum(len(run.layers) - 1 for run in self.runs)
        head = f"{self.convolutions - gone} of {self.convolutions} convolutions stay; {self.macs / max(1, self.macs_before):.1%}"
        head += f" of {self.macs_before / 1e6:.2f} M MACs" + (f"; {self.note}" if self.note else "")
        rows = [
            f"  {run.name}: one convolution of {' x '.join(map(str, kernel))}, {line.cost:.4g} {self.unit} saved, importance"
            f" {line.importance:.3g}"
            for run, kernel, line in zip(self.runs, self.kernels, self.lines, strict=True)
        ]
        return "\n".join([head, *rows, *(f"  {name} stays: {reason}" for name, reason in self.locked.items())])

    def apply_(self, model: nn.Module, *, merge: bool = True) -> nn.Module:
        """Merge the runs, in place, and return the model; it keeps its class. In the places of what goes are `Bypass` modules.

        Args:
            model: the model that the plan was made for, or another of the same class and sizes.
            merge: False removes the activations alone and moves the padding: the layers of each run then stand in the place of
                its last one (`Unmerged`) and can be trained apart, until `depth.merge_(model)` makes them one.

        Raises ModelError for another model, which stays as it was.
        """
        if masks_of(model) is not None:
            raise ModelError(
                f"{type(model).__name__} has masks, which are for its present layers; merge layers first, then Sparsify"
            )
        modules = dict(model.named_modules())
        for name, shape in self.sizes.items():
            layer = modules.get(name)
            found = tuple(layer.weight.shape) if isinstance(layer, Convolution) else None
            if found != shape:
                raise ModelError(
                    f"{name}: the plan was made for a convolution with weights {shape}, this {type(model).__name__} has"
                    f" {found or 'no such layer'}; apply the plan to a model of the same class"
                )
        if missing := [path for run in self.runs for path in run.emptied if path not in modules]:
            raise ModelError(
                f"{missing[0]}: {type(model).__name__} has no such module; apply the plan to a model of the same class"
            )
        gather_(model, self.runs)
        return merge_(model) if merge else model

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data that `json.dumps` takes; `from_json` reads it."""
        runs = [{name: list(value) for name, value in vars(run).items()} for run in self.runs]
        sizes = {name: list(shape) for name, shape in self.sizes.items()}
        lines, kernels = [dict(vars(line)) for line in self.lines], [list(kernel) for kernel in self.kernels]
        return sealed(vars(self) | {"runs": runs, "lines": lines, "kernels": kernels, "sizes": sizes}, SEALED_RUNS)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> MergePlan:
        """The plan that `to_json` wrote; CheckpointError where the record is something else, or was changed since."""
        record = unsealed(record, SEALED_RUNS, "plan of merges", "plan again, with runs=(name, ...) for others")
        try:
            runs = tuple(
                ConvolutionRun(**{name: tuple(map(str, value)) for name, value in run.items()}) for run in record["runs"]
            )
            lines = tuple(MergeLine(**line) for line in record["lines"])
            kernels = tuple(tuple(map(int, kernel)) for kernel in record["kernels"])
            sizes = {name: tuple(map(int, shape)) for name, shape in record["sizes"].items()}
            return MergePlan(**{**record, "runs": runs, "lines": lines, "kernels": kernels, "sizes": sizes})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not a plan of merges: {type(error).__name__} {error}") from None

    def noted(self, note: str) -> MergePlan:
        """The same plan with what was measured of it."""
        return replace(self, note=note)
