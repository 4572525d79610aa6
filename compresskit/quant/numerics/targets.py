"""Targets: runtimes as plain data. Which operators a runtime executes in integers, in which number formats, at which opset.

| target | activations | weights | specific to it |
|---|---|---|---|
| X86 (FBGEMM) | uint8 | int8 | ONNX Runtime on x86; no pair of weights overflows int16 without VNNI, see `numerics.saturation` |
| X86_NO_VNNI | uint8 | 7 bits | as X86; no pair overflows, whichever weights a kernel pairs |
| ARM (QNNPACK) | uint8 | int8 | average pooling keeps the scale of its input |
| TENSORRT | int8, zero point 0 | int8 | the inputs of operators are quantized, not their outputs |
| OPENVINO | uint8 | int8 | as X86, but a convolution's output reaches an addition unrounded, unless it is read elsewhere, too |

Weights are symmetric with one scale per output channel on every target.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.base.settings import check_field_types
from compresskit.export.onnx import OPSETS
from compresskit.quant.numerics.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a file will be run, for choices that are measured.

    threads: of the runtime. batch: samples at a time.
    """

    threads: int = 1
    batch: int = 1

    def __post_init__(self) -> None:
        check_field_types(self)
        for name, value in (("threads", self.threads), ("batch", self.batch)):
            if value < 1:
                raise SettingError(f"Deployment({name}=...): wanted a whole number >= 1, got {value}")

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.threads} thread{'s' if self.threads > 1 else ''}"


DEFAULT_DEPLOYMENT = Deployment()


