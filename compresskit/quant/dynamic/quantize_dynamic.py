"""Dynamic quantization: weights stored in integers, activations rounded at run time; no calibration data is needed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.capture import Dynamic, check_dynamic
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.measure import few_rows, input_row_dims
from compresskit.quant.dynamic.insert_dynamic import DynamicallyQuantized, build_dynamic
from compresskit.quant.dynamic.noisy_layers import noisy_lstm_layers, uneven_lookups
from compresskit.quant.dynamic.placement_dynamic import DEFAULT_OPERATORS, DYNAMIC_KINDS
from compresskit.quant.effort.samples import OutputError, few_compared_rows, tell_of_loss
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import X86, Target, check_target

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """Settings of dynamic quantization; `quantize_dynamic` explains them."""

    target: Target = X86
    weights: Scheme | None = None
    operators: tuple[str, ...] = DEFAULT_OPERATORS
    skip: tuple[str, ...] = ()
    dynamic: Dynamic = (0,)

    def check(self, where: str) -> None:
        """Raise SettingError, which begins with `where`, for a setting out of range."""
        check_field_types(self, where)
        check_target(self.target, where)
        check_dynamic(self.dynamic, f"{where}(dynamic=...)")
        if not isinstance(self.weights, Scheme | None):
            raise SettingError(
                f"{where}(weights=...): wanted a number format such as ck.quant.Scheme(signed=True, symmetric=True), or None for"
                f" the target's, got {self.weights!r}"
            )
        if unknown := sorted(set(self.operators) - set(DYNAMIC_KINDS.values())):
            raise SettingError(f"{where}(operators={unknown}): dynamic quantization knows {sorted(set(DYNAMIC_KINDS.values()))}")


@no_modes_of_caller()
def quantize_dynamic(
    model: nn.Module,
    batches: Batches,
    *,
    target: Target = X86,
    weights: Scheme | None = None,
    operators: tuple[str, ...] = DEFAULT_OPERATORS,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
) -> DynamicallyQuantized:
    """Return a copy of a float model with int8 weights; the inputs of its products are rounded at run time.

    Linear layers, products with a stored weight and LSTMs multiply in integers; embeddings are looked up in integers; GRUs and
    RNNs store integers and compute in float. `print(quantized.placement)` lists every operator, with the reason where it stays
    float.

    Ranges are those of the whole batch. On several threads, ONNX Runtime's LSTM takes those of the part that each thread has: its
    outputs for more than one sample depend on how many threads there are, within the quantization error.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch; the first captures the model. Give real inputs: layers of an LSTM
            stay float where rounding them would leave less than 15 dB of the outputs on its first rows, which a warning says.
        target: where it will run. `X86_NO_VNNI` has 7-bit weights, whose sums do not saturate there.
        weights: number format of the weights. The default is symmetric, with one scale per channel, which costs no time; LSTMs
            get one per matrix, with which ONNX Runtime's kernel is faster. A symmetric format is a little faster than one with
            zero points; LSTMs and convolutions always get a symmetric one, because their kernels have no other.
        operators: kinds that are quantized: "linear", "matmul", "embedding", "lstm", "gru", "rnn"; "conv" only if it is named.
        skip: dotted names of modules that stay float.
        dynamic: dimensions of the inputs that may vary: `(0, 1)` for batch and length of sequences; see `graph.Dynamic`.

    Raises DataError where there is no batch; ModelError where the model cannot be captured, is quantized already, or has nothing
    to quantize; SettingError for names that it does not have.
    """
    settings = DynamicSettings(target=target, weights=weights, operators=operators, skip=skip, dynamic=dynamic)
    settings.check("quantize_dynamic")
    example, _ = first_and_all(batches, "quantize_dynamic")
    quantized = build_dynamic(model, example, **vars(settings))
    error = OutputError(model, [few_compared_rows(model, quantized, example, dynamic)], None)
    if not error.outputs[0]:
        log.info(
            "quantize_dynamic: %s has no output in floating point to compare; what it loses is not judged", type(model).__name__
        )
        return quantized
    if uneven := uneven_lookups(quantized, error):
        quantized = build_dynamic(model, example, floating=uneven, **vars(settings))
    noisy = noisy_lstm_layers(quantized, error.decibels)
    if noisy:
        log.warning("quantize_dynamic: left in float: %s", ", ".join(f"{name} ({reason})" for name, reason in noisy.items()))
        quantized = build_dynamic(model, example, floating={**noisy, **uneven}, **vars(settings))
    tell_of_loss(error, quantized, "quantize_dynamic", "`quantize_to_accuracy` leaves float what costs most")
    return quantized


@dataclass(frozen=True, kw_only=True)
class DynamicQuant(DynamicSettings, Stage):
    """Quantize a trained model dynamically, as `quantize_dynamic` does; the settings are the same."""

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"dense"})

    def __post_init__(self) -> None:
        self.check("DynamicQuant")
        check_field_types(self)

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model, example = model.to(task.device).eval(), task.example()
        return quantize_dynamic(
            model,
            few_rows(model, example, 2, input_row_dims(model, example, self.dynamic)),
            target=self.target,
            weights=self.weights,
            operators=self.operators,
            skip=self.skip,
            dynamic=self.dynamic,
        )
