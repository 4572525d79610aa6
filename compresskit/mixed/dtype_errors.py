"""Errors of torch about half values in a model's own code, beside fp32 ones or where no kernel takes them, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from compresskit.base.errors import CompressError, TrainingError, first_line
from compresskit.mixed.formats.policy import Policy

#: What torch says of dtypes; one of its kernels for LSTM layers says no more than that there is none.
_OF_DTYPES = re.compile(r"BFloat16|Half|float16|dtype|scalar type|could not create a primitive descriptor")
#: Integers among them are refused in fp32, too.
_OF_INTEGERS = re.compile(r"\b(Long|Int|Short|Byte|Char|Bool|long|int|short|char|bool|u?int\d+)\b")
#: An operator has no form for halves, whatever the other operands are.
_OF_NO_KERNEL = re.compile(r"not implemented|[Uu]nsupported|n[o']t support|only supported|Expected both inputs|must be either")
_NOT_OF_THE_USER = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))


@contextmanager
def naming_dtype_errors(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Turn an error of the model's forward pass that is one of dtypes into a TrainingError, under a policy with half values.

    It says which module of the model cannot compute, in which line of the user's code, and what to write. Any other error passes.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        half = policy.param_dtype or policy.autocast_dtype
        text = first_line(error)
        if isinstance(error, CompressError) or half is None or not _OF_DTYPES.search(text) or _OF_INTEGERS.search(text):
            raise
        raise TrainingError(_advice_on_dtypes(error, text, model, policy, str(half).removeprefix("torch."))) from error


def _advice_on_dtypes(error: Exception, text: str, model: nn.Module, policy: Policy, half: str) -> str:
    name, line = _where_it_ran(error.__traceback__, {module: name for name, module in model.named_modules()})
    amp = "AMP_BF16" if half == "bfloat16" else "AMP_FP16"
    if _OF_NO_KERNEL.search(text):
        back = "" if policy.param_dtype is None else ", and .to(dtype of the weights) behind it"
        why = f"that operator takes no {half}; write .float() before it{back}, or take FP32"
    elif policy.param_dtype is None:
        why = f"autocast gives some values in {half}, beside others in fp32; write .to(dtype of the other) there, or take FP32"
    else:
        kept = f", keep {name!r} in fp32 by keep_fp32= of the policy," if name else ","
        why = (
            "what the code makes in fp32, such as by .float() or torch.zeros(...), is not cast; write .to(dtype of the weights)"
            f" behind it{kept} or take {amp}"
        )
    return f"{type(model).__name__}{line}: {policy.name} does not suit {repr(name) if name else 'its forward'} ({text}): {why}"


def _where_it_ran(traceback: TracebackType | None, names: dict[nn.Module, str]) -> tuple[str, str]:
    """The innermost module of the model that ran, by name, and the innermost line of the user's code, such as " (net.py:4)"."""
    name = line = ""
    while traceback is not None:
        frame = traceback.tb_frame
        module, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(module, nn.Module):
            name = names.get(module, name)
        if not file.startswith(("<", *_NOT_OF_THE_USER)):
            line = f" ({Path(file).name}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return name, line
