"""A user's script sees every type, and nothing public hides one behind Any."""

from __future__ import annotations

import inspect
import typing

import checkout
import pytest

import compresskit as ck

NAMESPACES = [ck, ck.distill, ck.export, ck.mixed, ck.prune, ck.quant]
#: Public functions that return Any, each with its reason.
ANY: dict[str, str] = {}


def functions():
    for module in NAMESPACES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("function", list(functions()))
def test_public_functions_are_annotated(function) -> None:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    assert set(parameters) <= set(hints), f"no annotation: {sorted(set(parameters) - set(hints))}"
    assert "return" in hints
    assert hints["return"] is not typing.Any or function.__name__ in ANY, f"{function.__name__} returns Any"


def test_the_package_says_that_it_is_typed() -> None:
    assert (checkout.ROOT / "compresskit" / "py.typed").is_file()


def test_a_users_script_passes_mypy_strict() -> None:
    """As a user runs it: against the installed package, of which mypy reads `py.typed`, with no settings of this project."""
    done = checkout.python(
        "-m", "mypy", "--strict", "--config-file=", "user.py", cwd=checkout.ROOT / "tests" / "typing", check=False
    )
    assert done.returncode == 0, done.stdout
