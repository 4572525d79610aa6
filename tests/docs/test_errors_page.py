"""docs/errors.md lists every message that the library raises."""

from __future__ import annotations

import importlib.util
import re

import checkout
import pytest


@pytest.mark.slow
def test_the_page_of_errors_is_complete() -> None:
    spec = importlib.util.spec_from_file_location("make_errors", checkout.ROOT / "docs" / "make_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (checkout.ROOT / "docs" / "errors.md").read_text()
    assert page == module.page(), "python docs/make_errors.py writes the page anew"
    assert "| save the model again, or take the files of a copy | `recipe/store.py` |" in page  # a constant
    assert "| delete it to start that stage again | `base/files.py` |" in page  # the default of an argument
    assert len(re.findall(r"^\| .* \| `[a-z/_]+\.py` \|$", page, re.M)) > 300
