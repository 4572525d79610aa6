"""A user's script sees every type, and nothing public hides one behind Any."""

from __future__ import annotations

import inspect

import checkout
import pytest

import compresskit as ck

NAMESPACES = [ck, ck.distill, ck.export, ck.mixed, ck.prune, ck.quant]
#: Public functions whose annotations are taken off when they are imported, each with its reason; a type checker still sees them.
UNANNOTATED = {"fp32_allreduce_hook": "DDP compares a hook's annotations with types, and refuses text"}


def functions():
    for module in NAMESPACES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("function", list(functions()))
def test_public_functions_are_annotated(function) -> None:
    if function.__name__ in UNANNOTATED:
        return
    signature = inspect.signature(function)
    missing = [name for name, p in signature.parameters.items() if p.annotation is inspect.Parameter.empty]
    assert not missing, f"{function.__name__}: no annotation of {missing}"
    assert signature.return_annotation not in (inspect.Signature.empty, "Any"), f"{function.__name__} returns Any"


def test_the_package_says_that_it_is_typed() -> None:
    assert (checkout.ROOT / "compresskit" / "py.typed").is_file()


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict() -> None:
    """As a user runs it: against the installed package, of which mypy reads `py.typed`, with no settings of this project."""
    done = checkout.python(
        "-m", "mypy", "--strict", "--config-file=", "user.py", cwd=checkout.ROOT / "tests" / "typing", check=False
    )
    assert done.returncode == 0, done.stdout
