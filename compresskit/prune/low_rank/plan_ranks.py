"""Plan ranks: which layers become products of low rank, and of which, so that a budget is met with the least variance lost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compresskit.base.budget import Budget, Quantity, check_budget, percents, takes_budget
from compresskit.base.errors import CheckpointError, DataError, ModelError, SettingError, named_first_line
from compresskit.base.files import sealed, unsealed
from compresskit.base.inputs import AnyInputs, as_inputs, call_checked, each_inputs
from compresskit.base.settings import stands_in
from compresskit.base.task import Inputs, batch_size, call
from compresskit.graph.masks import masks_of
from compresskit.graph.replacements import Factored, most_cp_rank, replace_module_
from compresskit.graph.rewrites.gradient_hooks import is_hooked
from compresskit.graph.surgery import frozen_copy, mode, no_attention_fastpath
from compresskit.measure import count_macs, count_parameters, few_rows
from compresskit.prune.channels.plan_channels import check_prunable
from compresskit.prune.channels.reconstruct import MOST_COLUMNS, InputStatistics, input_statistics
from compresskit.prune.depth.prove_blocks import training_failure
from compresskit.prune.evidence import watched_calls
from compresskit.prune.low_rank.factorize import (
    SCARCE,
    FactorableLayer,
    Spectrum,
    are_scarce,
    cp_of,
    factored,
    is_cp,
    is_tucker,
    spectrum,
    tucker_lost,
)
from compresskit.train.batchnorm import norms_with_statistics

Method = Literal["tucker", "cp", "auto"]
RANK_QUANTITIES: tuple[Quantity, ...] = ("macs", "parameters")  # that a budget of ranks may be one of
SEALED_RANKS = ("lines", "sizes")  # what a plan of ranks changes, whose digest it has
CP_COSTS = (0.9, 0.7, 0.5, 0.35, 0.2)  # fractions of a convolution's cost at which CP is tried
SAVINGS = [k / 40 for k in range(40)]  # fractions of a convolution's cost that the ranks to choose from save, or more
MOST_WHOLE_LAYERS = 6  # layers that a refusal lists
NOT_CALLED = "its weights are read without calling it, or not at all"
NOT_REACHED = "no position of the example reaches it; give an example that does"


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """What a plan does to one layer. ranks: (rank,), or (inputs, outputs) of Tucker-2. full: what loses nothing.

    lost: mean squared error of its output, as a fraction of the output's variance. Where neither a bias nor a BatchNorm takes the
        mean of what is lost, that counts, too, and it can be above 1. macs, macs_before: of the layer, for one sample.
    positions: at which data showed its inputs, where that is less than twice the inputs of its weights, so that the fit is partly
        that of the weights alone; None where it is enough, or where no data were asked for.
    """

    layer: str
    ranks: tuple[int, ...]
    full: tuple[int, ...]
    lost: float
    macs: int
    macs_before: int
    positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Layers to factor, not yet factored; `print(plan)` lists them, `plan.apply_(model, batches)` factors them.

    lines: one for each layer. sizes: shapes of their weights. macs, macs_before: multiply-accumulates of one sample.
    locked: name of a layer that stays -> reason.
    """

    lines: tuple[RankLine, ...]
    sizes: dict[str, tuple[int, ...]]
    macs: int
    macs_before: int
    locked: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.macs / max(1, self.macs_before):.1%} of {self.macs_before / 1e6:.2f} M MACs stay; {len(self.lines)} layers"
        rows = [
            f"  {line.layer}: {self._kind(line)}rank {' x '.join(map(str, line.ranks))} of {' x '.join(map(str, line.full))},"
            f" {line.macs / max(1, line.macs_before):.0%} of its MACs, {line.lost:.1%} of its variance lost{self._scarcity(line)}"
            for line in self.lines
        ]
        return "\n".join([head, *rows, *(f"  {name} stays: {reason}" for name, reason in self.locked.items())])

    def _kind(self, line: RankLine) -> str:
        return "CP of " if len(line.ranks) == 1 and math.prod(self.sizes[line.layer][2:]) > 1 else ""

    def _scarcity(self, line: RankLine) -> str:
        if line.positions is None:
            return ""
        return f" (of {line.positions} positions, few for {math.prod(self.sizes[line.layer][1:])} inputs; give more batches)"

    def apply_(self, model: nn.Module, batches: Iterable[AnyInputs] | None = None) -> nn.Module:
        """Put the factors in the place of every layer, in place, and return the model.

        Args:
            model: the model that the plan was made for, or another of the same class and sizes.
            batches: inputs, which the factors are fitted to; None fits the weights alone.

        Raises ModelError for another model, which stays as it was.
        """
        if masks_of(model) is not None:
            raise ModelError(f"{type(model).__name__} has masks, which are for whole layers; factor layers first, then Sparsify")
        layers = dict(model.named_modules())
        for name, shape in self.sizes.items():
            layer = layers.get(name)
            found = tuple(layer.weight.shape) if isinstance(layer, FactorableLayer) else None
            if found != shape:
                raise ModelError(
                    f"{name}: the plan was made for a layer with weights {shape}, this {type(model).__name__} has"
                    f" {found or 'no such layer'}; apply the plan to a model of the same class"
                )
        spectra = _spectra(model, self.sizes, _statistics(model, self.sizes, batches))
        for line in self.lines:
            directions = spectra[line.layer]
            norm = None if directions.norm is None else model.get_submodule(directions.norm)
            replace_module_(model, line.layer, factored(_layer(model, line.layer), line.ranks, directions, norm))
        return model

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data that `json.dumps` takes; `from_json` reads it."""
        lines = [vars(line) | {"ranks": list(line.ranks), "full": list(line.full)} for line in self.lines]
        sizes = {name: list(shape) for name, shape in self.sizes.items()}
        return sealed(vars(self) | {"lines": lines, "sizes": sizes}, SEALED_RANKS)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> RankPlan:
        """The plan that `to_json` wrote; CheckpointError where the record is something else, or was changed since."""
        record = unsealed(record, SEALED_RANKS, "plan of ranks", "plan again, with another budget or ignore=")
        try:
            lines = tuple(RankLine(**{**x, "ranks": tuple(x["ranks"]), "full": tuple(x["full"])}) for x in record["lines"])
            sizes = {name: tuple(map(int, shape)) for name, shape in record["sizes"].items()}
            return RankPlan(**{**record, "lines": lines, "sizes": sizes})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not a plan of ranks: {type(error).__name__} {error}") from None


@takes_budget(*RANK_QUANTITIES)
def plan_ranks(
    model: nn.Module,
    example: AnyInputs,
    budget: Budget,
    *,
    batches: Iterable[AnyInputs] | None = None,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
    method: Method = "tucker",
) -> RankPlan:
    """Decide which layers become products of low rank. The model is not changed: `RankPlan.apply_` does that.

    Greedily, the next step is the one that loses the least variance of a layer's output for what it saves; in the end, steps that
    later ones made needless are taken back. A layer is factored only where that saves. Factors of full rank give what the layer
    gives.

    Args:
        model: a float model. example: its inputs, a tensor or a tuple or mapping of inputs.
        budget: how much stays: `ck.keep(macs=0.6)` or `ck.keep(parameters=0.6)`.
        batches: inputs without labels: variance is then that of the outputs on data; None takes that of the weights.
        round_to: ranks stay multiples of this where they are larger.
        ignore: dotted names of modules that stay, with all layers inside.
        method: for convolutions larger than 1x1 over two dimensions: "tucker" (Tucker-2); "cp" (CP, where the window is larger
            than 1 in both directions); or "auto", both, with CP where it loses less than any Tucker-2 that saves as much, which
            takes longer. All other layers have one form.

    Raises:
        SettingError: a setting is out of range.
        ModelError: no layer can be factored, or the budget cannot be met.
        DataError: the model does not run on the example or a batch, or a layer reads nan or infinite values of one.
    """
    check_ranks(budget, round_to, method, "plan_ranks")
    inputs = as_inputs(example)
    check_prunable(model, inputs, "plan_ranks")
    locked: dict[str, str] = {}
    layers = _factorable(model, inputs, tuple(ignore), locked)
    missed = [name for name, reason in locked.items() if reason in (NOT_CALLED, NOT_REACHED)]
    statistics = _statistics(model, [*layers, *missed], batches)
    locked |= {name: "only batches reach it, not the example; give an example that does" for name in missed if name in statistics}
    spectra = _spectra(model, layers, statistics)
    options = {name: _options(layer, shape, spectra[name], budget, round_to, method) for name, (layer, shape) in layers.items()}
    locked |= {name: "no rank saves anything" for name, found in options.items() if not found}
    whole = count_macs(model, inputs)
    total = whole if budget.quantity == "macs" else count_parameters(model)
    chosen, left = _select({name: found for name, found in options.items() if found}, float(total), budget.kept)
    if left > budget.kept * total * (1 + 1e-9):
        (wanted, least), whole_layers = percents(budget.kept, left / total), [f"{name}: {why}" for name, why in locked.items()]
        raise ModelError(
            f"{type(model).__name__}: wanted {wanted} of the {budget.quantity}, only {least} can be reached by low rank;"
            f" whole layers: {'; '.join(whole_layers[:MOST_WHOLE_LAYERS]) or 'none'}; ask for less, or remove channels with Prune"
        )
    seen = {name: statistics[name].rows if name in statistics else 0 for name in chosen} if batches is not None else {}
    lines = [_line(name, *layers[name], option, seen.get(name)) for name, option in chosen.items()]
    saved = sum(
        _cost(*layers[name], None, "macs") - _cost(*layers[name], option.ranks, "macs") for name, option in chosen.items()
    )
    sizes = {line.layer: tuple(_layer(model, line.layer).weight.shape) for line in lines}
    return RankPlan(lines=tuple(lines), sizes=sizes, macs=round(whole - saved), macs_before=whole, locked=locked)


def _line(name: str, layer: FactorableLayer, positions: _Positions, option: _Option, seen: int | None) -> RankLine:
    before, after = (round(_cost(layer, positions, ranks, "macs")) for ranks in (None, option.ranks))
    return RankLine(
        layer=name,
        ranks=option.ranks,
        full=_full_ranks(layer, option.ranks),
        lost=option.lost,
        macs=after,
        macs_before=before,
        positions=seen if seen is not None and are_scarce(layer, seen) and _takes_data(layer) else None,
    )


def _full_ranks(layer: FactorableLayer, ranks: tuple[int, ...]) -> tuple[int, ...]:
    outputs, inputs = layer.weight.shape[:2]
    if is_cp(layer, ranks):
        return (most_cp_rank(layer.weight.shape),)
    return (inputs, outputs) if is_tucker(layer) else (min(outputs, inputs),)


def check_ranks(budget: Budget, round_to: int, method: str, where: str) -> None:
    """Raise SettingError for a budget of another quantity, an unknown method, or ranks not rounded to a whole number."""
    check_budget(budget, f"{where}(budget=...)", RANK_QUANTITIES)
    if type(round_to) is not int or round_to < 1:
        raise SettingError(f"{where}(round_to=...): wanted a whole number >= 1, got {round_to!r}")
    if method not in get_args(Method):
        raise SettingError(f"{where}(method=...): wanted one of {get_args(Method)}, got {method!r}")


@dataclass(frozen=True, kw_only=True)
class _Option:
    """Ranks that a layer may get; saved: in the unit of the budget."""

    ranks: tuple[int, ...]
    lost: float
    saved: float


@dataclass(frozen=True, kw_only=True)
class _Positions:
    """Positions, for one sample, at which a layer reads its inputs and gives its outputs; between: rows given, columns read.

    They are fractions where not every sample reaches the layer, as an expert of a mixture.
    """

    read: float
    made: float
    between: float = 0


def _layer(model: nn.Module, name: str) -> FactorableLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, FactorableLayer)
    return layer


def _factorable(
    model: nn.Module, inputs: Inputs, ignore: tuple[str, ...], locked: dict[str, str]
) -> dict[str, tuple[FactorableLayer, _Positions]]:
    """Layers that can be factored, by name, with their positions; why others cannot is added to `locked`."""
    layers: dict[str, FactorableLayer] = {}
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    names = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    inside = {id(part) for m in model.modules() if parametrize.is_parametrized(m) for part in _children(m, "parametrizations")}
    for name, module in model.named_modules():
        if not isinstance(module, FactorableLayer):
            if name and id(module) not in inside and _has_matrices(module):
                locked[name] = f"{type(module).__name__} is not factored"
            continue
        if not name:
            locked[type(module).__name__] = "it is the whole model, in which it cannot be replaced by factors"
        elif (reason := _why_whole(name, module, ignore)) is not None:
            locked[name] = reason
        elif any(owners[id(p)] > 1 for p in module.parameters()) or names[id(module)] > 1:
            locked[name] = "its weights are tied to another layer's"
        else:
            layers[name] = module
    positions: dict[str, _Positions] = {}
    empty: set[str] = set()

    def visit(path: str, module: Any, x: Any, out: Any) -> None:
        if not x.numel():  # an expert to which nothing was sent
            empty.add(path)
            return
        made, read = out.numel() // module.weight.shape[0], x.numel() // module.weight.shape[1]
        before = positions.get(path, _Positions(read=0, made=0))
        rows = batch_size(inputs)
        between = made // out.shape[-1] * x.shape[-1]
        positions[path] = _Positions(
            read=before.read + read / rows, made=before.made + made / rows, between=before.between + between / rows
        )

    with watched_calls(model, list(layers), visit), torch.no_grad(), mode(model, training=False):
        call_checked(model, inputs, "plan_ranks")
    locked |= {name: NOT_REACHED if name in empty else NOT_CALLED for name in layers if name not in positions}
    called = {name: (layer, positions[name]) for name, layer in layers.items() if name in positions}
    rows = few_rows(model, inputs, 2)
    if _trial(model, rows, list(called)) is None:
        return called
    failures = {name: _trial(model, rows, [name]) for name in called}
    locked |= {name: failure for name, failure in failures.items() if failure is not None}
    return {name: found for name, found in called.items() if failures[name] is None}


def _children(module: nn.Module, name: str) -> Iterable[nn.Module]:
    return module.get_submodule(name).modules()


def _has_matrices(module: nn.Module) -> bool:
    """Whether a module has weights of two dimensions or more of its own, or makes them of those of a parametrization."""
    own = [p for p in module._parameters.values() if p is not None]
    if parametrize.is_parametrized(module):
        own += [p for part in _children(module, "parametrizations") for p in part.parameters()]
    return any(sum(size > 1 for size in p.shape) > 1 for p in own)


def _why_whole(name: str, module: FactorableLayer, ignore: tuple[str, ...]) -> str | None:
    """Why a layer cannot be factored, judging by itself; None where it can."""
    if stands_in(name, ignore):
        return "ignore="
    if parametrize.is_parametrized(module):
        return f"it is a {type(module).__name__}, which has a parametrization; parametrize.remove_parametrizations makes it plain"
    if type(module) not in get_args(FactorableLayer):
        return f"it is a {type(module).__name__}, a class of its own"
    hooked = any(map(is_hooked, module.parameters(recurse=False)))
    if hooked or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks of its own"
    return f"{module.groups} groups" if not isinstance(module, nn.Linear) and module.groups > 1 else None


def _trial(model: nn.Module, inputs: Inputs, names: list[str]) -> str | None:
    """Run a copy with some layers factored; what the code says where it needs the layers themselves."""
    small = frozen_copy(model)
    for name in names:
        layer = _layer(small, name)
        replace_module_(small, name, Factored.like(layer, (1, 1) if is_tucker(layer) else (1,)))
    try:
        with torch.no_grad(), no_attention_fastpath():
            call(small, inputs)
    except Exception as error:
        return f"the model does not run without it: {named_first_line(error)}"
    return training_failure(model, small, inputs)


def _takes_data(layer: FactorableLayer) -> bool:
    """Whether a layer is fitted to data, where there are some, and not too wide for that."""
    return layer.weight[0].numel() <= MOST_COLUMNS


def _statistics(model: nn.Module, names: Collection[str], batches: Iterable[AnyInputs] | None) -> dict[str, InputStatistics]:
    """Statistics of the inputs of layers, by the layer's name, and who takes their mean; without those that no batch reaches."""
    read = [f"{name}.weight" for name in names if _takes_data(_layer(model, name))]
    if batches is None or not read:
        return {}
    stream = each_inputs(batches, "low rank")
    first = next(stream, None)
    if first is None:
        raise DataError("low rank: no batch of calibration data was given; pass batches=None to fit the weights alone")
    bare = any(_layer(model, name.removesuffix(".weight")).bias is None for name in read)  # whose mean a BatchNorm may take
    norms = bare and bool(norms_with_statistics(model))
    found = input_statistics(model, read, itertools.chain([first], stream), norms=norms, for_each_input=SCARCE)
    return {name.removesuffix(".weight"): statistics for name, statistics in found.items()}