@dataclass(frozen=True, kw_only=True)
class Support:
    """How a runtime supports one kind of operator in integers.

    output: the result must be quantized at once, or the runtime computes in float after all.
    follow: worthwhile only where all inputs are in integers anyway; alone, the conversions would cost more than it saves.
    shared: inputs and result must share one scale and zero point.
    fuses: the result of a convolution that only this operator reads arrives in float, inside the convolution's kernel; where
        both inputs are such, one of them does.
    whole: a result that is read at several places must be quantized at once, as with `output`.
    axis: the dimension of the weight that may have one scale per index; None where the whole weight must have one scale.
    slopes: largest number of products for each output of a convolution up to which a PReLU behind it, with a slope for each
        channel, is computed by the convolution: it has two filters for each output then, see `export.rewrite.slopes`, and its
        weights take twice the bytes; three where slopes are on both sides of 1. 0: never; nor for more than `MOST_BENT` weights.
        It needs `Target.tuned` and unsigned activations.
    volume: inputs times outputs (of a group) of a convolution over three dimensions below which it stays float. Its integers
        are gathered one by one, which takes nearly as long whatever the number of channels. 0: none does.
    """

    output: bool = True
    follow: bool = False
    shared: bool = False
    fuses: bool = False
    whole: bool = False
    axis: int | None = 0
    slopes: int = 0
    volume: int = 0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime on a type of machine. A new target is one value of this class, such as `replace(X86, name="mine", ...)`.

    Args:
        name: for messages, placements and files.
        activations, weights: number formats.
        operators: operator kind (see `numerics.operators.OPERATOR_KINDS`) -> how it is supported; other kinds stay float.
        zero_points: whether activations may have a zero point other than 0.
        saturates: whether machines that run or prove its files add products in pairs in int16, which full 8-bit weights can
            overflow. Weights are then made such that no pair can (see `numerics.saturation`): all machines compute the same.
        opset: version of the ONNX operator set of the exported file, 13 to 23; see `export_onnx`.
        onnxruntime: whether ONNX Runtime runs the file with its own kernels; the file is then written so that its fusions take no
            layer back to float.
        processors: where its files are run, as `platform.machine()` names them; choices that are measured by default are measured
            on these alone. Empty: unknown.
        tuned: whether the file is rewritten for the integer kernels of ONNX Runtime on x86, see `export.rewrite.onnxruntime`.
        runtime: Python package of the runtime; `verify_onnx` executes the file in "openvino", too, where it is installed, and no
            file for it has what it cannot read (int2), or computes otherwise (a rounding right behind a largest value).
        few_bits: whether the runtime reads constants of fewer than 8 bits and takes activations of other widths than 8.
        known_ranges: whether results of sigmoid, hard-sigmoid, softmax and tanh are rounded over the whole range that these can
            have, 0 to 1 or -1 to 1, whatever the data shows and the observer finds. No input then leaves the range; the range of
            the data is finer.

    Raises SettingError where the target, or ONNX, cannot express a number format; the message names the field.
    """

    name: str
    activations: Scheme = field(default_factory=Scheme)
    weights: Scheme = field(default_factory=lambda: Scheme(signed=True, symmetric=True, per_channel=True))
    operators: Mapping[str, Support]
    zero_points: bool = True
    saturates: bool = False
    opset: int = 20
    onnxruntime: bool = True
    processors: tuple[str, ...] = ()
    tuned: bool = False
    runtime: str = "onnxruntime"
    few_bits: bool = True
    known_ranges: bool = False

    def __post_init__(self) -> None:
        a, w = self.activations, self.weights
        if a.bits != 8 and not self.few_bits:
            self._refuse("activations", "bits", 8, a.bits, "the runtime knows no other width")
        if w.bits > 8:
            self._refuse("weights", "bits", "2..8", w.bits, "no integer kernel takes wider weights")
        if a.per_channel:
            self._refuse("activations", "per_channel", False, True, "an integer convolution takes one scale for its input")
        if a.symmetric and a.narrow:
            self._refuse("activations", "narrow", False, True, "QuantizeLinear saturates at -128, not at -127")
        if not a.symmetric and not self.zero_points:
            self._refuse("activations", "symmetric", True, False, "the runtime knows no zero point but 0")
        if self.opset not in OPSETS:
            raise SettingError(f"Target {self.name}: opset must be {OPSETS.start}..{OPSETS.stop - 1}, got {self.opset}")
        if not w.symmetric:
            self._refuse("weights", "symmetric", True, False, "integer kernels take weights with zero point 0")

    @property
    def runs_here(self) -> bool:
        """Whether ONNX Runtime on this processor takes the times that its files will take."""
        return self.onnxruntime and platform.machine() in self.processors

    def _refuse(self, which: str, name: str, wanted: object, got: object, why: str) -> None:
        raise SettingError(f"Target {self.name}: {which}.{name} must be {wanted}, got {got}: {why}")


#: Operators with integer kernels in ONNX Runtime that are worth using. Measured: uint8 activations keep residual adds in integers
#: (ResNet-20: 0.47 of the fp32 latency, against 1.20 with int8); Gemm can return its sum in float, which leaves the logits
#: unrounded; Add and pooling are worth it only between operators that are in integers already.
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
    "leaky_relu": Support(follow=True),
}

#: ONNX Runtime on x86. Without VNNI `vpmaddubsw` adds u8 * s8 + u8 * s8 in int16 and saturates; the weights are such that no pair
#: overflows, and the integers are the same with VNNI and without. Twice the filters cost no more than a PReLU in float up to some
#: 250 products for each output, and one rounding is saved; narrow convolutions of video take 1.4 to 10 times as long as in float
#: (benchmarks/quantize_kernels.md has both).
X86 = Target(
    name="X86",
    operators={**_ONNX_RUNTIME, "conv": Support(slopes=256, volume=256)},
    saturates=True,
    processors=("x86_64", "AMD64"),
    tuned=True,
)

#: As X86, with 7-bit weights: the largest sum of two products is 2 * 255 * 63 = 32130, whichever weights a kernel pairs. Only for
#: runtimes that pack weights in another order than ONNX Runtime does.
X86_NO_VNNI = replace(X86, name="X86_NO_VNNI", weights=replace(X86.weights, bits=7))

#: ONNX Runtime on ARM64. Its symmetric convolution kernels (onnxruntime#9772) need weights without a zero point and accept
#: activations of either sign; by its documentation uint8 with int8 is no slower than uint8 with uint8, and faster on small cores;
#: QNNPACK uses the same formats. Products are widened and nothing saturates there, but on an x86 where a file is proved it does.
#: NNAPI and TFLite, which a phone may delegate to, give input and output of average pooling one scale.
ARM = Target(
    name="ARM",
    operators={**_ONNX_RUNTIME, "avg_pool": Support(follow=True, shared=True)},
    saturates=True,
    processors=("aarch64", "arm64", "ARM64"),
)

#: TensorRT with explicit quantization: int8 with zero point 0 throughout; Q/DQ before the operators that run in integers, none
#: between a convolution and the operators fused into it (its activation, and the addition of a shortcut, whose other operand is
#: quantized). Its parser accepts Q/DQ only with int8 zero points of 0.
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
    onnxruntime=False,
    runtime="tensorrt",
    few_bits=False,
)

#: OpenVINO on a CPU, with the formats of X86. An addition runs inside the kernel of the convolution before it, so the result of
#: the convolution is not rounded, but the result of the addition is. The result of a convolution that is read
#: at several places is rounded at once: of one without bias, OpenVINO (2026.4) gives some of the
#: readers the sums without their scale.
OPENVINO = Target(
    name="OPENVINO",
    onnxruntime=False,
    runtime="openvino",
    operators={**_ONNX_RUNTIME, "conv": Support(output=False, whole=True), "add": Support(output=False, fuses=True)}
    | {kind: Support(output=False) for kind in ("mul", "avg_pool", "mean")},
    saturates=True,
)

#: Every target of the library.
TARGETS = (X86, X86_NO_VNNI, ARM, TENSORRT, OPENVINO)


#: Backends of PyTorch's quantization -> the target that replaces them.
_OF_PYTORCH = {"fbgemm": "X86", "x86": "X86", "onednn": "X86", "qnnpack": "ARM", "xnnpack": "ARM", "executorch": "ARM"}
#: Runtimes that are no target -> what they take.
_NO_TARGETS = {
    "coreml": "Core ML reads no ONNX file and has integer formats of its own; convert the float model with coremltools",
    "tflite": "TFLite reads no ONNX file and quantizes (dynamic, static, QAT) in its own converter; give that the float model",
}


def check_target(target: object, where: str) -> None:
    """Raise SettingError for anything but a `Target`; for a backend of PyTorch by name, the message names the target."""
    if isinstance(target, Target):
        return
    if isinstance(target, str) and (taken := _NO_TARGETS.get(target.lower().replace("_", ""))):
        raise SettingError(f"{where}(target=...): {target!r} is no target of this library: {taken}")
    known = _OF_PYTORCH.get(target.lower()) if isinstance(target, str) else None
    known = known or next((t.name for t in TARGETS if isinstance(target, str) and t.name == target.upper()), None)
    hint = (
        f"write target=quant.targets.{known}"
        if known
        else f"the targets are {', '.join(f'quant.targets.{t.name}' for t in TARGETS)}"
    )
    raise SettingError(f"{where}(target=...): wanted a quant.Target, got {target!r}; {hint}")


def saturating_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Simulate an integer matrix product on x86 without VNNI: X (M, K) uint8 times weight (N, K) int8.

    Products of neighbours in K are added in int16, which saturates (`vpmaddubsw`), and their sums in int32. An odd K is padded
    with a zero.

    Returns (M, N) int32. Raises DataError for other dtypes or shapes.

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
    for k in range(0, x.shape[1], 2):  # a pair at a time, to hold no more than (M, N) values
        pair = wide[:, k : k + 1] * narrow[:, k] + wide[:, k + 1 : k + 2] * narrow[:, k + 1]
        total += pair.clamp(-(2**15), 2**15 - 1)
    return total
