"""A terminal on which progress bars show, and what they say."""

from __future__ import annotations

import io
import re
import sys

import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def bars(self) -> dict[str, str]:
        """Description of each progress bar that was shown -> its last line."""
        return {line.partition(":")[0].strip(): line for line in re.split("[\r\n]", self.getvalue()) if "%|" in line}


def show_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let standard error be a terminal."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal
