"""Weight-only quantization: weights stored in 1 to 8 bits, products in float (or in int8 where ONNX Runtime offers that).

capture -> weights_of -> for each weight: AWQ scaling -> rounding (round_to_nearest, gptq, or the user's), or
a palette's centroids -> WeightQuantized
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, calibration_inputs, first_and_all
from compresskit.base.progress import progress_bar
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, Task
from compresskit.graph.capture import Dynamic, check_dynamic
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.calibrated import check_samples
from compresskit.quant.calibration.activation_statistics import InputMoments, input_moments, patch_moments
from compresskit.quant.effort.samples import OutputError, few_compared_rows, tell_of_loss
from compresskit.quant.numerics.block_grid import (
    BlockQuantizer,
    BlockScheme,
    MatrixQuantizer,
    Rounding,
    WeightMatrix,
    round_to_nearest,
)
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.palette import Palette, PaletteQuantizer, WeightScheme
from compresskit.quant.passes.channel_scaling import ScalingLink, base_of, divide_, links_of
from compresskit.quant.weight_only.awq import MAX_RUNTIME_ERROR, awq_scaling
from compresskit.quant.weight_only.storage import DEQUANTIZE_LINEAR, WeightStorage, insert_input_quantizers_
from compresskit.quant.weight_only.weight_model import (
    WeightOrigin,
    WeightQuantized,
    capture_for_weights,
    insert_division_,
    insert_matrix_quantizers_,
    matrix_quantizers,
)
from compresskit.quant.weight_only.weight_plan import GraphWeight, WeightPlan, WeightRow, sqnr, weights_of

EMBEDDING_SCHEME = BlockScheme(bits=8, block_size=None)


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Settings of weight-only quantization; `quantize_weights` explains them."""

    scheme: WeightScheme = BlockScheme()  # noqa: RUF009  a frozen value
    rounding: Rounding = round_to_nearest
    awq: bool = False
    embeddings: WeightScheme | None = EMBEDDING_SCHEME
    convolutions: WeightScheme | None = None
    overrides: Mapping[str, WeightScheme | None] | None = None
    storage: WeightStorage = DEQUANTIZE_LINEAR
    skip: tuple[str, ...] = ()
    dynamic: Dynamic = (0,)
    strict: bool = False

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        if isinstance(self.strict, str) and self.strict == "all":
            raise SettingError(
                f'{where}(strict="all"): wanted True or False: products are computed in float here, and "all" is of'
                " quantize_static and QAT; write strict=True"
            )
        check_field_types(self, where)
        check_dynamic(self.dynamic, f"{where}(dynamic=...)")
        if not callable(self.rounding) or isinstance(self.rounding, type):
            raise SettingError(
                f"{where}(rounding=...): wanted a function such as ck.quant.weight_only.gptq, got {self.rounding!r}"
            )
        if not isinstance(self.storage, WeightStorage):
            raise SettingError(
                f"{where}(storage=...): wanted a storage such as ck.quant.weight_only.MATMUL_NBITS, got {self.storage!r}"
            )
        _check_scheme(self.scheme, f"{where}(scheme=...)")
        for name in ("embeddings", "convolutions"):
            if (scheme := getattr(self, name)) is not None:
                _check_scheme(scheme, f"{where}({name}=...)", " or None for float")
        if isinstance(self.convolutions, BlockScheme) and self.convolutions.block_size is not None:
            raise SettingError(
                f"{where}(convolutions={self.convolutions}): a convolution has one scale for each channel,"
                " BlockScheme(block_size=None)"
            )
        if not isinstance(self.overrides, Mapping | None):
            raise SettingError(
                f'{where}(overrides=...): wanted {{"name of a weight": ck.quant.BlockScheme(bits=8, block_size=None)}}, got'
                f" {self.overrides!r}"
            )
        for name, scheme in (self.overrides or {}).items():
            if scheme is not None:
                _check_scheme(scheme, f"{where}(overrides={{{name!r}: ...}})", " or None for float")


def _check_scheme(scheme: object, where: str, other: str = "") -> None:
    if not isinstance(scheme, WeightScheme):
        raise SettingError(
            f"{where}: wanted a number format, such as ck.quant.BlockScheme(bits=8, block_size=None){other}, got {scheme!r}"
        )


def quantize_weights(
    model: nn.Module,
    batches: Batches,
    *,
    scheme: WeightScheme = BlockScheme(),  # noqa: B008  a frozen value
    rounding: Rounding = round_to_nearest,
    awq: bool = False,
    embeddings: WeightScheme | None = EMBEDDING_SCHEME,
    convolutions: WeightScheme | None = None,
    overrides: Mapping[str, WeightScheme | None] | None = None,
    storage: WeightStorage = DEQUANTIZE_LINEAR,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    strict: bool = False,
) -> WeightQuantized:
    """Return a copy of a float model whose weights are stored in few bits: smaller files, products in float.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs (tensors, tuples or dicts), or one batch. The first captures the model. A rounding or
            scaling that uses calibration data reads all of them (a hundred samples will do), keeps them in memory, and runs them
            once for each weight; otherwise only the first is read.
        scheme: number format of linear layers and of products by a constant: a `BlockScheme`, or a `weight_only.Palette`.
        rounding: `round_to_nearest` needs no data; `gptq` corrects for its rounding errors on the batches, but in embeddings.
        awq: scale the inputs of layers so that those with large activations get finer weights (2306.00978). The factors are
            folded into the preceding operator where that is possible, and else multiplied in at run time where that lowers the
            error by 10 %. Uses the batches.
        embeddings: number format of embedding tables; None leaves them float.
        convolutions: number format of convolutions, `BlockScheme(bits=8, block_size=None)` or a `Palette`; None for float.
        overrides: name of a weight -> its own number format, or None for float.
        storage: how the ONNX file stores the weights: `DEQUANTIZE_LINEAR` with standard operators, `MATMUL_NBITS` and
            `MATMUL_NBITS_INT8` with ONNX Runtime's own. Palettes have standard operators.
        skip: dotted names of modules that stay float.
        dynamic: dimensions of the inputs that may vary; see `graph.Dynamic`.
        strict: raise where a weight cannot be rounded, instead of leaving it float.

    Returns the quantized model; `print(quantized.plan)` shows how each weight is stored.
    Raises DataError where there is no batch or the data holds nan or infinite values; ModelError where the model cannot be
    captured, is quantized already, holds nan, or has no weight to round; SettingError for settings that do not fit it.
    """
    settings = WeightSettings(
        scheme=scheme, rounding=rounding, awq=awq, embeddings=embeddings, convolutions=convolutions, overrides=overrides,
        storage=storage, skip=skip, dynamic=dynamic, strict=strict,
    )  # fmt: skip
    settings.check("quantize_weights")
    with no_modes_of_caller():
        return _quantize_weights(model, batches, settings, "quantize_weights")


def _quantize_weights(model: nn.Module, batches: Batches, settings: WeightSettings, where: str) -> WeightQuantized:
    """What `quantize_weights` returns. where: the function or stage, for messages."""
    storage, overrides = settings.storage, settings.overrides or {}
    example, stream = first_and_all(batches, where)
    captured, origin = capture_for_weights(model, example, tuple(settings.skip), settings.dynamic, overridden=overrides)
    weights = weights_of(captured.module)
    formats = _number_formats(weights, settings)
    _refuse_float(type(model).__name__, weights, formats, strict=settings.strict)
    for w in weights:
        scheme = formats.rounded.get(w.name)
        _check_palette(f"{where}: {w.name}", scheme, w.kind, settings.rounding, settings.awq, storage)
    originals = {name: get_tensor(captured.module, name).detach().clone() for name in formats.rounded}
    insert_matrix_quantizers_(captured.module, [w for w in weights if w.name in formats.rounded], formats.rounded)
    rounder = _WeightRounder(captured.module, formats, settings.rounding, stream)
    with torch.no_grad():
        rounder.round_(awq=settings.awq)
    if storage.int8_inputs:
        insert_input_quantizers_(captured.module)
    origin = WeightOrigin(**vars(origin), weights=formats.rounded, storage=storage, scaled=tuple(rounder.scaled))
    quantized = WeightQuantized(captured, origin).train(model.training)
    quantized.plan = _plan(quantized, weights, formats, originals, rounder.notes)
    quantized.enable_()
    quantized.keep_masked_()
    error = OutputError(model, [few_compared_rows(model, quantized, example, settings.dynamic)], None)
    tell_of_loss(error, quantized, where, "print(quantized.plan) says what each weight lost; overrides= gives some more bits")
    return quantized


