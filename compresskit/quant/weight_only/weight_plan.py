"""Which weights of a graph can be rounded in blocks, and what became of each: the plan that `quantize_weights` prints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, fx

from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import CONVS, PRODUCTS


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A matrix of a graph and all that reads it.

    kind: "product", "embedding", "conv", or "" for one that cannot be rounded, for a `reason`.
    axis: its dimension of inputs. readers: names of nodes. layer: module in whose forward the first of them stands.
    """

    name: str
    kind: str
    axis: int
    readers: tuple[str, ...]
    layer: str
    reason: str = ""


def weights_of(module: fx.GraphModule) -> list[Weight]:
    """Every parameter of two dimensions or more, in the order in which the graph reads them."""
    reads: dict[str, list[tuple[Node, Node]]] = {}
    for node in module.graph.nodes:
        name = parameter_name(node)
        if name is not None and get_tensor(module, name).ndim >= 2 and get_tensor(module, name).is_floating_point():
            reads.setdefault(name, []).extend((node, user) for user in node.users)
    return [_weight(name, pairs) for name, pairs in reads.items() if pairs]


def _weight(name: str, pairs: list[tuple[Node, Node]]) -> Weight:
    found = [_role(weight, user) for weight, user in pairs]
    readers, layer = tuple(user.name for _, user in pairs), module_path(pairs[0][1])
    bad = next((reason for kind, _, reason in found if not kind), "")
    axes = {axis for _, axis, _ in found}
    if not bad and len(axes) > 1:
        bad = "its readers take it with different dimensions for the inputs"
    kinds = [kind for kind, _, _ in found]
    kind = "" if bad else "product" if "product" in kinds else kinds[0]
    return Weight(name=name, kind=kind, axis=found[0][1], readers=readers, layer=layer, reason=bad)


def _role(weight: Node, user: Node) -> tuple[str, int, str]:
    """(kind, dimension of inputs, why not) of one reader."""
    value = weight.meta["val"]
    if user.target in PRODUCTS and value.ndim == 2:
        _, place, axis = PRODUCTS[user.target]
        if len(user.args) > place and user.args[place] is weight and user.args.count(weight) == 1:
            if user.target is aten.addmm.default and user.kwargs:
                return "", 0, "it is scaled inside the operator that reads it"
            return "product", axis, ""
    if user.target is aten.embedding.default and user.args[0] is weight:
        return "embedding", 1, ""
    if user.target in CONVS and user.args[1] is weight:
        return "conv", 1, ""
    return "", 0, f"{user.target} reads it"


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """One matrix: what it is stored as, or why it stays float.

    sqnr: of the rounded weight, in dB. bytes: in the file, scales included. note: what is worth knowing of it.
    """

    name: str
    layer: str
    runs: str
    parameters: int
    bytes: int
    sqnr: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """What became of every matrix; prints as a table."""

    rows: tuple[WeightRow, ...] = field(default_factory=tuple)

    @property
    def bytes(self) -> int:
        """Of all matrices, in the file."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        every = 4 * sum(row.parameters for row in self.rows)
        share = f", {self.bytes / every:.1%} of fp32" if every else ""
        table = [("weight", "stored as", "parameters", "SQNR dB", "note")]
        table += [(r.name, r.runs, f"{r.parameters:,}", "" if r.sqnr is None else f"{r.sqnr:.1f}", r.note) for r in self.rows]
        widths = [max(len(cells[i]) for cells in table) for i in range(4)]
        lines = [
            "  "
            + "  ".join(c.rjust(w) if i in (2, 3) else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=False)))
            + (f"  {cells[4]}" if cells[4] else "")
            for cells in table
        ]
        done = sum(not row.runs.startswith("float") for row in self.rows)
        return "\n".join([f"{done} of {len(self.rows)} matrices rounded, {self.bytes:,} bytes{share}", *map(str.rstrip, lines)])

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-ready record."""
        return [asdict(row) for row in self.rows]

    @staticmethod
    def from_json(saved: Any) -> WeightPlan:
        """The plan of a record."""
        return WeightPlan(rows=tuple(WeightRow(**row) for row in saved))


def sqnr(wanted: Tensor, got: Tensor) -> float:
    """Signal over noise in dB, 200 where there is no noise."""
    wanted, got = wanted.detach().double(), got.detach().double()
    noise, signal = float((wanted - got).square().sum()), float(wanted.square().sum())
    return min(200.0, 10 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0
