"""Walk a recorded run once and note which channels live and die together."""

from __future__ import annotations

import math
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.prune.structure.channel_sets import ANY, Units, compact, nothing, spread, tight, varying
from compresskit.prune.structure.constraints import Mirror, Scaling, Split, Statistic, Suspect, Total
from compresskit.prune.structure.rules import RULES, Raw
from compresskit.prune.structure.rules.arithmetic import meet, region_pooling
from compresskit.prune.structure.trace import Recorded


class Walk:
    """The state of one walk: labels so far, and what rules ask of it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.shapes, self.units = recorded, recorded.shapes, Units()
        self.pinned: dict[str, str] = {}
        self.tensors: list[Any] = []  # operands of the operator at hand
        self.splits: list[Split] = []
        self.totals: list[Total] = []
        self.suspects: list[Suspect] = []
        self.scalings: list[Scaling] = []
        self.statistics: list[Statistic] = []
        self.mirrors: list[Mirror] = []
        #: MACs of one sample, and the labels along the dimensions that they are a product of.
        self.costs: list[tuple[float, list[Tensor]]] = []
        #: Channels made by linear layers, and those that they are made from.
        self.makers: list[tuple[str, Tensor, Tensor]] = []
        #: Nodes of tensors that were made to be written into, and still hold nothing.
        self.new: set[Node] = set()
        self._products: dict[Node, tuple[Tensor, int, bool]] = {}
        self._own: dict[tuple[str, int], Tensor] = {}
        self._seen: Counter[Any] = Counter()
        self._first = True
        self._path = ""
        for run in (recorded, recorded.extra):
            if run is not None:
                self._run(run)
            self._first = False
        for member in list(self.units.members):
            if member.tensor in self.pinned:
                self.units.lock(member.labels, self.pinned[member.tensor])

    def _run(self, run: Recorded) -> None:
        self.shapes = run.shapes
        env: dict[Node, Any] = {}
        last_use = {a: node for node in run.graph.nodes for a in node.all_input_nodes}
        for node in run.graph.nodes:
            self._path = node.meta.get("path", "")
            env[node] = self._visit(node, env)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    del env[used]

    def _visit(self, node: Node, env: dict[Node, Any]) -> Any:
        if node.op == "placeholder":
            return nothing(self.shapes[node.name])
        if node.op == "get_attr":
            return Raw.of(str(node.target), self.shapes[node.name])
        args = fx.map_arg(node.args, lambda n: env[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
        tensors = [v for v in _leaves((args, kwargs)) if isinstance(v, Tensor | Raw)]
        if node.op == "output":
            for value in tensors:
                if isinstance(value, Tensor):
                    self.units.lock(value, "an output of the model")
                else:
                    self.pin(value.name, "an output of the model")
            return None
        if node.target is operator.getitem:
            return args[0][args[1]] if args[0] is not None else nothing(self.shapes[node.name])
        self._seen[node.target] += 1
        self.tensors = tensors
        rule = RULES.get(node.target)
        if str(node.target) in ("torchvision.roi_align.default", "torchvision.roi_pool.default"):
            rule = region_pooling
        if rule is None:
            return self.give_up(node, f"no rule for {node.target} ({self._path or 'the model'})")
        try:
            result = rule(self, node, args, kwargs)  # type: ignore[arg-type]
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):
            # An operator called in a way that its rule does not know is one without a rule.
            return self.give_up(node, f"{self.where(node)} could not be followed")
        if self._misshapen(node, result):
            return self.give_up(node, f"{self.where(node)} could not be followed")
        if node.meta.get("aliased") and isinstance(result, Tensor) and isinstance(args[0], Tensor):
            # Other names look at the same memory: what was written must agree with what stood there.
            result = meet(self, node, args[0], result.expand(args[0].shape))
        return result

    def _misshapen(self, node: Node, result: Any) -> bool:
        """Whether labels do not have the shape of the value, which no rule may return."""
        if "parts" in node.meta:
            return not isinstance(result, list | tuple) or len(result) != len(node.meta["parts"])
        return isinstance(result, Tensor | Raw) and node.name in self.shapes and tuple(result.shape) != self.shapes[node.name]

    # -- what rules ask for

    def shape(self, node: Node) -> tuple[int, ...]:
        """Shape of a node's value."""
        return self.shapes[node.name]

    def where(self, node: Node) -> str:
        """`add in layer1.0`: an operator as a person would look for it."""
        kind = str(node.target).removeprefix("aten.").split(".")[0].rstrip("_")
        return f"{kind} in {'.'.join(p for p in (self.recorded.prefix, node.meta.get('path')) if p) or 'the model'}"

    def along(self, value: Any, dim: int) -> Tensor:
        """One label for each index of `dim`; units that share an index of it become one."""
        if isinstance(value, Raw):
            own = self.one_axis(value)
            if own is not None and varying(own) == [dim]:
                return own.movedim(dim, 0).reshape(own.shape[dim], -1)[:, 0]
            self.pin(value.name, "used as if it were an activation")
            return torch.zeros(value.shape[dim], dtype=torch.long)
        size = value.shape[dim]
        rows = compact(tight(value)).movedim(dim, 0)
        rows = rows.reshape(rows.shape[0], -1)
        if rows.shape[1] > 1:
            self.units.join(rows[:, :1], rows, "positions of one channel that cannot all be cut")
        return (rows.amax(1) if rows.shape[1] else rows.new_zeros(len(rows))).expand(size)

    def reads(self, raw: Raw, own: tuple[int, Tensor], labels: Tensor, role: str) -> None:
        """What is read of a tensor along one of its dimensions, `own` = (dimension, indices), vanishes with labels."""
        dim, indices = own
        for name, dims in ((raw.name, tuple(range(len(raw.axes)))), *raw.also):
            if (at := dims[dim]) is None:
                continue
            size = self.size(name, at)
            whole = labels
            if len(indices) != size or not bool((indices == torch.arange(size)).all()):
                whole = torch.full((size,), ANY).index_put((indices,), labels)
            self.units.member(name, at, whole, role)

    def size(self, name: str, dim: int) -> int:
        """Size of a dimension of a parameter or buffer."""
        return get_tensor(self.recorded.module, name).shape[dim]

    def vector(self, raw: Raw, labels: Tensor, node: Node, dim: int = 0) -> None:
        """A parameter with one entry a channel along `dim` vanishes with the channels."""
        own = (dim, torch.arange(raw.shape[dim])) if not raw.moved else raw.axis(dim)
        if own is None or raw.shape[dim] != len(labels):
            self.units.lock(labels, f"{raw.name} is read by {self.where(node)} in an order of its own")
            self.pin(raw.name, f"used by {self.where(node)}")
        else:
            self.reads(raw, own, labels, "with")

    def labelled(self, raw: Raw, dim: int) -> Tensor | None:
        """Labels of the parameter's own along `dim`; None where that is not one of its dimensions."""
        own = raw.axis(dim)
        if own is None:
            return None
        return spread(self._labels(raw.name, own[0])[own[1]], dim, raw.shape)

    def one_axis(self, raw: Raw) -> Tensor | None:
        """Labels of a parameter that is a vector, whatever the shape in which it is read."""
        dims = [d for d in range(len(raw.axes)) if self.size(raw.name, d) > 1]
        return self._labels(raw.name, dims[0])[raw.axes[dims[0]]] if len(dims) == 1 else None

    def _labels(self, name: str, dim: int) -> Tensor:
        if (name, dim) not in self._own:
            self._own[(name, dim)] = self.units.fresh(self.size(name, dim))
            self.units.member(name, dim, self._own[(name, dim)], "with")
        return self._own[(name, dim)]

    def bias(self, bias: Any, labels: Tensor, node: Node) -> None:
        """The bias goes with the outputs."""
        if isinstance(bias, Raw):
            self.vector(bias, labels, node)
        elif bias is not None:
            self.units.lock(labels, f"the bias of {self.where(node)} is computed in the forward pass")

    def pin(self, tensor: str, reason: str) -> None:
        """Never cut this parameter."""
        self.pinned.setdefault(tensor, reason)

    def give_up(self, node: Node, reason: str) -> Any:
        """Lock every channel that reaches an operator; its outputs are new values that cannot be cut."""
        for value in self.tensors:
            if isinstance(value, Raw):
                self.pin(value.name, reason)
            else:
                self.units.lock(value, reason)
        if "parts" in node.meta:
            return [nothing(shape) for shape in node.meta["parts"]]
        return nothing(self.shapes[node.name]) if node.name in self.shapes else None

    def is_new(self, node: Any) -> bool:
        """Whether a node makes a tensor for the purpose (zeros, empty)."""
        if node.op != "call_function" or node.meta.get("constant"):
            return False
        kind = str(node.target).removeprefix("aten.").split(".")[0].removeprefix("new_")
        return node in self.new or kind in ("zeros", "ones", "empty", "full", "zeros_like")

    # -- what rules note for the end of the walk

    def equal(self, node: Node, parts: Tensor) -> None:
        """The same position of every part, (parts, ...), is one unit."""
        self.units.join(parts[:1], parts, f"split into equal parts by {self.where(node)}")

    def split(self, node: Node, before: Tensor, after: Tensor) -> None:
        """One dimension of channels is seen as several."""
        reason = f"split into equal parts by {self.where(node)}"
        self.splits.append(Split(path=self._path, labels=compact(after), reason=reason))

    def total(self, rows: Tensor, totals: Tensor, reason: str) -> None:
        """Each of totals vanishes where all the rows do that broadcast against it, and only there."""
        self.totals.append(Total(rows=rows, totals=totals, reason=reason))

    def suspect(self, node: Node, labels: Tensor) -> None:
        """Note code that gives a size for a dimension of channels."""
        given = [s for s in _leaves(node.args[1:]) if type(s) is int and s > 1]
        if given and bool((compact(labels) > 0).any()):
            reason = f"{self.where(node)} to sizes written in the code"
            small = compact(labels)
            self.suspects.append(Suspect(path=self._path, labels=small, shape=tuple(labels.shape), reason=reason))

    def mirror(self, node: Node, attribute: str, labels: Tensor, position: int | None = None) -> None:
        """Note a module's number that repeats a width without a tensor of that width (a norm without weights)."""
        module = self.recorded.module.get_submodule(self._path)
        if hasattr(module, attribute) and getattr(module, "weight", None) is None:
            self.mirrors.append(Mirror(path=self._path, attribute=attribute, labels=labels, position=position))

    def statistic(self, node: Node, labels: Tensor, dim: int) -> None:
        """Note an operator whose statistics run over channels."""
        if self._first:
            nth = self._seen[node.target]
            self.statistics.append(Statistic(target=node.target, nth=nth, labels=labels, dim=dim))

    def cost(self, macs: float, *along: Tensor | None) -> None:
        """Note multiply-accumulates, a product over dimensions with these labels."""
        if self._first and macs:
            self.costs.append((macs / self.recorded.rows, [labels for labels in along if labels is not None]))

    def made_from(self, made: Tensor, inputs: Tensor) -> None:
        """Note which channels a linear layer makes of which."""
        self.makers.append((self._path, made, inputs))

    def product(self, node: Node, first: Tensor, second: Tensor, dims: list[int]) -> None:
        """Note a product that sums over channels: a factor 1 / sqrt(width) may follow."""
        if dims:
            shared = bool(torch.isin(first[first > 0], second).any())
            self._products[node] = (first, dims[-1], shared)

    def product_moved(self, node: Node) -> None:
        """Note a product that is seen in another shape."""
        if node.args[0] in self._products:
            self._products[node] = self._products[node.args[0]]

    def product_shape(self, x: Tensor, first: str, shape: tuple[int, ...], second: str, out: str) -> tuple[int, ...]:
        """Shape of an einsum."""
        sizes = dict(zip(second, shape, strict=True)) | dict(zip(first, x.shape, strict=True))
        return tuple(sizes[c] for c in out)

    def scaling(self, node: Node, args: tuple[Any, ...], result: Tensor) -> None:
        """Note `q * width ** -0.5`, or the same of `q @ k.T`."""
        kind = str(node.target).removeprefix("aten.").split(".")[0].rstrip("_")
        number = node.meta.get("number", args[1] if len(args) > 1 and type(args[1]) in (int, float) else 0)
        if kind not in ("mul", "div") or not number:
            return
        factor = number if kind == "mul" else 1 / number
        candidates = [(result, d, False) for d in reversed(varying(result))]
        if (before := self._products.get(node.args[0])) is not None:
            candidates.append(before)
        for labels, dim, shared in candidates:
            if math.isclose(factor, labels.shape[dim] ** -0.5, rel_tol=1e-4):
                self.scaled(node, labels, dim, stored=self._is_stored(number), shared=shared)
                return

    def _is_stored(self, number: float) -> bool:
        module = self.recorded.module.get_submodule(self._path)
        return any(isinstance(v, float) and math.isclose(v, number, rel_tol=1e-6) for v in vars(module).values())

    def scaled(self, node: Node, labels: Tensor, dim: int, *, stored: bool, shared: bool = False) -> None:
        """Note values that are multiplied by 1 / sqrt(size of dim), unless the factor is stored and so stays."""
        if not stored:
            self.scalings.append(Scaling(path=self._path, labels=compact(tight(labels)), dim=dim, shared=shared))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value]