def _spectra(model: nn.Module, names: Collection[str], statistics: Mapping[str, InputStatistics]) -> dict[str, Spectrum]:
    return {name: spectrum(_layer(model, name), statistics.get(name)) for name in names}


def _cost(layer: FactorableLayer, positions: _Positions, ranks: tuple[Any, ...] | None, quantity: str) -> Any:
    """MACs of one sample, or weights, of a layer (ranks=None) or of its factors; of tensors of ranks, as they broadcast."""
    outputs, inputs = layer.weight.shape[:2]
    kernel = layer.weight[0, 0].numel()
    read, made, between = (positions.read, positions.made, positions.between) if quantity == "macs" else (1, 1, 1)
    if ranks is None:
        return outputs * inputs * kernel * made
    if is_cp(layer, ranks):
        rows, columns = layer.weight.shape[2:]
        return ranks[0] * (inputs * read + rows * between + (columns + outputs) * made)
    if is_tucker(layer):
        return inputs * ranks[0] * read + ranks[0] * ranks[1] * kernel * made + ranks[1] * outputs * made
    return ranks[0] * (inputs + outputs) * made


def _options(
    layer: FactorableLayer, positions: _Positions, directions: Spectrum, budget: Budget, round_to: int, method: Method
) -> list[_Option]:
    """Ranks that save something, from the least lost to the most saved."""
    if method == "tucker" or not is_tucker(layer) or isinstance(layer, nn.Conv1d):
        return _closed_form(layer, positions, directions, budget, round_to)
    terms = _cp_options(layer, positions, directions, budget, round_to)
    if method == "cp":
        return terms
    closed = [
        replace(o, lost=tucker_lost(layer, o.ranks, directions))
        for o in _closed_form(layer, positions, directions, budget, round_to)
    ]
    better = [o for o in terms if o.lost < min((c.lost for c in closed if c.saved >= o.saved), default=math.inf)]
    return sorted([*closed, *better], key=lambda o: o.saved)


