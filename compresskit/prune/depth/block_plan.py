"""A plan of blocks to remove: it prints, serializes, and applies to models of one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.base.files import sealed, unsealed
from compresskit.graph.masks import masks_of
from compresskit.prune.depth.find_blocks import ResidualBlock
from compresskit.prune.depth.prove_blocks import remove_blocks_

SEALED_BLOCKS = ("blocks", "sizes")  # what a plan of blocks changes, whose digest it has


@dataclass(frozen=True, kw_only=True)
class BlockLine:
    """What a plan knows of one block it removes: what is lost without it, what was saved, and in which unit."""

    path: str
    importance: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Residual blocks to remove, not yet removed; `print(plan)` lists them, `plan.apply_(model)` removes them.

    blocks: what is removed, in the order in which it was chosen. lines: why, in the same order. unit: of the lines' costs.
    sizes: shapes of the blocks' parameters. macs, macs_before: multiply-accumulates of one sample.
    kept: how many removable blocks stay. locked: name of a module that looks like a block and stays -> reason.
    note: what was measured of the exported file, where the budget is one.
    """

    blocks: tuple[ResidualBlock, ...]
    lines: tuple[BlockLine, ...]
    unit: str
    sizes: dict[str, tuple[int, ...]]
    macs: int
    macs_before: int
    kept: int
    locked: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted names of the blocks that are removed."""
        return tuple(block.path for block in self.blocks)

    def __str__(self) -> str:
        head = f"{self.macs / max(1, self.macs_before):.1%} of {self.macs_before / 1e6:.2f} M MACs stay"
        head += f"; {len(self.blocks)} of {len(self.blocks) + self.kept} blocks removed" + (f"; {self.note}" if self.note else "")
        rows = [
            f"  {block.path}: removed, {line.cost:.4g} {self.unit}, importance {line.importance:.3g}"
            + (f", with {block.norms} norms on its way" if block.norms else "")
            for block, line in zip(self.blocks, self.lines, strict=True)
        ]
        return "\n".join([head, *rows, *(f"  {path} stays: {reason}" for path, reason in self.locked.items())])

    def apply_(self, model: nn.Module) -> nn.Module:
        """Put a `Bypass` in the place of every block, in place, and return the model; it keeps its class and all other names.

        Raises ModelError for another model, which stays as it was.
        """
        if masks_of(model) is not None:
            raise ModelError(
                f"{type(model).__name__} has masks, also of weights in blocks to remove; remove blocks first, then Sparsify"
            )
        here = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        modules = {name for name, _ in model.named_modules()}
        for path in self.paths:
            if path not in modules:
                raise ModelError(f"{path}: {type(model).__name__} has no such block; apply the plan to a model of the same class")
        for name, shape in self.sizes.items():
            if here.get(name) != shape:
                raise ModelError(
                    f"{name}: the plan was made for shape {shape}, this {type(model).__name__} has {here.get(name, 'none')};"
                    " apply the plan to a model of the same class"
                )
        return remove_blocks_(model, self.blocks)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data that `json.dumps` takes; `from_json` reads it."""
        blocks = [
            vars(b) | {"shape": list(b.shape), "skipped": [[n, position] for n, position in b.skipped.items()]}
            for b in self.blocks
        ]
        sizes = {name: list(shape) for name, shape in self.sizes.items()}
        lines = [dict(vars(line)) for line in self.lines]
        return sealed(vars(self) | {"blocks": blocks, "lines": lines, "sizes": sizes}, SEALED_BLOCKS)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> BlockPlan:
        """The plan that `to_json` wrote; CheckpointError where the record is something else, or was changed since."""
        record = unsealed(record, SEALED_BLOCKS, "plan of blocks", "plan again, with blocks=(name, ...) for others")
        try:
            blocks = tuple(
                ResidualBlock(**{**b, "shape": tuple(b["shape"]), "skipped": {int(n): int(p) for n, p in b["skipped"]}})
                for b in record["blocks"]
            )
            lines = tuple(BlockLine(**line) for line in record["lines"])
            sizes = {name: tuple(map(int, shape)) for name, shape in record["sizes"].items()}
            return BlockPlan(**{**record, "blocks": blocks, "lines": lines, "sizes": sizes})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not a plan of blocks: {type(error).__name__} {error}") from None

    def noted(self, note: str) -> BlockPlan:
        """The same plan with what was measured of it."""
        return replace(self, note=note)
