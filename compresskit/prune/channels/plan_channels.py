"""Plan which channels to remove: analyze the model, score its groups of channels, select, and prove the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from compresskit.base.budget import Budget, check_budget, takes_budget
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.settings import check_flag
from compresskit.base.task import Inputs, Task
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import check_no_torch_masks
from compresskit.measure import count_macs
from compresskit.prune.channels.resources import PRUNABLE, Limits
from compresskit.prune.channels.selector import ChannelSelector
from compresskit.prune.criteria import CHANNEL_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.normalizers import Normalizer, by_mean
from compresskit.prune.rankings import Ranking, cost_aware
from compresskit.prune.scores import score_groups_
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan
from compresskit.prune.structure.repeatable import state_restored
from compresskit.prune.structure.trial import TrialRepair

NO_RATIOS: Mapping[str, float] = MappingProxyType({})


@takes_budget(*PRUNABLE)
def plan_channels(
    model: nn.Module,
    example: AnyInputs,
    budget: Budget,
    *,
    criterion: Criterion = l2,
    ranking: Ranking = cost_aware,
    normalize: Normalizer = by_mean,
    task: Task | None = None,
    samples: int = 3072,
    round_to: int = 8,
    minimum: int = 1,
    ratios: Mapping[str, float] = NO_RATIOS,
    ignore: tuple[str, ...] = (),
    inside: str | None = None,
    whole_heads: bool = False,
) -> Plan:
    """Decide which channels to remove. The model is not changed: `apply_` does that.

    The plan is proved on a copy before it is returned: in float64, the model without the channels computes what the model with
    these channels set to zero computes.

    Args:
        model: a float model; it is traced in eval mode.
        example: its inputs, a tensor or a tuple or mapping of inputs.
        budget: how much stays: `ck.keep(macs=0.5)`, or of the parameters, bytes, latency or channels; see `Budget`. The plan is
            at or just below it, as far as the widths allow. For bytes and latency, candidates are exported and measured; for
            latency they run in turn with the dense model until one is fast enough.
        criterion: scores channels, see `prune.criteria`.
        ranking: which group is pruned next, see `prune.rankings`.
        normalize: makes the scores of groups comparable, for rankings that compare them (`pooled`); see `prune.normalizers`.
        task: data and loss, for criteria that read more than weights.
        samples: how many samples such criteria read.
        round_to: widths stay multiples of this, but for narrow layers and the last cut, which may be finer (at half the MACs
            ResNet-20 runs 1.5 times faster in ONNX Runtime, with ragged widths 1.2 to 1.4 times).
        minimum: channels that every group keeps.
        ratios: layer -> ratio of the channels it makes to remove, in [0, 1), to the nearest channel; the budget is then met with
            the other layers.
        ignore: dotted names of modules that are never pruned.
        inside: dotted name of the only module that is.
        whole_heads: prune attention by whole heads instead of the same inner positions of every head.

    Raises:
        SettingError: a setting is out of its range.
        ModelError: the budget cannot be met; the message says how much can, and what locks the rest.
    """
    limits = Limits(round_to=round_to, minimum=minimum, ratios=ratios)
    _check_settings(budget, limits, criterion, ranking, normalize)
    check_flag(whole_heads, "plan_channels(whole_heads=...)")
    inputs = as_inputs(example)
    check_prunable(model, inputs, "plan_channels")

    def plan_for(analysis: ChannelAnalysis, prefix: str, macs: int) -> Plan:
        score_groups_(analysis.groups, model, prefix, criterion, normalize, task, samples, where="plan_channels")
        return ChannelSelector(analysis, budget, limits, ranking, prefix, macs, model).plan(inputs)

    with state_restored(model):
        return _first_proved_plan(
            TrialRepair(model, inputs, inside=inside, ignore=_names(ignore), whole_heads=whole_heads), plan_for
        )


def _first_proved_plan(search: TrialRepair, plan_for: Callable[[ChannelAnalysis, str, int], Plan]) -> Plan:
    """Plan, and repair the analysis, until a plan passes its proof."""
    total = count_macs(search.trace.module, search.trace.example)
    analysis = search.find_groups(total)
    while True:
        plan = plan_for(analysis, search.prefix, total)
        failure = search.prove(plan, analysis)
        needed = plan if failure is not None and failure.path is not None else search.without_idle_attributes(plan, analysis)
        if failure is None or needed is not plan:
            return needed
        analysis = search.repair(failure, analysis)


def _check_settings(budget: Budget, limits: Limits, criterion: Criterion, ranking: Ranking, normalize: Normalizer) -> None:
    check_budget(budget, "plan_channels(budget=...)", PRUNABLE)
    limits.check("plan_channels()")
    check_criterion(criterion, "plan_channels", CHANNEL_EVIDENCE)
    check_functions("plan_channels", ranking=ranking, normalize=normalize)


def analyze_channels(
    model: nn.Module, example: Inputs, *, where: str, ignore: tuple[str, ...] = (), inside: str | None = None
) -> tuple[ChannelAnalysis, str, int]:
    """(groups of channels that can be pruned, prefix of the names of their tensors, MACs of one sample).

    where: the function that the user called, with which messages begin.
    """
    check_prunable(model, example, where)
    search = TrialRepair(model, example, inside=inside, ignore=_names(ignore))
    total = count_macs(search.trace.module, search.trace.example)
    return search.find_groups(total), search.prefix, total


def check_functions(where: str, *, ranking: object, normalize: object) -> None:
    """Raise SettingError for what is no function."""
    for setting, value, example in (("ranking", ranking, "rankings.uniform"), ("normalize", normalize, "normalizers.by_mean")):
        if not callable(value):
            raise SettingError(f"{where}({setting}=...): wanted a function such as prune.{example}, got {value!r}")


def _names(ignore: object) -> tuple[str, ...]:
    """`ignore` as dotted names; SettingError for one name that stands alone, which is a sequence of letters."""
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(name, str) for name in ignore):
        wanted = f"({ignore!r},)" if isinstance(ignore, str) else '("layer1", "head")'
        raise SettingError(f"ignore=...: wanted dotted names of modules, such as {wanted}, got {ignore!r}")
    return tuple(ignore)


def check_prunable(model: nn.Module, example: Inputs, where: str) -> None:
    """Raise ModelError for what cannot be pruned whatever its channels are, and DataError for an example without samples."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ModelError(f"{where}: wanted a torch.nn.Module, not scripted, got {type(model).__name__}")
    kind = type(model).__name__
    if is_quantized(model):
        raise ModelError(
            f"{where}: {model.float_class} is quantized already, for its present shapes; prune the float model that it was made"
            " from, then quantize"
        )
    if masks_of(model) is not None:
        raise ModelError(
            f"{where}: {kind} has masks, which are for its present shapes; prune channels first, then Sparsify"
            " (or remove the masks with detach_masks_)"
        )
    check_no_torch_masks(model, where)
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"{where}: {kind} has no parameters, so it has no channels to remove")
    for name, p in parameters.items():
        _check_parameter(name, p)
    for value in pytree.tree_leaves(example):
        if isinstance(value, Tensor) and value.ndim and not len(value):
            raise DataError(f"{where}: wanted an example of at least one sample, got a tensor of shape {tuple(value.shape)}")


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if is_lazy(p):
        raise ModelError(f"{name} has no shape yet; run the model once on an example (lazy layers take their sizes from it)")
    if p.is_meta:
        raise ModelError(f"{name} is on the meta device, where it has no values; load the weights first")
    if p.dtype in (torch.float16, torch.bfloat16):
        raise ModelError(f"{name} is {p.dtype}; prune the fp32 model (model.float(), or run.finish() of mixed precision)")
    if p.is_complex():
        leaf = name.rpartition(".")[2]
        raise ModelError(
            f"{name} is {p.dtype}; only models of real weights can be scored and proved: hold it as"
            f" nn.Parameter(torch.view_as_real(...)), and read torch.view_as_complex(self.{leaf}) in forward"
        )
    if not p.is_floating_point():
        raise ModelError(f"{name} is {p.dtype}; a quantized model cannot be pruned, prune before quantizing")
    if not bool(p.detach().sum().isfinite()) and not bool(p.detach().isfinite().all()):
        raise ModelError(
            f"{name} has {int((~p.detach().isfinite()).sum())} values that are not finite; nothing can be proved of it"
        )
