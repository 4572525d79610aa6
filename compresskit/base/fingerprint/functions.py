"""What the result of a function or of a class depends on: its code, and the values that the code reads."""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: Files that the command line, or a written recipe, runs are modules beneath this one; descriptions call each of them `OF_FILE`,
#: wherever it is and whatever its name.
USER_FILES, OF_FILE = "compresskit.search.script.user_file", "<run_path>"
_INSTALLED = ("site-packages", "dist-packages")
_OF_NO_EFFECT = frozenset(
    "__dict__ __weakref__ __module__ __qualname__ __doc__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__"
    " __firstlineno__ __static_attributes__ __dataclass_fields__ __dataclass_params__ __abstractmethods__ _abc_impl"
    " __match_args__ __parameters__ __orig_bases__ __slots__ __type_params__ __hash__".split()
)


def described_module(name: str) -> str:
    """The name of a module in descriptions."""
    return OF_FILE if name.startswith(f"{USER_FILES}.") else name


def of_library(module: str, file: str = "") -> bool:
    """Whether a module is installed, and so told by its name: torch, compresskit, Python's own, and what pip installed."""
    module = described_module(module)
    root = module.partition(".")[0]
    if root in ("torch", "compresskit", "builtins") or root in sys.stdlib_module_names:
        return True
    loaded = sys.modules.get(module)
    file = file or str(vars(loaded).get("__file__", "") if loaded is not None else "")
    return any(folder in file for folder in _INSTALLED)


def of_compresskit(cls: type) -> bool:
    """Whether a class is one of this package, and none of a user's file, whose module has a name beneath the package's."""
    return described_module(cls.__module__).partition(".")[0] == "compresskit"


def function_of_library(function: FunctionType) -> bool:
    """Whether the code of a function is a library's, also where `functools.wraps` gave it the name of a user's function."""
    return of_library(str(function.__globals__.get("__name__")), function.__code__.co_filename)


def code_record(code: CodeType) -> list[Any]:
    """What the code does, without addresses, line numbers or comments."""
    constants = [code_record(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    arguments = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames]
    names = [code.co_names, code.co_freevars, code.co_cellvars]
    return [code.co_code.hex(), code.co_exceptiontable.hex(), names, arguments, constants]


def _constant(value: Any) -> Any:
    if isinstance(value, frozenset):  # its order changes from process to process
        return sorted(map(repr, value))
    return [_constant(entry) for entry in value] if isinstance(value, tuple) else repr(value)


def enclosed_values(function: FunctionType) -> dict[str, Any]:
    """The values that a function closes over, by name."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return values


def globals_read(function: FunctionType) -> dict[str, Any]:
    """The global values that a function's code reads, by name; of a user's own modules the attributes that the code names.

    Modules that the function imports when it runs are imported here: what they hold counts before the first call, too.
    """
    package = str(function.__globals__.get("__package__") or "")
    values: dict[str, Any] = {}
    for kind, name, level, entries in sorted(set(_loads(function.__code__))):
        if kind == "IMPORT_NAME":
            values |= without_modules(_imported(name, level, entries, package), function.__code__)
        elif name in function.__globals__:
            value = function.__globals__[name]
            value = described_module(value) if name == "__name__" else value
            values |= without_modules({name: value}, function.__code__)
    return dict(sorted(values.items()))


def without_modules(values: dict[str, Any], code: CodeType) -> dict[str, Any]:
    """Values by name, with those attributes in the place of a user's modules that some code names: `pkg.losses.focal`."""
    names = sorted(set(_all_names(code)))
    found: dict[str, Any] = {}
    seen: set[str] = set()
    waiting = list(values.items())
    while waiting:
        name, value = waiting.pop()
        if not isinstance(value, ModuleType) or of_library(value.__name__):
            found[name] = value
        elif value.__name__ not in seen:  # a package and its modules have one another as attributes
            seen.add(value.__name__)
            attributes = vars(value)
            waiting += [(f"{name}.{entry}", attributes[entry]) for entry in names if entry in attributes]
    return found


def _imported(name: str, level: int, entries: tuple[str, ...], package: str) -> dict[str, ModuleType]:
    """The modules that an import statement gives, by full name; none that are a library's or cannot be imported.

    level: the dots before the name. entries: what a `from ... import` takes, which may be modules of a package.
    """
    try:
        full = importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:
        return {}
    found = {each: _module_of_user(each) for each in (full, full if entries else full.partition(".")[0])}
    module = found[full]
    for entry in entries if module is not None and "__path__" in vars(module) else ():
        if entry not in vars(module):
            found[f"{full}.{entry}"] = _module_of_user(f"{full}.{entry}")
    return {each: module for each, module in found.items() if module is not None}


def _module_of_user(name: str) -> ModuleType | None:
    """A module by its full name, imported where it is not yet; None for a library's and for what cannot be imported."""
    root = name.partition(".")[0]
    try:
        if of_library(name) or (spec := importlib.util.find_spec(root)) is None or of_library(root, str(spec.origin)):
            return None
        return importlib.import_module(name)
    except (Exception, SystemExit):  # as the function's own import would raise, where it runs
        return None


def _loads(code: CodeType) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """What code loads of global names and by imports: the kind, the name and, of an import, its level and its entries."""
    before: list[Any] = [None, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "LOAD_GLOBAL", instruction.argval, 0, ()
        elif instruction.opname == "IMPORT_NAME":  # the level and the entries are the two constants before
            level, entries = before
            level, entries = level if isinstance(level, int) else 0, entries if isinstance(entries, tuple) else ()
            yield instruction.opname, instruction.argval, level, entries
        if instruction.opname != "EXTENDED_ARG":
            before = [before[1], instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads(constant)


def _all_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_names(constant)


def class_members(cls: type) -> dict[str, Any]:
    """The methods and attributes that the classes of a user define, for a class, its bases and its metaclass, by name."""
    members = {}
    metaclass: type = type(cls)
    for base in (*cls.__mro__, *metaclass.__mro__):
        if not of_library(base.__module__):
            for name, value in vars(base).items():
                if name not in _OF_NO_EFFECT:
                    members[f"{base.__qualname__}.{name}"] = value
    return members


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, by name, but for cached properties; None for an object that Python code did not define."""
    layers = [base for base in type(value).__mro__ if base is not object]
    if not all(base.__flags__ & (1 << 9) for base in layers):  # a type that a class statement, not C, made
        return None
    if not layers or not (hasattr(value, "__dict__") or any(map(_slots, layers))):
        return None
    return attributes_beside_values(value)


def attributes_beside_values(value: Any) -> dict[str, Any]:
    """The attributes of an object of any type, by name, but for cached properties: of a list not its entries."""
    layers = type(value).__mro__
    cached = {name for base in layers for name, entry in vars(base).items() if isinstance(entry, functools.cached_property)}
    found = {name: getattr(value, name) for base in layers for name in _slots(base) if hasattr(value, name)}
    found |= vars(value) if hasattr(value, "__dict__") else {}
    return {str(name): entry for name, entry in found.items() if name not in cached}


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    own = f"_{cls.__name__.lstrip('_')}"
    public = [name for name in names if name not in ("__dict__", "__weakref__")]
    return [f"{own}{name}" if name.startswith("__") and not name.endswith("__") else name for name in public]
