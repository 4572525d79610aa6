"""Where a quantized model will run, as plain data: which operators run in integers there, and in which numbers.

| target | activations | weights | what sets it apart |
|---|---|---|---|
| X86 (FBGEMM) | uint8 | int8 | ONNX Runtime with VNNI |
| X86_NO_VNNI | uint8 | 7 bits | pairs of products are added in int16 there, see `saturating_matmul` |
| ARM (QNNPACK) | uint8 | int8 | average pooling keeps its input's scale |
| TENSORRT | int8, zero point 0 | int8 | rounding stands before operators, not behind them |
| OPENVINO | uint8 | int8 | as X86, and a sum takes a convolution's result unrounded |

Weights are symmetric, with a scale for each output channel, everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.quant.numerics.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Support:
    """How a runtime executes one kind of operator in integers.

    output: its result must be quantized too, at once, or the runtime computes in float after all.
    follow: only worth it where all its inputs are in integers anyway; by itself it would cost more than it saves.
    shared: its inputs and its result must have one scale and zero point.
    fuses: a convolution's result that only it reads reaches it in float, inside the convolution's kernel; of two such, one.
    axis: the dimension of its weight that may have a scale for each index; None where there must be one scale for all.
    """

    output: bool = True
    follow: bool = False
    shared: bool = False
    fuses: bool = False
    axis: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime on a kind of machine; a user adds one by writing one value.

    activations, weights: their grids.
    operators: kind of operator (see `placement.OPERATOR_KINDS`) -> how it runs in integers; kinds not named stay float.
    zero_points: whether activations may have a zero point other than 0.
    saturates: products are added in pairs in int16, so that full 8-bit weights can overflow.
    opset: of the exported file.
    tuned: whether the file is rewritten for the integer kernels of ONNX Runtime on x86, see `export.kernels`.

    Raises SettingError where a scheme cannot be expressed there, or in ONNX at all; the message names the field.
    """

    name: str
    activations: Scheme = field(default_factory=Scheme)
    weights: Scheme = field(default_factory=lambda: Scheme(signed=True, symmetric=True, per_channel=True))
    operators: Mapping[str, Support]
    zero_points: bool = True
    saturates: bool = False
    opset: int = 20
    tuned: bool = False

    def __post_init__(self) -> None:
        a, w = self.activations, self.weights
        if a.bits != 8:
            self._refuse("activations", "bits", 8, a.bits, "QuantizeLinear saturates at the ends of uint8 and int8")
        if a.per_channel:
            self._refuse("activations", "per_channel", False, True, "an integer convolution takes one scale for its input")
        if a.symmetric and a.narrow:
            self._refuse("activations", "narrow", False, True, "QuantizeLinear saturates at -128, not at -127")
        if not a.symmetric and not self.zero_points:
            self._refuse("activations", "symmetric", True, False, "the runtime knows no zero point but 0")
        if not w.symmetric:
            self._refuse("weights", "symmetric", True, False, "integer kernels take weights with zero point 0")

    def _refuse(self, which: str, name: str, wanted: object, got: object, why: str) -> None:
        raise SettingError(f"Target {self.name}: {which}.{name} must be {wanted}, got {got}: {why}")


#: What has integer kernels in ONNX Runtime, and pays. Measured: uint8 activations let it keep residual adds in integers
#: (ResNet-20: 0.47 of the fp32 latency, against 1.20 with int8); Gemm may hand its sum on in float, which saves the rounding of
#: the logits; Add and pooling pay only between operators that are in integers already.
_ONNX_RUNTIME = {
    "conv": Support(),
    "linear": Support(output=False),
    "add": Support(follow=True),
    "mul": Support(follow=True),
    "concat": Support(follow=True),
    "avg_pool": Support(follow=True),
    "mean": Support(follow=True),
    "sigmoid": Support(follow=True),
    "hardsigmoid": Support(output=False, follow=True),
}

#: ONNX Runtime on x86 with VNNI.
X86 = Target(name="X86", operators=_ONNX_RUNTIME, tuned=True)

#: ONNX Runtime on x86 without VNNI: `vpmaddubsw` adds u8 * s8 + u8 * s8 in int16 and saturates; with 7-bit weights the largest
#: sum is 2 * 255 * 63 = 32130, which fits.
X86_NO_VNNI = replace(X86, name="X86_NO_VNNI", weights=replace(X86.weights, bits=7), saturates=True)

#: ONNX Runtime on ARM64. Its symmetric convolution kernels (onnxruntime#9772) want weights without a zero point and take
#: activations of either sign; its documentation finds uint8 with int8 no slower than uint8 with uint8, and faster on small cores;
#: it is QNNPACK's grid. The products are widened, so that nothing saturates. NNAPI and TFLite, to which a phone may hand the file
#: on, give average pooling one scale.
ARM = Target(name="ARM", operators={**_ONNX_RUNTIME, "avg_pool": Support(follow=True, shared=True)})

#: TensorRT's explicit quantization: int8 with zero point 0 throughout; Q/DQ before the operators that run in integers, none
#: between a convolution and what is fused into it (its activation, and the sum with a shortcut, whose other operand is rounded).
#: Its parser knows Q/DQ with int8 zero points of 0 only.
TENSORRT = Target(
    name="TENSORRT",
    activations=Scheme(signed=True, symmetric=True, narrow=False),
    operators={
        "conv": Support(output=False),
        "linear": Support(output=False),
        "add": Support(output=False, fuses=True),
        "avg_pool": Support(output=False),
        "mean": Support(output=False),
    },
    zero_points=False,
    opset=19,
)

#: OpenVINO on a CPU: the grid of X86. A sum runs inside the convolution before it, so that the convolution's result is not
#: rounded; what the sum gives is.
OPENVINO = Target(
    name="OPENVINO",
    operators={**_ONNX_RUNTIME, "conv": Support(output=False), "add": Support(output=False, fuses=True)}
    | {kind: Support(output=False) for kind in ("mul", "avg_pool", "mean")},
)

#: Names of the kernel libraries under which PyTorch knew the first and the third.
FBGEMM, QNNPACK = X86, ARM


def saturating_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """X (M, K) uint8 times weight (N, K) int8, as x86 without VNNI adds: products of neighbours in K are summed in int16, which
    saturates (`vpmaddubsw`), then in int32. Returns (M, N) int32; an odd K is filled up with a zero.

    >>> x, weight = torch.full((1, 2), 255, dtype=torch.uint8), torch.full((1, 2), 127, dtype=torch.int8)
    >>> saturating_matmul(x, weight).item(), 2 * 255 * 127
    (32767, 64770)
    """
    if x.dtype != torch.uint8 or weight.dtype != torch.int8 or x.shape[1:] != weight.shape[1:] or x.ndim != 2:
        raise DataError(
            f"saturating_matmul: wanted uint8 (M, K) and int8 (N, K), got {x.dtype} {tuple(x.shape)} and {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
    if x.shape[1] % 2:
        x, weight = torch.nn.functional.pad(x, (0, 1)), torch.nn.functional.pad(weight, (0, 1))
    total = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    wide, narrow = x.int(), weight.int()
    for k in range(0, x.shape[1], 2):  # a pair at a time, so that (M, N) is all that is held
        pair = wide[:, k : k + 1] * narrow[:, k] + wide[:, k + 1 : k + 2] * narrow[:, k + 1]
        total += pair.clamp(-(2**15), 2**15 - 1)
    return total