def _cp_options(
    layer: FactorableLayer, positions: _Positions, directions: Spectrum, budget: Budget, round_to: int
) -> list[_Option]:
    """Ranks of CP for some fractions of the layer's cost; each is fitted."""
    whole, of_one = (_cost(layer, positions, ranks, budget.quantity) for ranks in (None, (1,)))
    most = most_cp_rank(layer.weight.shape)
    ranks = {min(most, int(fraction * whole / of_one)) for fraction in CP_COSTS}
    ranks = {rank // round_to * round_to if rank > round_to else rank for rank in ranks} - {0}
    return [
        _Option(ranks=(rank,), lost=cp_of(layer, rank, directions).lost, saved=float(whole - rank * of_one))
        for rank in sorted(ranks, reverse=True)
    ]


def _closed_form(
    layer: FactorableLayer, positions: _Positions, directions: Spectrum, budget: Budget, round_to: int
) -> list[_Option]:
    """Ranks of the singular value decomposition or of Tucker-2 that save something."""
    outputs, inputs = layer.weight.shape[:2]
    whole = _cost(layer, positions, None, budget.quantity)

    def rounded(rank: int, most: int) -> int:
        return min(most, max(1, rank) if rank <= round_to // 2 else -(-rank // round_to) * round_to)

    tried: Iterable[tuple[int, ...]]
    if directions.energy_in is None:
        most = min(outputs, inputs)
        tried = {(rounded(rank, most),) for rank in range(1, most + 1)}
    else:
        choices = [sorted({rounded(rank, most) for rank in range(1, most + 1)}) for most in (inputs, outputs)]
        # Whatever torch's default device and dtype are: in float16 the cost of a wide layer is infinite.
        first, second = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in choices)
        costs = _cost(layer, positions, (first[:, None], second), budget.quantity)
        tried = _least_lost_pairs(choices, directions, whole - costs, whole)
    made = [
        _Option(ranks=r, lost=directions.lost(r), saved=float(whole - _cost(layer, positions, r, budget.quantity))) for r in tried
    ]
    return sorted((o for o in made if o.saved > 0), key=lambda o: o.saved)


def _least_lost_pairs(choices: list[list[int]], directions: Spectrum, saved: Tensor, whole: float) -> set[tuple[int, ...]]:
    """The ranks of Tucker-2 that lose least of all that save as much, for each of some savings.

    saved: (input ranks, output ranks) what each pair saves of `whole`. All pairs would be too many to choose from; those whose
    modes lose the same fraction would be too few in a narrow layer, where a rank has no more than a handful of values.
    """
    assert directions.energy_in is not None
    rests = [
        torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])[chosen].cpu()
        for energy, chosen in zip((directions.energy_in, directions.energy), choices, strict=True)
    ]
    lost = rests[0][:, None] + rests[1]
    found: set[tuple[int, ...]] = set()
    for level in SAVINGS:
        enough = (saved > 0) & (saved >= level * whole)
        if enough.any():
            row, column = divmod(int(lost.masked_fill(~enough, math.inf).argmin()), len(choices[1]))
            found.add((choices[0][row], choices[1][column]))
    return found


