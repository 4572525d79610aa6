"""Weight-only quantization: matrices stored in 2 to 8 bits, products in float, or in blocks of int8 where the runtime does that.

weights_of(graph)      which matrices there are, and how each is read
scaling, divide_       AWQ: large inputs get finer weights
rounding(Rows)         nearest, gptq, or a function of the user's
BlockQuantizer         stands behind the weight, which is on its grid from now on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, calibration_inputs, first_and_all
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, Task
from compresskit.graph.capture import Dynamic
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.calibration.statistics import Moments, moments
from compresskit.quant.numerics.block_grid import BlockQuantizer, Blocks, Rounding, Rows, nearest
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.passes.channel_scaling import ScalingLink, base_of, divide_, links_of
from compresskit.quant.weight_only.awq import WORTH, scaling
from compresskit.quant.weight_only.storage import DECODED, Form, insert_inputs_
from compresskit.quant.weight_only.weight_model import (
    WeightQuantized,
    insert_blocks_,
    insert_factor_,
    lower_weights,
    weight_origin,
)
from compresskit.quant.weight_only.weight_plan import Weight, WeightPlan, WeightRow, sqnr, weights_of

TABLE = Blocks(bits=8, block=None)  # of embeddings


def quantize_weights(
    model: nn.Module,
    batches: Batches,
    *,
    blocks: Blocks = Blocks(),  # noqa: B008  a frozen value
    rounding: Rounding = nearest,
    awq: bool = False,
    embeddings: Blocks | None = TABLE,
    convolutions: Blocks | None = None,
    exceptions: Mapping[str, Blocks | None] | None = None,
    form: Form = DECODED,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    strict: bool = False,
) -> WeightQuantized:
    """A copy of a float model whose matrices are stored in few bits: smaller files, products in float.

    Args:
        model: any float module; it is left as it was.
        batches: an iterable of inputs, or one batch. The first captures the model. A rounding or scaling that looks at data reads
            all of them (a hundred samples will do), holds them, and runs them once for each matrix; nothing else reads more.
        blocks: bits and block size of linear layers and products by a constant.
        rounding: `nearest` needs no data; `gptq` makes up for its own roundings, on the batches.
        awq: scale inputs so that those that matter get finer weights (2306.00978), folded into what makes them where that can be
            divided, else multiplied in where it gains 10 %. Looks at the batches.
        embeddings: of embedding tables; None leaves them float.
        convolutions: of convolutions, `Blocks(bits=8, block=None)`; None leaves them float.
        exceptions: name of a weight -> its own blocks, or None for float.
        form: how the file holds the matrices: `DECODED` in standard operators, `NBITS` and `NBITS_INT8` in ONNX Runtime's own.
        skip: dotted names of modules that stay float.
        dynamic: dimensions of the inputs that may vary; see `graph.Dynamic`.
        strict: raise where a matrix cannot be rounded, instead of leaving it float.

    Raises DataError where there is no batch or the data is nan or infinite; ModelError where the model cannot be captured, is
    quantized already, holds nan, or has nothing to round; SettingError for settings that do not fit it.
    """
    example, every = first_and_all(batches, "quantize_weights")
    captured, plain = lower_weights(model, example, skip, dynamic)
    weights = weights_of(captured.module)
    wanted = _wanted(weights, blocks, embeddings, convolutions, exceptions or {}, skip)
    if not wanted.chosen:
        raise ModelError(f"{type(model).__name__}: it has no matrix that can be rounded: {wanted.floating}")
    if strict and (bad := [w for w in weights if w.reason]):
        raise ModelError(f"strict=True: {bad[0].name} would stay float: {bad[0].reason}; leave its module out with skip=")
    originals = {name: get_tensor(captured.module, name).detach().clone() for name in wanted.chosen}
    insert_blocks_(captured.module, [w for w in weights if w.name in wanted.chosen], wanted.chosen)
    work = _Work(captured.module, wanted, rounding, every)
    with torch.no_grad():
        notes, scaled = work.round_(awq=awq)
    if form.integers:
        insert_inputs_(captured.module)
    origin = weight_origin(plain, weights=wanted.chosen, form=form, scaled=tuple(scaled))
    quantized = WeightQuantized(captured, origin).train(model.training)
    quantized.plan = _plan(quantized, weights, wanted, originals, notes, scaled)
    quantized.enable_()
    quantized.keep_masked_()
    return quantized


@dataclass(frozen=True)
class _Wanted:
    chosen: dict[str, Blocks]
    floating: dict[str, str]


def _wanted(
    weights: Sequence[Weight],
    blocks: Blocks,
    embeddings: Blocks | None,
    convolutions: Blocks | None,
    exceptions: Mapping[str, Blocks | None],
    skip: tuple[str, ...],
) -> _Wanted:
    """How each matrix is to be rounded, or why it is not."""
    names = {w.name for w in weights}
    if unknown := sorted(set(exceptions) - names):
        raise SettingError(f"exceptions={{{unknown[0]!r}: ...}}: the matrices are {sorted(names)}")
    if lost := [s for s in skip if not any(w.name.startswith(f"{s}.") or w.layer == s for w in weights)]:
        raise SettingError(f"skip={lost}: no matrix of the model stands in a module of that name")
    if convolutions is not None and convolutions.block is not None:
        raise SettingError(f"convolutions={convolutions}: a convolution has one scale for each channel, Blocks(block=None)")
    chosen, floating = {}, {}
    for w in weights:
        usual = {"product": blocks, "embedding": embeddings, "conv": convolutions}.get(w.kind)
        own = exceptions.get(w.name, usual)
        if any(w.name.startswith(f"{s}.") or w.layer == s for s in skip):
            floating[w.name] = "skipped by the user"
        elif w.reason:
            floating[w.name] = w.reason
        elif own is None:
            asked = {"embedding": "embeddings=None", "conv": "a convolution: convolutions=Blocks(bits=8, block=None) rounds it"}
            floating[w.name] = asked[w.kind] if usual is None and w.kind in asked else "an exception of the user's"
        elif w.kind == "conv" and own.block is not None:
            raise SettingError(f"exceptions={{{w.name!r}: {own}}}: a convolution has one scale for each channel")
        else:
            chosen[w.name] = own
    return _Wanted(chosen, floating)


class _Work:
    """Scale and round every matrix, in the order of the graph, on inputs that the rounded ones before it make."""

    def __init__(self, body: fx.GraphModule, wanted: _Wanted, rounding: Rounding, batches: Iterable[Inputs]) -> None:
        self.body, self.wanted, self.rounding, self.batches = body, wanted, rounding, batches
        self.seen: tuple[Node, Moments] | None = None
        calls = [n for n in body.graph.nodes if n.op == "call_module"]
        self.calls = {str(n.args[0].target): n for n in calls if isinstance(body.get_submodule(n.target), BlockQuantizer)}

    def round_(self, *, awq: bool) -> tuple[dict[str, str], list[str]]:
        """(name of a matrix -> a note on it, names of the values that are divided at run time)."""
        links = {name: link for link in links_of(self.body) for name, _ in link.weights} if awq else {}
        done: set[Node] = set()
        notes: dict[str, str] = {}
        scaled: list[str] = []
        masks = masks_of(self.body)
        for name, call in tqdm(self.calls.items(), desc="round weights", disable=None, leave=False):
            link = links.get(name)
            if link is not None and link.base not in done and all(n in self.wanted.chosen for n, _ in link.weights):
                done.add(link.base)
                self._scale(link, notes, scaled)
            quantizer, weight = self._quantizer(name), get_tensor(self.body, name)
            if not torch.isfinite(weight).all():
                raise ModelError(f"{name}: holds nan or infinite values; mend the model before it is quantized")
            mask = None if masks is None or name not in masks.masks else quantizer.rows(masks.masks[name])
            rows = Rows(quantizer.rows(weight.detach()).float(), quantizer.blocks, mask, partial(self._moment, call))
            usable = any(user.target in PRODUCTS for user in call.users)
            rounded, scale, zero_point = (self.rounding if usable else nearest)(rows)
            quantizer.set_(scale, zero_point)
            weight.copy_(quantizer.weight(rounded))
            quantizer.enabled = True
        return notes, scaled

    def _quantizer(self, name: str) -> BlockQuantizer:
        quantizer = self.body.get_submodule(self.calls[name].target)
        assert isinstance(quantizer, BlockQuantizer)
        return quantizer

    def _scale(self, link: ScalingLink, notes: dict[str, str], scaled: list[str]) -> None:
        quantizers = [self._quantizer(name) for name, _ in link.weights]
        weights = [(q.rows(get_tensor(self.body, n)), q.blocks) for q, (n, _) in zip(quantizers, link.weights, strict=True)]
        factor, share = scaling(weights, self._moments(link.base))
        fixed = any(name in self.calls for name, _ in link.makers)  # rounded already: it may not be divided any more
        makers = () if fixed else link.makers
        if share >= (1.0 if makers else WORTH):
            return
        divide_(self.body, replace(link, makers=makers), factor)
        if not makers:
            insert_factor_(self.body, link.base, factor)
            scaled.append(link.base.name)
        where = "folded into what makes its input" if makers else "multiplied in at run time"
        notes.update({name: f"scaled by its inputs ({where}), error {share:.0%}" for name, _ in link.weights})
        self.seen = None

    @cached_property
    def _data(self) -> list[Inputs]:
        return list(self.batches)

    def _moment(self, call: Node) -> Tensor:
        reader = next(user for user in call.users if user.target in PRODUCTS)
        return self._moments(base_of(reader.args[PRODUCTS[reader.target][0]])).second

    def _moments(self, base: Node) -> Moments:
        if self.seen is None or self.seen[0] is not base:
            self.seen = (base, moments(self.body, self._data, base))
        return self.seen[1]


def _plan(
    quantized: WeightQuantized,
    weights: Sequence[Weight],
    wanted: _Wanted,
    originals: Mapping[str, Tensor],
    notes: Mapping[str, str],
    scaled: Sequence[str],
) -> WeightPlan:
    blocked, rows = quantized.blocked(), []
    for w in weights:
        values = get_tensor(quantized.body, w.name)
        row = WeightRow(name=w.name, layer=w.layer, runs="", parameters=values.numel(), bytes=4 * values.numel())
        if w.name not in blocked:
            reason = wanted.floating.get(w.name, "")
            rows.append(replace(row, runs=f"float: {reason}"))
            continue
        quantizer = blocked[w.name]
        said = [note for note in (notes.get(w.name), *remarks(quantizer, originals[w.name])) if note]
        loss = None if w.name in notes else sqnr(originals[w.name], values)  # a scaled weight is another one
        size = quantized.form.bytes(quantizer)
        rows.append(replace(row, runs=str(quantizer.blocks), bytes=size, sqnr=loss, note="; ".join(said)))
    return WeightPlan(rows=tuple(rows))


def remarks(quantizer: BlockQuantizer, weight: Tensor) -> list[str]:
    """What is worth knowing of a matrix."""
    said, inputs = [], quantizer.rows(weight).shape[1]
    if quantizer.blocks.block is not None and (rest := inputs % quantizer.blocks.block):
        said.append(f"{inputs} inputs: the last block has {rest}, filled up with zeros")
    if not bool(weight.any()):
        said.append("all its weights are zero")
    return said


@dataclass(frozen=True, kw_only=True)
class WeightQuant(Stage):
    """Store the matrices of a trained model in few bits.

    samples: how many calibration samples to look at, from `Task(calibration=...)` or the training data; only roundings and
        scalings that want data read them.
    The others: as in `quantize_weights`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    blocks: Blocks = Blocks()  # noqa: RUF009  a frozen value
    rounding: Rounding = nearest
    awq: bool = False
    embeddings: Blocks | None = TABLE
    convolutions: Blocks | None = None
    exceptions: Mapping[str, Blocks | None] | None = None
    form: Form = DECODED
    samples: int = 128
    skip: tuple[str, ...] = ()
    dynamic: Dynamic = (0,)
    strict: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise SettingError(f"WeightQuant(samples=...): wanted a whole number >= 1, got {self.samples}")

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        return quantize_weights(
            model.to(task.device).eval(),
            calibration_inputs(task, self.samples) if self.awq or self.rounding is not nearest else task.example(),
            blocks=self.blocks,
            rounding=self.rounding,
            awq=self.awq,
            embeddings=self.embeddings,
            convolutions=self.convolutions,
            exceptions=self.exceptions,
            form=self.form,
            skip=self.skip,
            dynamic=self.dynamic,
            strict=self.strict,
        )
