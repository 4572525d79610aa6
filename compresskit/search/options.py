"""Settings of `compress` besides model, task and budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python_dims, check_field_types
from compresskit.graph.capture import Dynamic
from compresskit.quant.numerics.targets import X86, Target, check_target
from compresskit.search.script.source import SourceWriter
from compresskit.train.train import Train


class SearchOptions(TypedDict, total=False):
    """Keyword arguments of `compress`; `SearchSettings` has their defaults."""

    train: Train | None
    trials: int
    finalists: int
    held_out_samples: int
    calibration_samples: int
    seconds: float
    target: Target
    dynamic: Dynamic
    seed: int


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of a search; `compress` explains them."""

    train: Train | None = None
    trials: int = 24
    finalists: int = 3
    held_out_samples: int = 1024
    calibration_samples: int = 1024
    seconds: float = 1.0
    target: Target = X86
    dynamic: Dynamic = (0,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("trials", "finalists", "held_out_samples", "calibration_samples"):
            value = vars(self)[name]
            if type(value) is not int or value < 1:
                raise SettingError(f"compress({name}=...): wanted a whole number >= 1, got {value!r}")
        if self.train is not None and type(self.train) is not Train:
            raise SettingError(f"compress(train=...): wanted a Train, got {self.train!r}")
        check_field_types(self, "compress")
        object.__setattr__(self, "dynamic", as_python_dims(self.dynamic))
        check_target(self.target, "compress")
        if self.seconds <= 0:
            raise SettingError(f"compress(seconds=...): wanted a positive number, got {self.seconds!r}")
        if self.train is not None:
            SourceWriter().source(self.train, "compress(train=...)")  # raises where no recipe can be written with it
