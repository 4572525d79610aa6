"""The typed base of quantized models: what export, verification and checkpoints read of one.

`compresskit.quant` implements it. A model may also be quantized in part: then some of its submodules are of this type
(`quantized_parts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TypeGuard

from torch import nn

from compresskit.graph.capture import Dynamic


class QuantizedModule(nn.Module, ABC):
    """A model whose forward pass simulates the integer arithmetic of a runtime.

    dynamic: which dimensions of its inputs may vary, as it was captured.
    stores_few_bits: whether weights of up to 6 bits are stored packed, where the file's opset has a form for them.
    float_modules: dotted name of each module of the float model -> its class, where it is known.
    float_tensors: names of the parameters and buffers of the float model, those that are merged here included.
    tied: each further name of a tied parameter of the float model -> its first.
    exact: whether the exported file, as it is written, computes the same numbers; else roundings may fall to the other side.
    """

    dynamic: Dynamic
    exact: bool = False
    stores_few_bits: bool = False
    float_modules: Mapping[str, type[nn.Module]] = MappingProxyType({})
    float_tensors: Collection[str] = ()
    tied: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def float_names(self) -> dict[str, str]:
        """Name of each parameter and buffer here -> the name that the float model has it under."""

    @property
    @abstractmethod
    def target_name(self) -> str:
        """Name of the runtime that it was quantized for."""

    @property
    @abstractmethod
    def float_class(self) -> str:
        """Name of the class of the float model that it was made from."""

    @property
    @abstractmethod
    def opset(self) -> int:
        """Version of the ONNX operator set that its file is written in, where the user names none."""

    @property
    @abstractmethod
    def tuned(self) -> bool:
        """Whether its file is rewritten for the integer kernels of ONNX Runtime on x86."""

    @property
    @abstractmethod
    def in_onnxruntime(self) -> bool:
        """Whether ONNX Runtime runs its file with its own kernels, so that the file is rewritten for its fusions."""

    @property
    @abstractmethod
    def runtime(self) -> str:
        """Package of the runtime that executes its file: "onnxruntime", "openvino" or "tensorrt"."""

    @property
    def reads_int2(self) -> bool:
        """Whether that runtime reads constants of 2 bits. OpenVINO (2026.4) loads no file with one."""
        return self.runtime != "openvino"

    @abstractmethod
    def deployed(self) -> nn.Module:
        """A copy in ONNX's terms: integers stored, QuantizeLinear and DequantizeLinear instead of simulated rounding."""

    @abstractmethod
    def enable_(self, on: bool = True) -> None:
        """Switch all quantizers on, or let every value pass in float."""

    @abstractmethod
    def float_activations(self) -> AbstractContextManager[None]:
        """Inside the block activations pass in float, while weights are rounded."""

    @abstractmethod
    def check_rounds(self, where: str) -> None:
        """Raise ModelError, which begins with `where`, where a quantizer is switched off: its file rounds all the same."""

    @abstractmethod
    def keep_masked_(self) -> None:
        """Let no weight that a pruning mask keeps be rounded to zero, so that the stored zeros are those of the masks."""


def is_quantized(model: nn.Module) -> TypeGuard[QuantizedModule]:
    """Whether the model as a whole is quantized; `quantized_parts` finds quantized submodules."""
    return isinstance(model, QuantizedModule)


def float_names(model: nn.Module) -> dict[str, str]:
    """Dotted name of each parameter and buffer -> the user's name of it, which in quantized parts is that of the float model.

    A tied parameter has the first of its names, as in `named_parameters()`.
    """
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    names = {name: name for name in tensors}
    for path, part in quantized_parts(model).items():
        lead = f"{path}." if path else ""
        own = part.float_names()
        held = {there: tensors[f"{lead}{here}"] for here, there in own.items()}
        for here, there in own.items():
            first = part.tied.get(there, there)
            apart = first in held and held[first] is not held[there]  # two tensors here, with a name for each
            names[f"{lead}{here}"] = f"{lead}{there if apart else first}"
    return names


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a tied parameter of a model -> its first, as in `named_parameters()`."""
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: first for name, first in names.items() if name != first}


def quantized_parts(model: nn.Module) -> dict[str, QuantizedModule]:
    """Dotted name -> each quantized submodule, `""` for the model itself."""
    return {name: part for name, part in model.named_modules() if isinstance(part, QuantizedModule)}
