"""A recipe as Python that can be saved and run by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from compresskit import distill, mixed, prune, quant
from compresskit.base.budget import Budget
from compresskit.base.errors import SettingError
from compresskit.base.fingerprint.functions import OF_FILE, described_module
from compresskit.distill import Distill
from compresskit.prune import Prune
from compresskit.quant import QAT, DynamicQuant, StaticQuant
from compresskit.recipe.recipe import Recipe
from compresskit.train import lr
from compresskit.train.train import Train

#: What `import compresskit as ck` has of a recipe's parts, and the namespaces in which the rest is looked for.
AT_THE_TOP = (Train, Distill, Prune, QAT, DynamicQuant, StaticQuant)
NAMESPACES = {
    "quant": quant,
    "quant.targets": quant.targets,
    "quant.weight_only": quant.weight_only,
    "mixed": mixed,
    "prune": prune,
    "prune.depth": prune.depth,
    "prune.low_rank": prune.low_rank,
    "prune.criteria": prune.criteria,
    "distill": distill,
    "lr": lr,
}

SCRIPT_TEXT = '''"""{title}

    python {name} FILE.py      # which defines {defines}
"""

import sys
from pathlib import Path

import compresskit as ck
from compresskit.search.script.user_file import defined_by

given = {{}}
if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    given = defined_by(sys.argv[1], "{name}")
{imports}
recipe = {recipe}

if __name__ == "__main__":
    print(recipe.run(given["model"], given["task"], out=Path(__file__).parent / "{out}"))
'''
#: Names that the script has itself -> their modules, where they have one: another thing of that name would take their place.
OF_SCRIPT = {"Path": "pathlib", "len": "builtins", "print": "builtins"}
OF_SCRIPT |= dict.fromkeys(("ck", "defined_by", "given", "recipe", "sys"), "the written recipe")


def as_script(recipe: Recipe, *, title: str, name: str, out: str) -> str:
    """The text of a script that runs a recipe on the model and the task of a file. out: name of the run's folder, beside it."""
    writer = SourceWriter()
    stages = [f"    {writer.source(stage, f'stage {i}')},\n" for i, stage in enumerate(recipe.stages, 1)]
    dynamic = "" if recipe.dynamic == (0,) else f"    dynamic={writer.source(recipe.dynamic, 'dynamic')},\n"
    text = f"ck.Recipe(\n{''.join(stages)}    seed={recipe.seed},\n    export={recipe.export!r},\n{dynamic})"
    text += " if given else None" if writer.defined else ""  # a worker of a loader may import the script
    defined = ["`model`, trained", "`task`", *(f"`{each}`" for each in writer.defined)]
    defines = f"{', '.join(defined[:-1])}{',' if writer.defined else ''} and {defined[-1]}"
    return SCRIPT_TEXT.format(title=title, name=name, defines=defines, imports=writer.imports(), recipe=text, out=out)


class SourceWriter:
    """Writes settings as Python, and collects what must be imported for them."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}  # name -> module

    @property
    def defined(self) -> list[str]:
        """Names of the file that defines model and task, which no module has."""
        return sorted(name for name, module in self.modules.items() if module == OF_FILE)

    def imports(self) -> str:
        """The lines that import what was written so far, or take it from the file that defines model and task."""
        names = sorted(self.modules.items(), key=lambda entry: (entry[1], entry[0]))
        lines = [f"from {module} import {name}" for name, module in names if module != OF_FILE]
        lines += [f'{name} = given.get("{name}")' for name in self.defined]
        return "".join(f"{line}\n" for line in ["", *lines]) if lines else ""

    def source(self, value: Any, where: str) -> str:
        """An expression that makes an equal value. Raises SettingError, which begins with `where`, where there is none."""
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, Enum):  # classes of a library's or the user's own, such as that of torch.__version__
            kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
            if kind is not None and type(value) is not kind and kind(value) == value:
                value = kind(value)
        if value is None or type(value) in (bool, int, float, str):
            if isinstance(value, float) and not math.isfinite(value):  # inf, -inf, nan
                self._take(repr(value).lstrip("-"), "math", where)
            return repr(value)
        if isinstance(value, Enum) and value.name is not None and value.name.isidentifier():
            return f"{self._named(type(value), where)}.{value.name}"
        if isinstance(value, Budget):
            return f"ck.{value!r}"
        if isinstance(value, partial):
            self._take("partial", "functools", where)
            given = [self.source(entry, where) for entry in value.args]
            given += [f"{key}={self.source(entry, where)}" for key, entry in value.keywords.items()]
            return f"partial({', '.join([self._named(value.func, where), *given])})"
        if isinstance(value, tuple | list):
            entries = ", ".join(self.source(entry, where) for entry in value)
            if isinstance(value, list):
                return f"[{entries}]"
            return f"({entries},)" if len(value) == 1 else f"({entries})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.source(key, where)}: {self.source(entry, where)}' for key, entry in value.items())}}}"
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            return self._named(value, where)
        if (public := public_name(value)) is not None:
            return public
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, where)
        raise SettingError(
            f"{where}: {type(value).__name__} cannot be written as Python; use a setting that is a dataclass or a number"
        )

    def _dataclass(self, value: Any, where: str) -> str:
        given = []
        for field in fields(value):
            entry = vars(value).get(field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if field.init and not _is_default(entry, default):
                given.append(f"{field.name}={self.source(entry, f'{where}, {field.name}')}")
        return f"{self._named(type(value), where)}({', '.join(given)})"

    def _named(self, thing: Any, where: str) -> str:
        """The name by which a function or class is imported."""
        if (public := public_name(thing)) is not None:
            return public
        module, name = described_module(thing.__module__), thing.__qualname__
        importable = module == OF_FILE or (module != "__main__" and all(part.isidentifier() for part in module.split(".")))
        if not name.isidentifier() or not importable:
            raise SettingError(
                f"{where}: {name} of {module} cannot be imported, so that no recipe can be written with it; put it into a module,"
                " or use functools.partial of a function of one"
            )
        self._take(name, module, where)
        return str(name)

    def _take(self, name: str, module: str, where: str) -> None:
        """Import a name. Raises SettingError where it is already that of something else."""
        other = OF_SCRIPT.get(name, self.modules.get(name, module))
        if other != module:
            raise SettingError(f"{where}: {name} of {module} and of {other} are both used; rename one of them")
        self.modules[name] = module


def public_name(thing: Any) -> str | None:
    """The name of a part of the library under `import compresskit as ck`; None for anything else."""
    if any(thing is known for known in AT_THE_TOP):
        return f"ck.{thing.__name__}"
    for path, namespace in NAMESPACES.items():
        for name, known in vars(namespace).items():
            if known is thing and not name.startswith("_"):
                return f"ck.{path}.{name}"
    return None


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, partial) and isinstance(default, partial):
        return value.func is default.func and value.args == default.args and value.keywords == default.keywords
    return value is default or (type(value) is type(default) and value == default)
