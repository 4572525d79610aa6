"""All errors that compresskit raises on purpose.

    CompressError                 catch this one to catch them all
    ├── SettingError              a setting is out of range, or two settings contradict each other (also a ValueError)
    ├── DataError                 a loader, a batch or a label does not fit the task
    ├── ModelError                a model cannot be captured, pruned or quantized as requested; says where and why
    ├── TrainingError             training cannot continue, such as after a loss that is not finite
    ├── StageOrderError           a stage would undo an earlier one; names the legal order
    ├── ExportError               an ONNX file could not be written, or its outputs differ from the model's
    └── CheckpointError           a file of a run is damaged, of another run, or written by a newer version

    Interrupted                   not an error: SIGINT or SIGTERM ended a run that can be resumed (a SystemExit)

Every message says what is wrong, where, what was wanted, what was given, and what to do.
"""

from __future__ import annotations

import re

LONGEST_MESSAGE = 400  # characters of an error of ONNX Runtime that are shown


class CompressError(Exception):
    """Base of every error raised on purpose."""


class SettingError(CompressError, ValueError):
    """A setting is out of range, or contradicts another."""


class DataError(CompressError):
    """A loader, a batch or a label does not fit the task."""


class ModelError(CompressError):
    """A model cannot be captured, pruned or quantized as requested."""


class TrainingError(CompressError):
    """Training cannot continue."""


class StageOrderError(CompressError):
    """A stage would undo an earlier one."""


class ExportError(CompressError):
    """An ONNX file could not be written, or its outputs differ from the model's."""


class CheckpointError(CompressError):
    """A file of a run is damaged, of another run, or written by a newer version."""


class Interrupted(SystemExit):
    """A signal ended a run after it was saved; if not caught, the process prints how to resume and exits with status 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python was raised for lack of memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def named_first_line(error: BaseException) -> str:
    """The class of an error and the first line of what it says, if anything."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def runtime_message(error: BaseException) -> str:
    """What an error of ONNX Runtime says, in one line without its code and its advice."""
    if newer := re.search(
        r"opset (\d+) is under development.* for domain ai\.onnx is till opset (\d+)", str(error), re.IGNORECASE | re.DOTALL
    ):
        import onnxruntime as ort  # heavy, and only measuring and exporting need it

        return (
            f"it has opset {newer[1]}, and the installed onnxruntime {ort.__version__} reads up to {newer[2]};"
            ' export_onnx(..., opset="lowest") writes what older ones read, or pip install --upgrade onnxruntime'
        )
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Please fix either the inputs/outputs or the model\.", "", str(error))
    line = " ".join(text.split())
    if len(line) > LONGEST_MESSAGE:  # both ends: what failed comes first, why comes last
        line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
    return line or type(error).__name__
