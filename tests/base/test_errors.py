"""What messages quote of an error that something else raised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base import errors
from compresskit.base.errors import DataError, first_line, named_first_line
from compresskit.base.inputs import call_checked


@pytest.mark.parametrize(
    ("said", "line"), [("", "Said"), ("  \n", "Said"), ("one", "one"), ("\n one\ntwo", "one"), ("one\n\ntwo", "one")]
)
def test_the_first_line_of_an_error_or_its_class(said, line) -> None:
    class Said(Exception):
        """One that says its message as it is."""

    assert first_line(Said(said)) == line
    assert named_first_line(Said(said)) == ("Said" if line == "Said" else f"Said: {line}")


def test_a_model_that_fails_without_a_word_is_named() -> None:
    class Unfinished(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(DataError, match=r"there: the model does not run on inputs of shape .*: NotImplementedError"):
        call_checked(Unfinished(), (torch.zeros(1),), "there")


def test_all_classes_can_be_caught_by_their_names_in_the_package() -> None:
    names = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert "Interrupted" in names
    assert all(getattr(ck, name) is getattr(errors, name) for name in names)
