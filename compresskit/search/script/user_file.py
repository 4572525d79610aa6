"""A user's file that defines a model and a task: it is run as a module that every process can import.

The name of the module begins with that of this one, and ends with the path of the file. A process that unpickles one of its
classes or functions, such as a worker of a `DataLoader` that was started by spawn, imports this module first, which adds the
finder that reads the path from the name. So the file may be called as it likes, `torch.py` or `my-model`, and is never taken for
another module, nor another for it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from compresskit.base.errors import DataError, Interrupted, SettingError
from compresskit.base.fingerprint.functions import USER_FILES
from compresskit.base.task import Task

WANTED_FILE = "wanted a Python file that defines model and task"
#: Without it, Python would not look for modules beneath this one.
__path__: list[str] = []


def defined_by(path: str, where: str) -> dict[str, Any]:
    """Run a user's Python file, and return the names that it defines, a `model` and a `task` among them.

    It is run as `python FILE.py` does it, without arguments and with its folder first in `sys.path`, but as a module: what is
    under `if __name__ == "__main__":` is left out.

    Args:
        path: of the file.
        where: what wants it, for messages.

    Raises:
        DataError: there is no such file, or it is none of Python.
        SettingError: it cannot be run to its end, or defines no model and task.
        Interrupted: a signal ended what it did.
    """
    _check_is_python(path)
    module = ModuleType(module_name(path))
    sys.path.insert(0, str(Path(path).resolve().parent))  # as if it were run
    sys.modules[module.__name__] = module
    try:
        _Loader(path).exec_module(module)
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, Interrupted) or not isinstance(error, Exception | SystemExit):
            raise
        said = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
        place = _line_of(path, error)
        if isinstance(error, SystemExit):
            raise SettingError(
                f"{where}: {place}: it ends the process ({said}), and is run without arguments; give its options defaults, and"
                " let it run to its end"
            ) from error
        raise SettingError(f"{where}: {place}: {said}; python {path} shows the whole traceback") from error
    defined = dict(vars(module))
    if missing := [name for name in ("model", "task") if name not in defined]:
        raise SettingError(f"{where}: {path} defines no {' and no '.join(missing)}; write model = ... and task = ck.Task(...)")
    for name, kind in (("model", nn.Module), ("task", Task)):
        if not isinstance(value := defined[name], kind):
            wanted = f"a {'torch.nn' if kind is nn.Module else 'compresskit'}.{kind.__name__}"
            raise SettingError(f"{where}: {path}: {name}: wanted {wanted}, got {type(value).__name__}; write {name} = one")
    return defined


def _check_is_python(path: str) -> None:
    if Path(path).is_dir():
        raise DataError(f"{path}: a folder; {WANTED_FILE}")
    if not Path(path).is_file():
        raise DataError(f"no such file: {path}")
    try:
        with open(path, "rb") as file:
            binary = Path(path).suffix == ".onnx" or b"\0" in file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {WANTED_FILE}") from None
    if binary:
        raise DataError(f"{path}: not a Python file; {WANTED_FILE}")


def _line_of(path: str, error: BaseException) -> str:
    """The line of a file in which an error came up, and that of another file where it was raised."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or path, error.lineno))
    places = [(file, line) for file, line in places if not file.startswith("<") and file != __file__]
    own, last = [line for file, line in places if file == path], places[-1] if places else (path, 0)
    inside = "" if last[0] == path else f" ({last[0]}, line {last[1]})"
    return f"{path}, line {own[-1]}{inside}" if own else f"{path}{inside}"


def module_name(path: str) -> str:
    """The name of the module as which a file is run: an identifier, that of no other file, from which its path can be read."""
    readable = re.sub(r"\W", "_", Path(path).stem, flags=re.ASCII)
    return f"{USER_FILES}.{readable}_{os.fsencode(os.path.abspath(path)).hex()}"


class _Loader(InspectLoader):
    """Runs a user's file.

    Attributes:
        path: of the file.
        again: whether another process ran it before. What it prints is an error output then: the standard one may be JSON that a
            program reads.
    """

    def __init__(self, path: str, *, again: bool = False) -> None:
        self.path, self.again = path, again

    def get_source(self, fullname: str) -> str:
        """The text of the file."""
        return decode_source(Path(self.path).read_bytes())

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file. It is compiled each time, so that there is no cache that an edit could leave behind."""
        return self.source_to_code(Path(self.path).read_bytes(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Run it in a module, which has the attributes of a script."""
        vars(module).update(__file__=self.path, __package__="", __spec__=None, __loader__=None)
        given, sys.argv = sys.argv, [self.path]
        try:
            with redirect_stdout(sys.stderr) if self.again else nullcontext():
                super().exec_module(module)
        finally:
            sys.argv = given


class _FileFinder(MetaPathFinder):
    """Finds users' files by the names of their modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What loads the file; None for all other modules."""
        package, _, name = fullname.rpartition(".")
        if package != USER_FILES:
            return None
        file = os.fsdecode(bytes.fromhex(name.rpartition("_")[2]))
        return spec_from_loader(fullname, _Loader(file, again=True))


sys.meta_path.append(_FileFinder())