def _select(options: Mapping[str, list[_Option]], total: float, kept: float) -> tuple[dict[str, _Option], float]:
    """Options of the layers that meet a budget, and how much is left: the least loss for what is saved, again and again."""
    none = _Option(ranks=(), lost=0.0, saved=0.0)
    chosen, left = dict.fromkeys(options, none), total
    while left > kept * total * (1 + 1e-9):
        steps = [
            (
                (option.lost - chosen[name].lost) / min(option.saved - chosen[name].saved, left - kept * total),
                -option.saved,
                name,
                option,
            )
            for name, found in options.items()
            for option in found
            if option.saved > chosen[name].saved
        ]
        if not steps:
            break
        _, _, name, option = min(steps, key=lambda step: step[:3])
        left -= option.saved - chosen[name].saved
        chosen[name] = option
    # What later steps made needless goes back, and the last steps may have saved more than was wanting.
    for name in sorted(chosen, key=lambda name: -chosen[name].lost):
        before = chosen[name]
        milder = [o for o in (none, *options[name]) if before.saved - o.saved <= kept * total - left and o.lost < before.lost]
        if milder:
            chosen[name] = min(milder, key=lambda o: (o.lost, -o.saved))
            left += before.saved - chosen[name].saved
    return {name: option for name, option in chosen.items() if option.ranks}, left
