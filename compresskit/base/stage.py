"""`Stage`: the base class of every step of a recipe, `(model, task) -> model`.

@dataclass(frozen=True, kw_only=True)
class Halve(Stage):
    \"\"\"Halve every weight.\"\"\"

    needs: ClassVar[frozenset[str]] = frozenset({"float"})

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        return model
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from compresskit.base.settings import refuse_unknown_settings
from compresskit.base.task import Task

#: Properties of a model that stages ask for: its weights are floating point ("float"); it carries no sparsity masks ("dense").
PROPERTIES = frozenset({"float", "dense"})


class Stage(ABC):
    """One step of a recipe. A subclass is a frozen, keyword-only dataclass: its fields are the settings, calling it runs it.

    A recipe reads the attributes below to check the order of its stages before anything runs, and to resume.

    Attributes:
        needs: properties (a subset of `PROPERTIES`) that the incoming model must have.
        keeps: properties that the incoming model still has afterwards, if it had them.
        restores: properties that the model has afterwards even if it did not before.
        hints: what to write in the place of settings that the stage does not have, for messages.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    keeps: ClassVar[frozenset[str]] = PROPERTIES
    restores: ClassVar[frozenset[str]] = frozenset()
    hints: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **settings: Any) -> Stage:
        refuse_unknown_settings(cls, args, settings, cls.hints)
        return super().__new__(cls)

    @property
    def starts_from_trained(self) -> bool:
        """Whether the incoming model must be trained already. False for a stage that trains the incoming model itself.

        A recipe that begins with a stage of the first kind also reports the incoming model, in the folder `0-start`.
        """
        return True

    @property
    def makes_student(self) -> bool:
        """Whether the stage returns a new network in place of the incoming one."""
        return False

    @property
    def rewinds_to(self) -> float | None:
        """Fraction of the preceding training, in [0, 1), whose weights the stage reads from `Task.snapshots`; None for none."""
        return None

    def calibration_samples(self, model: nn.Module) -> int:
        """How many samples of the calibration data the stage reads for sure; their batches are looked at before the first stage.

        Args:
            model: the recipe's incoming model.
        """
        return 0

    def skeleton(self, model: nn.Module) -> nn.Module:
        """The untrained network that the stage's result is loaded into when a finished stage is read back from disk.

        Args:
            model: the incoming model.
        """
        return model

    def rehearse(self, model: nn.Module, task: Task) -> None:  # noqa: B027  by default nothing
        """Raise an error where it is plain before the first stage runs that this one cannot.

        Args:
            model: the recipe's incoming model, on the task's device and in eval mode; it must not be changed.
            task: data, loss, metric and device.
        """

    @abstractmethod
    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        """Run the stage.

        Args:
            model: the model that the preceding stage returned; the stage may change it in place.
            task: data, loss, metric and device.

        Returns:
            The model for the next stage.
        """
