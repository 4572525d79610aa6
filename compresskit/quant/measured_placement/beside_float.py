"""Time a quantized model beside the float one that it was made from, for the threads and batch that a user names."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.task import Inputs, batch_size
from compresskit.export import export_onnx
from compresskit.measure import latency, session
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.targets import Deployment

MIN_GAIN = 0.98  # one file is faster than another only below this fraction of its latency, more than measurement noise


@dataclass(frozen=True)
class BesideFloat:
    """Milliseconds of a quantized model's file and of the float model's, timed in turn."""

    milliseconds: float
    float_milliseconds: float

    @property
    def faster(self) -> bool:
        """Whether the quantized model is faster by more than noise."""
        return self.milliseconds < MIN_GAIN * self.float_milliseconds


def beside_float(
    module: nn.Module, example: Inputs, settings: CalibratedSettings, *, seconds: float = 1.0
) -> Callable[[Quantized], BesideFloat] | None:
    """Return what times a quantized model of the module beside it; None where the settings measure nothing.

    The file of the float model is written at the first call, and kept in a temporary folder as long as the function is.
    """
    if settings.choose == "rules":
        return None
    return _Timer(module, example, settings, seconds)


class _Timer:
    def __init__(self, module: nn.Module, example: Inputs, settings: CalibratedSettings, seconds: float) -> None:
        self.module, self.example, self.deployment, self.seconds = module, example, settings.deployment, seconds
        self.dynamic = settings.dynamic
        self.folder = tempfile.TemporaryDirectory()

    def __call__(self, quantized: Quantized) -> BesideFloat:
        floating, rounded = (Path(self.folder.name) / name for name in ("float.onnx", "rounded.onnx"))
        if not floating.exists():
            export_onnx(self.module, floating, self.example, dynamic=self.dynamic)
        export_onnx(quantized, rounded, self.example)
        rows = rows_of_batch(self.example, self.deployment, floating, type(self.module).__name__)
        return BesideFloat(*latency([rounded, floating], rows, threads=self.deployment.threads, seconds=self.seconds))


def rows_of_batch(example: Inputs, deployment: Deployment, file: Path, name: str) -> Inputs:
    """Inputs of the batch that a deployment wants, repeated from the example where it has fewer.

    Args:
        example: a batch of inputs. file: the ONNX file that will be run. name: of the model, for the message.

    Raises SettingError where the file takes another batch.
    """
    batch, held = deployment.batch, batch_size(example)
    fixed = session(file).get_inputs()[0].shape[0]
    if isinstance(fixed, int) and fixed != batch:
        raise SettingError(
            f"Deployment(batch={batch}): {name} takes {fixed} samples at a time, since dynamic= leaves the batch fixed;"
            f" write batch={fixed}, or let the batch vary"
        )

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != held:
            return value
        return value.repeat(-(-batch // held), *[1] * (value.ndim - 1))[:batch]

    if isinstance(example, dict):
        return {name: repeated(value) for name, value in example.items()}
    return tuple(repeated(value) for value in example)
