"""Find runs of convolutions that are one convolution without the activations between them, in the captured graph of a model.

A run is conv (-> BatchNorm) (-> activation) -> conv (-> ...), where one operator alone reads every value in between: the 1x1, 3x3
depthwise and 1x1 of an inverted residual (DepthShrinker, Fu et al., 2206.00843), the 3x3 and 3x3 of a basic block. It lists why
others are none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from compresskit.base.settings import stands_in
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, capture_or_fix_batch, module_path, parameter_name
from compresskit.graph.layers.merging import positions
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.layers.value_ranges import changes_nothing, range_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import ParameterOwners, parameter_owners
from compresskit.prune.depth.merging.merge_runs import (
    Convolution,
    ConvolutionRun,
    can_shrink,
    geometry_of_layer,
    merged_geometry,
)

#: Operators that compute each value from one value alone.
ACTIVATIONS = {aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default}
ACTIVATIONS |= {aten.silu.default, aten.gelu.default, aten.hardswish.default, aten.leaky_relu.default, aten.elu.default}
ACTIVATIONS |= {aten.sigmoid.default, aten.tanh.default, aten.hardsigmoid.default, aten.mish.default, aten.softplus.default}
ACTIVATIONS |= {aten.selu.default, aten.celu.default, aten.prelu.default, aten.threshold.default}
MOST_MACS = 8  # times those of the layers apart, above which a merge is not tried


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """What `find_runs` found.

    runs: the runs that can be merged, by name; some share layers. locked: name of a run that cannot be -> reason.
    captured: the graph in which they were found. activations: name of a run -> the nodes of what goes.
    convolutions: dotted name of a layer -> its node.
    """

    runs: dict[str, ConvolutionRun]
    locked: dict[str, str]
    captured: Captured = field(repr=False)
    activations: dict[str, list[Node]] = field(repr=False)
    convolutions: dict[str, Node] = field(repr=False)

    def without(self, locked: dict[str, str]) -> FoundRuns:
        """The same with more runs locked, each for its reason."""
        return FoundRuns(
            runs={name: run for name, run in self.runs.items() if name not in locked},
            locked=self.locked | locked,
            captured=self.captured,
            activations=self.activations,
            convolutions=self.convolutions,
        )


@dataclass(frozen=True, kw_only=True)
class _Link:
    """What is between two convolutions: their nodes, those of a BatchNorm and an activation, and what a run says of them."""

    first: Node
    second: Node
    norm: str
    activation: Node | None
    module: str  # the activation's, where it serves this place alone
    reason: str  # why the two cannot be merged; "" where they can


def find_runs(
    model: nn.Module, example: Inputs, *, longest: int = 3, shrink: bool = False, ignore: tuple[str, ...] = ()
) -> FoundRuns:
    """Find the runs of convolutions of a model that can be merged; the model is not changed.

    Args:
        model: a float model.
        example: its inputs.
        longest: the most convolutions in a run.
        shrink: whether runs of which one layer becomes 1x1 are listed, too.
        ignore: dotted names of modules that stay, with all layers inside.

    Raises ModelError where the model cannot be captured as a graph.
    """
    captured = capture_or_fix_batch(model, example)
    finder = _Finder(model, captured, ignore)
    links = {link.second: link for node in captured.module.graph.nodes if (link := finder.link(node)) is not None}
    found = FoundRuns(
        runs={}, locked={}, captured=captured, activations={}, convolutions={p: n for n, p in finder.layers.items()}
    )
    for last in links:
        chain: list[_Link] = []
        node = last
        while node in links and len(chain) < longest - 1:
            chain.insert(0, links[node])
            node = links[node].first
            name = " + ".join(finder.layers[n] for n in (chain[0].first, *(link.second for link in chain)))
            run = finder.run(chain)
            if isinstance(run, str):
                found.locked[name] = run
                if chain[0].reason:
                    break
                continue
            for one in [run, *(finder.shrunk(run) if shrink else ())]:
                found.runs[one.name] = one
                found.activations[one.name] = [link.activation for link in chain if link.activation is not None]
    return found


class _Finder:
    """Looks at the layers of one graph and the modules that they are of. layers: node of a convolution -> its dotted name."""

    def __init__(self, model: nn.Module, captured: Captured, ignore: tuple[str, ...]) -> None:
        self.model, self.captured, self.ignore = model, captured, ignore
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self.owners: ParameterOwners = parameter_owners(model)
        nodes = list(captured.module.graph.nodes)
        self.layers = {n: self._owner(n.args[1]) for n in nodes if n.target in CONVS and parameter_name(n.args[1]) is not None}
        norms = [self._owner(n.args[3]) for n in nodes if n.target is aten.batch_norm.default and parameter_name(n.args[3])]
        self.calls = Counter([*self.layers.values(), *norms])
        self.operators = Counter(_path_of(n) for n in nodes if n.op == "call_function")

    def _owner(self, node: Any) -> str:
        return self.captured.name_in_model(str(parameter_name(node))).rpartition(".")[0]

    def link(self, second: Node) -> _Link | None:
        """What stands between a convolution and the one before it; None where there is none, or something else between."""
        if second not in self.layers:
            return None
        way, value = [], second.args[0]
        activation = norm = None
        if value.target is aten.pad.default and getattr(self.modules.get(self.layers[second]), "padding", None) == "same":
            value = value.args[0]  # torch pads one side more by an operator of its own; `_layer_reason` says so
        if value.op == "call_function" and value.target in ACTIVATIONS:
            activation, value = value, value.args[0]
            way.append(activation)
        if value.op == "call_function" and value.target is aten.batch_norm.default:
            norm, value = value, value.args[0]
            way.append(norm)
        if value not in self.layers:
            return None
        path = "" if norm is None else self._owner(norm.args[3])
        read = next((node for node in (*way, value) if len(node.users) > 1), None)
        module = "" if activation is None else self._module_of(activation, path)
        where = _path_of(activation) if activation is not None and module else ""
        names = [self.layers[value], *([path] if norm is not None else []), *([where] if where else [])]
        reason = "" if read is None else f"the value of {read.name} is read in {len(read.users)} places"
        reason = reason or self._layer_reason(self.layers[value]) or self._layer_reason(self.layers[second])
        reason = reason or ("" if norm is None else self._norm_reason(norm, path, with_activation=bool(path) and module == path))
        reason = reason or (self._ignored(module) if module else "") or self._hooks(names, self.layers[second])
        return _Link(first=value, second=second, norm=path, activation=activation, module=module, reason=reason)

    def run(self, chain: list[_Link]) -> ConvolutionRun | str:
        """The run of consecutive links, or why it is none."""
        if reason := next((link.reason for link in chain if link.reason), ""):
            return reason
        nodes = [chain[0].first, *(link.second for link in chain)]
        paths = tuple(self.layers[node] for node in nodes)
        read = range_of(nodes[0].args[0])
        stays = [link.activation for link in chain if link.activation is not None and not link.module]
        for node in stays:
            if not changes_nothing(node, read):
                return (
                    f"its {_operator_name(node)} is called in code, or by a module that serves other places too, and would change"
                    f" what {paths[0]} reads; give this place a module of its own in __init__"
                )
        parts = [geometry_of_layer(self._layer(path)) for path in paths]
        apart = sum(part.macs * positions(node) for part, node in zip(parts, nodes, strict=True))
        times = merged_geometry(parts).macs * positions(nodes[-1]) / max(1, apart)
        if times > MOST_MACS:
            return f"one convolution would take {times:.1f} times the multiply-accumulates"
        return ConvolutionRun(
            layers=paths,
            norms=tuple(link.norm for link in chain),
            activations=tuple(link.module for link in chain),
            stays=tuple(_operator_name(node) for node in stays),
        )

    def shrunk(self, run: ConvolutionRun) -> list[ConvolutionRun]:
        """The run with each of its layers shrunk, where several are larger than 1x1."""
        parts = {path: geometry_of_layer(self._layer(path)) for path in run.layers}
        if sum(max(part.kernel) > 1 for part in parts.values()) < 2:
            return []
        return [replace(run, shrunk=(path,)) for path, part in parts.items() if can_shrink(part)]

    def _layer(self, path: str) -> Convolution:
        layer = self.modules[path]
        assert isinstance(layer, Convolution)
        return layer

    def _module_of(self, activation: Node, norm: str) -> str:
        """Dotted name of the module that is this activation and nothing else; "" where there is none.

        norm: dotted name of the BatchNorm before it, "" where there is none; its own where that computes the activation, too.
        """
        path = _path_of(activation)
        if norm and stands_in(path, [norm]):
            return norm
        module = self.modules.get(path)
        alone = module is not None and not [*module.children()] and self.operators[path] == 1 and self.names[id(module)] == 1
        return path if path and alone else ""

    def _layer_reason(self, path: str) -> str:
        """Why a layer cannot be merged with another; "" where it can."""
        layer = self.modules.get(path)
        kinds = [kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind)]
        if layer is None or not kinds or type(layer).forward is not kinds[0].forward:
            return f"{path or 'the model itself'} is of the class {type(layer).__name__}, no plain convolution"
        if parametrize.is_parametrized(layer):
            return f"{path} has parametrizations; remove them first"
        convolution = self.modules[path]
        assert isinstance(convolution, Convolution)
        if convolution.padding_mode != "zeros":
            return f"{path} pads with padding_mode={convolution.padding_mode!r}, not with zeros"
        reach = [d * (k - 1) for d, k in zip(convolution.dilation, convolution.kernel_size, strict=True)]
        if convolution.padding == "same" and any(n % 2 for n in reach):
            return f"{path} pads one side more than the other"
        return self._sharing(path) or self._ignored(path)

    def _norm_reason(self, norm: Node, path: str, *, with_activation: bool) -> str:
        module = self.modules.get(path)
        plain = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not plain or parameter_name(norm.args[3]) is None or norm.args[5]:
            return "its BatchNorm is no module with running statistics"
        if reason := self._sharing(path) or self._ignored(path):
            return reason
        operators = sum(count for name, count in self.operators.items() if stands_in(name, [path]))
        if operators > 1 + with_activation:
            return f"{path}, of the class {type(module).__name__}, computes more than a BatchNorm and an activation"
        return ""

    def _sharing(self, path: str) -> str:
        module = self.modules[path]
        if self.names[id(module)] > 1:
            return f"{path} is one module under {self.names[id(module)]} names"
        if self.calls[path] > 1:
            return f"{path} is called {self.calls[path]} times"
        tied = [name for name, p in module.named_parameters() if len(self.owners[id(p)]) > 1]
        return f"{path}.{tied[0]} is tied to another parameter" if tied else ""

    def _ignored(self, path: str) -> str:
        return "ignore=" if stands_in(path, self.ignore) else ""

    def _hooks(self, paths: list[str], last: str) -> str:
        """Where a hook would see something else: on the modules of a run, or around some of them."""
        around = {path.rsplit(".", i)[0] for path in paths for i in range(path.count(".") + 1)}
        for path in sorted(around | {last}):
            module = self.modules[path]
            if (path == last or not last.startswith(f"{path}.")) and (module._forward_hooks or module._forward_pre_hooks):
                return f"{path} has hooks; remove them first"
        return ""


def _path_of(node: Node) -> str:
    return module_path(node).partition("@")[0]  # torch.export counts the calls of a module behind an "@"


def _operator_name(node: fx.Node) -> str:
    target: Any = node.target
    assert isinstance(target, torch._ops.OpOverload)
    return str(target.overloadpacket.__name__)
