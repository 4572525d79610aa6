"""Where a quantized model will run, as plain data: which operators run in integers there, and in which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compresskit.quant.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Integer:
    """How a runtime executes one kind of operator in integers.

    output: its result must be quantized too, at once, or the runtime computes in float after all.
    follow: only worth it where all its inputs are in integers anyway; by itself it would cost more than it saves.
    """

    output: bool = True
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime on a kind of machine; a user adds one by writing one value.

    operators: kind of operator (see `placement.KINDS`) -> how it runs in integers; kinds not named stay float.
    opset: of the exported file.
    tuned: whether the file is rewritten for the integer kernels of ONNX Runtime, see `export.kernels`.
    """

    name: str
    activations: Scheme = field(default_factory=Scheme)
    weights: Scheme = field(default_factory=lambda: Scheme(signed=True, symmetric=True, per_channel=True))
    operators: Mapping[str, Integer]
    opset: int = 20
    tuned: bool = False


#: ONNX Runtime on x86 with VNNI. Measured: uint8 activations let it drop the Relu behind a Conv and keep residual adds in
#: integers (ResNet-20: 0.47 of the fp32 latency, against 1.20 with int8); Gemm may hand its sum on in float, which
#: saves the rounding of the logits; Add and pooling pay only between operators that are in integers already.
X86 = Target(
    name="X86",
    operators={
        "conv": Integer(),
        "linear": Integer(output=False),
        "add": Integer(follow=True),
        "mul": Integer(follow=True),
        "concat": Integer(follow=True),
        "avg_pool": Integer(follow=True),
        "mean": Integer(follow=True),
        "sigmoid": Integer(follow=True),
        "hardsigmoid": Integer(output=False, follow=True),
    },
    tuned=True,
)
