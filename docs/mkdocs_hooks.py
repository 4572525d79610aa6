"""Bring what the pages link to outside `docs/` into the site: tables of benchmarks, recipes, CONTRIBUTING and CHANGELOG."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "benchmarks/*.md",
    "benchmarks/*.py",
    "benchmarks/*.json",
    "recipes/*.md",
    "recipes/*.py",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add files of the repository to those of the site, under the path that they have there."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite links: in the repository the pages lie in `docs/`, in the site at the top."""
    here = page.file.src_uri
    outside = any(Path(here).match(pattern) for pattern in OUTSIDE)
    folder = posixpath.dirname(here if outside else f"docs/{here}")

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2])).removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return found[0]
        return found[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + found[3]

    return LINK.sub(moved, markdown)
