"""compresskit: train, distil, prune and quantize small PyTorch models, and hand over ONNX files that are proved to run.

task = Task(train=train_loader, val=val_loader)
recipe = Recipe(Train(epochs=12), Prune(budget=keep(macs=0.5), finetune=Train(epochs=6, objective=imitate())), QAT(epochs=2))
print(recipe.run(model, task, out="runs/first"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compresskit import distill, export, metrics, mixed, prune, quant
from compresskit.base.budget import Budget, keep, remove
from compresskit.base.errors import (
    CheckpointError,
    CompressError,
    DataError,
    ExportError,
    ModelError,
    SettingError,
    StageOrderError,
    TrainingError,
)
from compresskit.base.errors import Interrupted as Interrupted  # not in `__all__`: it ends a run, and few catch it
from compresskit.base.objective import Objective
from compresskit.base.progress import Every
from compresskit.base.stage import Stage
from compresskit.base.task import Task, accuracy
from compresskit.base.version import __version__ as __version__
from compresskit.distill import Distill, imitate
from compresskit.export import audit, export_onnx, verify_onnx
from compresskit.measure import count_macs, count_parameters, evaluate
from compresskit.prune import Densify, LotteryTicket, Prune, Sparsify
from compresskit.quant import QAT, DynamicQuant, StaticQuant, WeightQuant
from compresskit.recipe import Recipe, Result, load, save
from compresskit.train import lr
from compresskit.train.train import Train, fit_

if TYPE_CHECKING:
    from compresskit.search.ceilings import at_most
    from compresskit.search.compress import compress

__all__ = [
    "QAT",
    "Budget",
    "CheckpointError",
    "CompressError",
    "DataError",
    "Densify",
    "Distill",
    "DynamicQuant",
    "Every",
    "ExportError",
    "LotteryTicket",
    "ModelError",
    "Objective",
    "Prune",
    "Recipe",
    "Result",
    "SettingError",
    "Sparsify",
    "Stage",
    "StageOrderError",
    "StaticQuant",
    "Task",
    "Train",
    "TrainingError",
    "WeightQuant",
    "accuracy",
    "at_most",
    "audit",
    "compress",
    "count_macs",
    "count_parameters",
    "distill",
    "evaluate",
    "export",
    "export_onnx",
    "fit_",
    "imitate",
    "keep",
    "load",
    "lr",
    "metrics",
    "mixed",
    "prune",
    "quant",
    "remove",
    "save",
    "verify_onnx",
]


def __getattr__(name: str) -> Any:
    """`search`, and what is from it, are imported when they are first asked for: few runs need them."""
    if name not in ("at_most", "compress", "search"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    search = globals().setdefault("search", import_module("compresskit.search"))
    return search if name == "search" else globals().setdefault(name, getattr(search, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "search"})
