"""What files are made and run with: versions of the packages, and what the processor can do for int8."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from compresskit.base.version import __version__

#: Packages that compresskit needs: name for pip -> (module, oldest version), as in pyproject.toml, which has the reasons.
REQUIRED = {
    "jinja2": ("jinja2", "3.1"),
    "numpy": ("numpy", "2.0"),
    "onnx": ("onnx", "1.18"),
    "onnx-ir": ("onnx_ir", "0.1.16"),
    "onnxruntime": ("onnxruntime", "1.23"),
    "onnxscript": ("onnxscript", "0.6"),
    "safetensors": ("safetensors", "0.5"),
    "scipy": ("scipy", "1.13"),
    "torch": ("torch", "2.11"),
    "tqdm": ("tqdm", "4.66"),
}
#: Packages that something in the project uses where it is there: name for pip -> (module, what for, oldest version or "").
OPTIONAL = {
    "openvino": ("openvino", "timing and verifying files in OpenVINO", ""),
    "optuna": ("optuna", "compress", "5.0"),
    "scikit-learn": ("sklearn", "the recipes on digits", ""),
    "torchvision": ("torchvision", "the recipes on images", ""),
    "transformers": ("transformers", "models of Hugging Face", ""),
}
#: Other distributions that bring the same module.
ALTERNATIVES = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn")}
#: What decides how fast int8 is: name -> flags of Linux's /proc/cpuinfo, of which one is enough.
X86_FLAGS = {
    "avx2": ("avx2",),
    "avx512": ("avx512bw",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx_int8": ("amx_int8",),
}
ARM_FLAGS = {"neon": ("asimd", "neon"), "dot_product": ("asimddp",), "i8mm": ("i8mm",)}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package, and whether it is there.

    Attributes:
        name: for pip.
        version: that is installed; None where it is missing.
        wanted: the oldest version that works; "" for any.
        purpose: what an optional package is for; "" for one that is needed.
    """

    name: str
    version: str | None
    wanted: str = ""
    purpose: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is there and new enough, or optional."""
        return bool(self.purpose) or self.works

    @property
    def works(self) -> bool:
        """Whether it is there and new enough."""
        return self.version is not None and _numbers(self.version) >= _numbers(self.wanted)

    @property
    def advice(self) -> str:
        """What to install, and what for; empty where it works."""
        if self.works:
            return ""
        newest = f"'{self.name}>={self.wanted}'" if self.wanted else self.name
        old = f"wanted {self.wanted} or newer: " if self.wanted and (self.version or not self.purpose) else ""
        return (f"only for {self.purpose}: " if self.purpose else "") + f"{old}pip install {newest}"


def _numbers(version: str) -> list[int]:
    """The leading numbers of a version: 2.11.0+cpu -> [2, 11, 0]."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return numbers


def packages() -> list[Package]:
    """The packages that compresskit needs, then the optional ones."""
    needed = [Package(name=n, version=_installed(n, module), wanted=oldest) for n, (module, oldest) in REQUIRED.items()]
    return needed + [
        Package(name=n, version=_installed(n, module), wanted=oldest, purpose=what)
        for n, (module, what, oldest) in OPTIONAL.items()
    ]


def _installed(name: str, module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in (name, *ALTERNATIVES.get(name, ())):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def processor_features(cpuinfo: str, machine: str, system: str) -> dict[str, bool | None]:
    """What a processor can do that decides how fast int8 is; None where this system does not say.

    Args:
        cpuinfo: text of Linux's /proc/cpuinfo; empty elsewhere.
        machine, system: as `platform` names them, such as "x86_64" and "Linux".
    """
    names = ARM_FLAGS if machine.lower() in ("aarch64", "arm64", "armv8l") else X86_FLAGS
    if names is ARM_FLAGS and system == "Darwin":  # every Mac with such a processor has the two; not all have the third
        return {"neon": True, "dot_product": True, "i8mm": None}
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    flags = {flag for key, _, value in lines if key.strip() in ("flags", "Features") for flag in value.split()}
    return {name: bool(flags & set(wanted)) if flags else None for name, wanted in names.items()}


def int8_kernels(features: Mapping[str, bool | None]) -> str:
    """A sentence on how fast int8 can be on a processor with these features."""
    if features.get("amx_int8"):
        return "AMX: whole tiles of int8 products; int8 is much faster than float"
    if features.get("vnni"):
        return "VNNI: four products in one instruction; int8 is faster than float"
    if features.get("i8mm") or features.get("dot_product"):
        return "NEON dot products: four products in one instruction; int8 is faster than float"
    if all(value is None for value in features.values()):
        return "this system does not say what its processor can do; measure with compresskit bench"
    if features.get("avx2"):
        return "no VNNI: two products in one instruction, added in int16; int8 gains little, files for X86 stay exact"
    return "no integer products in vectors: int8 makes files smaller, hardly faster"


def environment() -> dict[str, Any]:
    """The versions and the machine, JSON-ready: what a report says of where it was made."""
    cpuinfo = ""
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    features = processor_features(cpuinfo, platform.machine(), platform.system())
    return {
        "compresskit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "features": features,
        "int8": int8_kernels(features),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": {package.name: package.version for package in packages() if package.version is not None},
    }
