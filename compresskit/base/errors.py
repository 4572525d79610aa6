"""Every error that compresskit raises on purpose.

    CompressError                 catch this one to catch them all
    ├── SettingError              a setting is out of its range, or two settings contradict (also a ValueError)
    ├── DataError                 a loader, a batch or a label is not what the task says it is
    ├── ModelError                a model cannot be captured, pruned or quantized as asked; says where and why
    ├── TrainingError             training cannot go on: the loss is not finite
    ├── StageOrderError           stages in an order that would undo one another; names the legal order
    ├── ExportError               an ONNX file could not be written, or it does not agree with its model
    └── CheckpointError           a file of a run is damaged, foreign or newer than this library

    Interrupted                   no error: SIGINT or SIGTERM ended a run that can go on later (a SystemExit)

A message says what, where, wanted, got, and what to do.
"""


class CompressError(Exception):
    """Base of every error raised on purpose."""


class SettingError(CompressError, ValueError):
    """A setting is out of its range, or contradicts another."""


class DataError(CompressError):
    """A loader, a batch or a label is not what the task says."""


class ModelError(CompressError):
    """A model cannot be captured, pruned or quantized as asked."""


class TrainingError(CompressError):
    """Training cannot go on."""


class StageOrderError(CompressError):
    """Stages stand in an order that would undo one another."""


class ExportError(CompressError):
    """An ONNX file could not be written, or does not agree with its model."""


class CheckpointError(CompressError):
    """A file of a run is damaged, foreign or newer than this library."""


class Interrupted(SystemExit):
    """A signal ended a run after it was saved; where nobody catches it, the process says how to go on and exits with 1."""


def memory_ran_out(error: BaseException) -> bool:
    """Whether an error of torch or Python says that there was no memory left."""
    said = str(error)
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said