@dataclass(frozen=True)
class _NumberFormats:
    """rounded: name of a weight -> its number format. floating: name of a weight -> why it stays float."""

    rounded: dict[str, WeightScheme]
    floating: dict[str, str]


def _number_formats(weights: Sequence[GraphWeight], settings: WeightSettings) -> _NumberFormats:
    names, overrides, skip = {w.name for w in weights}, settings.overrides or {}, settings.skip
    if unknown := sorted(set(overrides) - names):
        raise SettingError(f"overrides={{{unknown[0]!r}: ...}}: the matrices are {sorted(names)}")
    if unknown := [s for s in skip if not any(w.name.startswith(f"{s}.") or w.layer == s for w in weights)]:
        raise SettingError(f"skip={unknown}: no matrix of the model stands in a module of that name")
    defaults = {"product": settings.scheme, "embedding": settings.embeddings, "conv": settings.convolutions}
    rounded, floating = {}, {}
    for w in weights:
        default = defaults.get(w.kind)
        chosen = overrides.get(w.name, default)
        if any(w.name.startswith(f"{s}.") or w.layer == s for s in skip):
            floating[w.name] = "skipped by the user"
        elif w.reason:
            floating[w.name] = w.reason
        elif chosen is None:
            floating[w.name] = _UNROUNDED.get(w.kind, _OVERRIDDEN) if default is None else _OVERRIDDEN
        elif w.kind == "conv" and isinstance(chosen, BlockScheme) and chosen.block_size is not None:
            raise SettingError(f"overrides={{{w.name!r}: {chosen}}}: a convolution has one scale for each channel")
        else:
            rounded[w.name] = chosen
    return _NumberFormats(rounded, floating)


_UNROUNDED = {
    "embedding": "embeddings=None",
    "conv": "a convolution: convolutions=BlockScheme(bits=8, block_size=None) rounds it",
}
_OVERRIDDEN = "overrides= leaves it float"


def _check_palette(
    where: str, scheme: WeightScheme | None, kind: str, rounding: Rounding, awq: bool, storage: WeightStorage
) -> None:
    """Raise SettingError, which begins with `where`, for settings that do not go with the palette of a weight of a kind."""
    if not isinstance(scheme, Palette) or kind == "conv":
        return
    if kind == "product" and (awq or rounding is not round_to_nearest):
        setting = "awq=True" if awq else "rounding=..."
        raise SettingError(
            f"{where}: {setting} works on the grid of a BlockScheme, got a palette, whose centroids k-means finds; leave it out"
        )
    if storage.onnxruntime:
        raise SettingError(
            f"{where}: {storage} packs the integers of a BlockScheme, got a palette; leave storage=DEQUANTIZE_LINEAR, with which"
            " palettes are stored in standard operators"
        )


def _refuse_float(model: str, weights: Sequence[GraphWeight], formats: _NumberFormats, *, strict: bool) -> None:
    """Raise ModelError where no weight can be rounded, or, where `strict`, one cannot."""
    if not formats.rounded:
        raise ModelError(f"{model}: it has no matrix that can be rounded: {formats.floating}")
    if strict and (refused := [w for w in weights if w.reason]):
        raise ModelError(f"strict=True: {refused[0].name} would stay float: {refused[0].reason}; leave its module out with skip=")


