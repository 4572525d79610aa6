"""Plan which channels to remove: analyze the model, score its groups of channels, select, and prove the plan."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from compresskit.base.budget import Budget, check_budget, takes_budget
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.task import Inputs, Task
from compresskit.measure import count_macs
from compresskit.prune.channels.resources import PRUNABLE, Limits
from compresskit.prune.channels.selector import ChannelSelector
from compresskit.prune.criteria import CHANNEL_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.normalizers import Normalizer, by_mean
from compresskit.prune.rankings import Ranking, cost_aware
from compresskit.prune.scores import score_groups_
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan
from compresskit.prune.structure.trial import TrialRepair

NO_RATIOS: Mapping[str, float] = MappingProxyType({})


@takes_budget
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
        round_to: widths stay multiples of this (at half the MACs ResNet-20 runs 1.5 times faster in ONNX Runtime, with ragged
            widths 1.2 to 1.4 times).
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
    _check_parameters(model)
    search = TrialRepair(model, as_inputs(example), inside=inside, ignore=ignore, whole_heads=whole_heads)
    total = count_macs(search.trace.module, search.trace.example)
    analysis = search.find_groups(total)
    while True:
        score_groups_(analysis.groups, model, search.prefix, criterion, normalize, task, samples)
        plan = ChannelSelector(analysis, budget, limits, ranking, search.prefix, total, model).plan(as_inputs(example))
        failure = search.prove(plan, analysis)
        if failure is None:
            return plan
        analysis = search.repair(failure, analysis)


def _check_settings(budget: Budget, limits: Limits, criterion: Criterion, ranking: Ranking, normalize: Normalizer) -> None:
    check_budget(budget, "plan_channels(budget=...)", PRUNABLE)
    limits.check("plan_channels()")
    check_criterion(criterion, "plan_channels", CHANNEL_EVIDENCE)
    check_functions("plan_channels", ranking=ranking, normalize=normalize)


def analyze_channels(
    model: nn.Module, example: Inputs, *, ignore: tuple[str, ...] = (), inside: str | None = None
) -> tuple[ChannelAnalysis, str, int]:
    """(groups of channels that can be pruned, prefix of the names of their tensors, MACs of one sample)."""
    search = TrialRepair(model, example, inside=inside, ignore=ignore)
    total = count_macs(search.trace.module, search.trace.example)
    return search.find_groups(total), search.prefix, total


def check_functions(where: str, *, ranking: object, normalize: object) -> None:
    """Raise SettingError for what is no function."""
    for setting, value, example in (("ranking", ranking, "rankings.uniform"), ("normalize", normalize, "normalizers.by_mean")):
        if not callable(value):
            raise SettingError(f"{where}({setting}=...): wanted a function such as prune.{example}, got {value!r}")


def _check_parameters(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(f"{name} is {p.dtype}; prune the fp32 model (model.float(), or run.finish() of mixed precision)")
        if not p.is_floating_point():
            raise ModelError(f"{name} is {p.dtype}; a quantized model cannot be pruned, prune before quantizing")
