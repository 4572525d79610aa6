"""`Candidate`: one way to compress a model, and the stages that do it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from compresskit.base.budget import keep
from compresskit.base.errors import ModelError
from compresskit.base.stage import Stage
from compresskit.distill import imitate
from compresskit.graph.capture import Dynamic
from compresskit.prune import Prune
from compresskit.prune.depth import Depth, Merge
from compresskit.prune.low_rank import LowRank
from compresskit.quant import QAT, Bits, BlockScheme, DynamicQuant, StaticQuant, WeightQuant
from compresskit.quant.effort.improve import Effort
from compresskit.quant.numerics.targets import DEFAULT_DEPLOYMENT, X86, Deployment, Target
from compresskit.quant.weight_only import MATMUL_NBITS, gptq
from compresskit.train import lr
from compresskit.train.train import Train

Storage = Literal["float", "int8", "int4", "dynamic", "weights4"]
WITHOUT_EFFORT = ("float", "dynamic", "weights4")  # without ranges of activations that are calibrated
FINER_BELOW = 0.5  # MACs that stay, below which channels are rounded to half as many: few multiples are left in narrow networks
MULTIPLE, MULTIPLE_OF_DEPTHWISE = 8, 16  # multiples of channels for which kernels are fast; the second of integer depthwise ones
#: Layers that dynamic quantization rounds.
OF_DYNAMIC = (nn.RNNBase, nn.RNNCellBase, nn.Linear, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
DYNAMIC_SHARE = 0.25  # of the weights, in layers that dynamic quantization rounds, from which on it is tried
TABLE_SHARE = 0.25  # of the weights, in embedding tables, from which on fewer bits for them are tried
#: What the name of a candidate begins with, and all of it but what is added for a folder.
NAME = re.compile(
    r"(?:(?P<blocks>\d+)blocks-)?(?:(?P<merged>\d+)merged-)?(?:macs(?P<macs>[\d.]+)-)?(?:rank(?P<rank>[\d.]+)-)?"
    rf"(?P<bits>{'|'.join(get_args(Storage))})(?:-(?P<effort>{'|'.join(get_args(Effort))}))?"
)
QAT_SHARE = 4  # one part of so many of the training is quantization-aware
ROUNDED_RATE = 0.1  # of the learning rates, for a part that is to stay near the float network
#: Settings of the training that its quantization-aware part does not have as they are: only float modules are compiled, and the
#: part has its own length, lower rates, and its own default objective.
OF_FLOAT = ("compile", "epochs", "steps", "objective")
OF_RATES = ("optimizer", "schedule")


@dataclass(frozen=True, kw_only=True)
class Removable:
    """What can go in a model, by name, what is worth least for what it saves first.

    Attributes:
        blocks: residual blocks.
        runs: runs of convolutions that can become one, as `prune.depth.Merge` names them, no two of the same layers.
        factors: whether factored layers save as much as candidates ask for at least.
    """

    blocks: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    factors: bool = True

    def runs_without(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """The runs none of whose layers is in one of these blocks."""
        gone = tuple(f"{block}." for block in blocks)
        return tuple(name for name in self.runs if not any(layer.startswith(gone) for layer in name.split(" + ")))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compress a model.

    Attributes:
        blocks: how many residual blocks go, in the order of the search.
        merged: how many runs of convolutions become one convolution each, in the order of the search.
        macs: fraction of the multiply-accumulates that stays when channels are removed; 1 removes none.
        rank: fraction of the multiply-accumulates that stays when layers are factored; 1 factors none.
        bits: "float" is not quantized; "int4" has weights of 4 bits and activations of 8; "dynamic" has weights of 8 bits and
            activations whose range is found in every call, as recurrent layers need it; "weights4" computes in float, with
            weights of 4 bits in blocks of linear layers and of embedding tables, which "int8" and "int4" store in 8 bits.
        effort: of the quantization, as in `quantize_static`. Where it is trained, operators are placed by measurement,
            and the training does the rest. The others, without calibrated ranges, are "fast".
    """

    blocks: int = 0
    merged: int = 0
    macs: float = 1.0
    rank: float = 1.0
    bits: Storage = "int8"
    effort: Effort = "fast"

    @property
    def name(self) -> str:
        """Such as `2blocks-macs0.5-int8`, `int8-balanced`; the name of its folder."""
        parts = [f"{self.blocks}blocks"] if self.blocks else []
        parts += [f"{self.merged}merged"] if self.merged else []
        parts += [f"macs{self.macs:g}"] if self.macs < 1 else []
        parts += [f"rank{self.rank:g}"] if self.rank < 1 else []
        return "-".join([*parts, self.bits, *([] if self.effort == "fast" else [self.effort])])

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The candidate with whose name a name begins; None where there is none."""
        if (match := NAME.match(name)) is None:
            return None
        kinds = {"blocks": int, "merged": int, "macs": float, "rank": float}
        given: dict[str, Any] = {key: kinds.get(key, str)(value) for key, value in match.groupdict().items() if value is not None}
        return cls(**given)

    @property
    def changes_structure(self) -> bool:
        """Whether it removes anything but precision."""
        return self.blocks > 0 or self.merged > 0 or self.macs < 1 or self.rank < 1

    @property
    def can_be_trained(self) -> bool:
        """Whether a training of finalists trains it: not where weights that no training rounds are all that changes."""
        return self.changes_structure or self.bits not in WITHOUT_EFFORT

    @property
    def trains_in_two_parts(self) -> bool:
        """Whether it is trained in float first and then with rounding.

        Not where nothing but precision goes. Not with weights of 4 bits either, as in the chain of `benchmarks/chain_cifar.md`:
        so few bits need the whole training.
        """
        return self.changes_structure and self.bits != "int4" and self.bits not in WITHOUT_EFFORT

    def stages(
        self,
        *,
        order: Removable,
        samples: int,
        train: Train | None,
        to_train: bool = False,
        target: Target = X86,
        deployment: Deployment = DEFAULT_DEPLOYMENT,
        depthwise: bool = False,
        dynamic: Dynamic = (0,),
    ) -> tuple[Stage, ...]:
        """The stages of a recipe that makes the candidate; none for the uncompressed model.

        Args:
            order: blocks and runs of convolutions, first to go first.
            samples: calibration samples that the stages read.
            train: how long and how to train in all; None trains nothing.
            to_train: without a training, whether the file should be like the one that a training makes: operators are placed by
                measurement, and nothing else is done for its accuracy.
            target: runtime of the quantized file.
            deployment: threads and batch for which operators are placed, where that is measured.
            depthwise: whether the model has depthwise convolutions.
            dynamic: dimensions of the inputs that may vary in a quantized file.

        Raises ModelError where there are not so many runs outside of the blocks that go.
        """
        finetune, qat = (None, None) if train is None else _shares(train, self)
        structure: list[Any] = []
        blocks = order.blocks[: self.blocks]
        if blocks:
            structure.append(Depth(blocks=blocks, repair=samples))
        if self.merged:
            structure.append(Merge(runs=self._runs(order, blocks), samples=samples, repair=samples))
        if self.macs < 1:
            multiple = MULTIPLE_OF_DEPTHWISE if depthwise and self.bits != "float" else MULTIPLE
            multiple = multiple if self.macs >= FINER_BELOW else multiple // 2
            structure.append(Prune(budget=keep(macs=self.macs), samples=samples, round_to=multiple))
        if self.rank < 1:
            structure.append(LowRank(budget=keep(macs=self.rank), samples=samples))
        if structure and finetune is not None:
            structure[-1] = replace(structure[-1], finetune=finetune)
        if self.bits == "float":
            return tuple(structure)
        given: dict[str, Any] = {"target": target} | ({} if dynamic == (0,) else {"dynamic": dynamic})
        if self.bits == "dynamic":
            return (*structure, DynamicQuant(**given))
        if self.bits == "weights4":
            return (*structure, _in_four_bits(samples, dynamic))
        given["bits"] = Bits(weights=4) if self.bits == "int4" else Bits()
        if qat is not None or to_train:
            given |= self._placement(target, deployment)
        elif self.effort != "fast":
            given |= {"effort": self.effort, "deployment": deployment}
        if train is not None and qat is not None:
            return (*structure, self._rounded_training(train, qat, given))
        return (*structure, StaticQuant(samples=min(samples, 512), **given))

    def _placement(self, target: Target, deployment: Deployment) -> dict[str, Any]:
        """Settings that place the operators of what is trained; none where nothing can be measured, as for another machine."""
        if self.effort == "fast" or not target.runs_here:
            return {}
        return {"choose": "measure", "deployment": deployment}

    def _rounded_training(self, train: Train, part: Train, given: dict[str, Any]) -> QAT:
        """The part of a training that is quantization-aware. given: settings of the quantization."""
        settings = given | {each.name: getattr(part, each.name) for each in fields(Train) if each.name not in OF_FLOAT + OF_RATES}
        if self.changes_structure and not self.trains_in_two_parts:  # what was removed is made up for here
            settings |= {name: getattr(train, name) for name in OF_RATES}
        else:
            settings["optimizer"] = partial(at_lower_rates, train.optimizer, ROUNDED_RATE)
            if isinstance(train.schedule, lr.LRSchedule):  # one of torch's may set rates of its own
                settings["schedule"] = train.schedule
            if train.objective is not None and not train.reads_target:
                settings["freeze"] = 0.0  # what imitates alone is to stay where the float model is, and so do its statistics
        return QAT(**settings | {"epochs": part.epochs, "steps": part.steps, "objective": train.objective})

    def _runs(self, order: Removable, blocks: Sequence[str]) -> tuple[str, ...]:
        """The runs that become one convolution each where some blocks go."""
        left = order.runs_without(blocks)
        if len(left) < self.merged:
            raise ModelError(
                f"{self.name}: wanted {self.merged} runs of convolutions outside of the blocks, there are {len(left)}; merge"
                " fewer"
            )
        return left[: self.merged]


UNCOMPRESSED = Candidate(bits="float")


def at_lower_rates(make: Callable[..., torch.optim.Optimizer], share: float, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that `make` gives for parameters, with a share of its learning rates."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * share  # not in place: it may be a tensor of the user's
    return optimizer


def _in_four_bits(samples: int, dynamic: Dynamic) -> WeightQuant:
    """Weights and tables of 4 bits. ONNX Runtime's own operators decode those rows of a table that are looked up, no others."""
    return WeightQuant(rounding=gptq, embeddings=BlockScheme(), storage=MATMUL_NBITS, samples=min(samples, 512), dynamic=dynamic)


def _shares(train: Train, candidate: Candidate) -> tuple[Train | None, Train | None]:
    """The training before rounding, and the one with it. Without an objective of its own, it imitates the uncompressed model."""
    train = train if train.objective is not None else replace(train, objective=imitate())
    if candidate.bits == "float":
        return train, None
    if candidate.bits in WITHOUT_EFFORT:
        return (train if candidate.can_be_trained else None), None
    if not candidate.trains_in_two_parts:
        return None, train
    total = train.steps or train.epochs or 0
    rounded = max(1, round(total / QAT_SHARE))
    if rounded >= total:  # one epoch or step, which the structure needs more
        return train, None
    if train.steps is None:
        return replace(train, epochs=total - rounded), replace(train, epochs=rounded)
    return replace(train, steps=total - rounded), replace(train, steps=rounded)


def share_in(model: nn.Module, *kinds: type[nn.Module]) -> float:
    """The fraction of a model's parameters that layers of some kinds have; tied ones count once."""
    inside = {id(p): p.numel() for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    return sum(inside.values()) / max(1, sum(p.numel() for p in model.parameters()))