class _WeightRounder:
    """Scales and rounds every weight in the order of the graph; each layer sees inputs computed with the weights rounded so far.

    notes: name of a weight -> a remark. scaled: names of the values that are divided at run time.
    """

    def __init__(self, body: fx.GraphModule, formats: _NumberFormats, rounding: Rounding, batches: Iterable[Inputs]) -> None:
        self.body, self.formats, self.rounding, self.batches = body, formats, rounding, batches
        self.notes: dict[str, str] = {}
        self.scaled: list[str] = []
        self.latest_moments: tuple[Node, InputMoments] | None = None
        calls = [n for n in body.graph.nodes if n.op == "call_module"]
        self.calls = {str(n.args[0].target): n for n in calls if isinstance(body.get_submodule(n.target), MatrixQuantizer)}

    def round_(self, *, awq: bool) -> None:
        """Round every weight, after scaling its inputs where `awq`."""
        links = {name: link for link in links_of(self.body) for name, _ in link.weights} if awq else {}
        done: set[Node] = set()
        masks = masks_of(self.body)
        for name, call in progress_bar(self.calls.items(), desc="round weights"):
            link = links.get(name)
            if link is not None and link.base not in done and all(n in self.formats.rounded for n, _ in link.weights):
                done.add(link.base)
                self._scale_(link)
            quantizer, weight = self._quantizer(name), get_tensor(self.body, name)
            if not torch.isfinite(weight).all():
                raise ModelError(f"{name}: holds nan or infinite values; mend the model before it is quantized")
            mask = None if masks is None or name not in masks.masks else quantizer.rows(masks.masks[name])
            rows = quantizer.rows(weight.detach()).float()
            if isinstance(quantizer, BlockQuantizer):
                rounded, scale, zero_point = self._rounded(call, rows, quantizer.scheme, mask)
                quantizer.set_grid_(scale, zero_point)
            else:
                assert isinstance(quantizer, PaletteQuantizer)
                rounded = quantizer.fit_(rows, mask, name)
            weight.copy_(quantizer.weight(rounded))
            quantizer.enabled = True

    def _rounded(self, call: Node, rows: Tensor, scheme: BlockScheme, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What the rounding makes of a weight: of a convolution's, group by group; rows that are looked up go to the nearest."""
        if any(user.target in PRODUCTS for user in call.users):
            return self.rounding(WeightMatrix(rows, scheme, mask, partial(self._second_moment, call)))
        conv = next((user for user in call.users if user.target in CONVS), None)
        if conv is None:
            return round_to_nearest(WeightMatrix(rows, scheme, mask, partial(self._second_moment, call)))
        groups = conv.args[6] if len(conv.args) > 6 else 1
        moments = cache(lambda: patch_moments(self.body, self._data, conv))
        masks = [None] * groups if mask is None else mask.chunk(groups)
        parts = [
            self.rounding(WeightMatrix(part, scheme, kept, lambda group=group: moments()[group]))  # type: ignore[misc]
            for group, (part, kept) in enumerate(zip(rows.chunk(groups), masks, strict=True))
        ]
        rounded, scale, zero_point = (torch.cat(values) for values in zip(*parts, strict=True))
        return rounded, scale, zero_point

    def _quantizer(self, name: str) -> MatrixQuantizer:
        quantizer = self.body.get_submodule(self.calls[name].target)
        assert isinstance(quantizer, MatrixQuantizer)
        return quantizer

    def _scale_(self, link: ScalingLink) -> None:
        """Scale the inputs of the weights that read one value, where that lowers their error (AWQ)."""
        quantizers = [self._quantizer(name) for name, _ in link.weights]
        weights = [(q.rows(get_tensor(self.body, n)), q.scheme) for q, (n, _) in zip(quantizers, link.weights, strict=True)]
        factor, error = awq_scaling(weights, self._moments(link.base))
        already_rounded = any(name in self.calls for name, _ in link.makers)  # then it may not be divided any more
        makers = () if already_rounded else link.makers
        if error >= (1.0 if makers else MAX_RUNTIME_ERROR):
            return
        divide_(self.body, replace(link, makers=makers), factor)
        if not makers:
            insert_division_(self.body, link.base, factor)
            self.scaled.append(link.base.name)
        where = "folded into what makes its input" if makers else "multiplied in at run time"
        self.notes.update({name: f"scaled by its inputs ({where}), error {error:.0%}" for name, _ in link.weights})
        self.latest_moments = None

    @cached_property
    def _data(self) -> list[Inputs]:
        return list(self.batches)

    def _second_moment(self, call: Node) -> Tensor:
        reader = next(user for user in call.users if user.target in PRODUCTS)
        return self._moments(base_of(reader.args[PRODUCTS[reader.target][0]])).second

    def _moments(self, value: Node) -> InputMoments:
        if self.latest_moments is None or self.latest_moments[0] is not value:
            self.latest_moments = (value, input_moments(self.body, self._data, value))
        return self.latest_moments[1]


def _plan(
    quantized: WeightQuantized,
    weights: Sequence[GraphWeight],
    formats: _NumberFormats,
    originals: Mapping[str, Tensor],
    notes: Mapping[str, str],
) -> WeightPlan:
    quantizers, rows = matrix_quantizers(quantized.body), []
    for w in weights:
        values = get_tensor(quantized.body, w.name)
        row = WeightRow(name=w.name, layer=w.layer, runs="", parameters=values.numel(), bytes=4 * values.numel())
        if w.name not in quantizers:
            rows.append(replace(row, runs=f"float: {formats.floating.get(w.name, '')}"))
            continue
        quantizer = quantizers[w.name]
        remarks = [note for note in (notes.get(w.name), *_remarks(quantizer, originals[w.name])) if note]
        if w.looked_up and not quantized.storage.decodes_rows(quantizer):
            remarks.append("all rows are decoded in every call; with 8 bits or MATMUL_NBITS those that are looked up")
        noise = None if w.name in notes else sqnr(originals[w.name], values)  # a scaled weight is not comparable
        size = quantized.storage.bytes(quantizer, multiplied=w.kind != "embedding", looked_up=w.looked_up)
        rows.append(replace(row, runs=str(quantizer.scheme), bytes=size, sqnr=noise, note="; ".join(remarks)))
    return WeightPlan(rows=tuple(rows))


def _remarks(quantizer: MatrixQuantizer, weight: Tensor) -> list[str]:
    remarks, inputs = [], quantizer.rows(weight).shape[1]
    if (
        isinstance(quantizer, BlockQuantizer)
        and quantizer.scheme.block_size is not None
        and (rest := inputs % quantizer.scheme.block_size)
    ):
        remarks.append(f"{inputs} inputs: the last block has {rest}, filled up with zeros")
    if not bool(weight.any()):
        remarks.append("all its weights are zero")
    return remarks


@dataclass(frozen=True, kw_only=True)
class WeightQuant(WeightSettings, Stage):
    """Store the weights of a trained model in few bits, as `quantize_weights` does.

    samples: how many calibration samples to use, from `Task(calibration=...)` or the training data; only roundings and scalings
        that use data read them.
    The other settings: as in `quantize_weights`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    samples: int = 128

    def __post_init__(self) -> None:
        self.check("WeightQuant")
        check_field_types(self)
        check_samples(self.samples, "WeightQuant")
        _check_palette("WeightQuant(scheme=...)", self.scheme, "product", self.rounding, self.awq, self.storage)
        _check_palette("WeightQuant(embeddings=...)", self.embeddings, "embedding", self.rounding, self.awq, self.storage)

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples if self.awq or self.rounding is not round_to_nearest else 0

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        data = calibration_inputs(task, samples) if (samples := self.calibration_samples(model)) else task.example()
        with no_modes_of_caller():
            return _quantize_weights(model.to(task.device).eval(), data, self, "WeightQuant")
