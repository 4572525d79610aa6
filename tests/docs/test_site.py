"""The pages as a whole: links that lead somewhere, generated pages in step with their scripts, a site that builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from xml.etree import ElementTree

import checkout
import pytest

DOCS = checkout.ROOT / "docs"
LINKED = sorted([*DOCS.rglob("*.md"), *checkout.ROOT.glob("*.md"), *(checkout.ROOT / "recipes").glob("*.md")])


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(text):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower() for heading in re.findall(r"^#+ (.+)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(checkout.ROOT)))
def test_links_lead_somewhere(page) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{page.name}: {target}#{anchor}"


def test_the_checker_of_links_sees_a_broken_one(tmp_path) -> None:
    (tmp_path / "page.md").write_text("# One `two`\n[here](#one-two) [there](gone.md)")
    assert anchors((tmp_path / "page.md").read_text()) == {"one-two"}
    with pytest.raises(AssertionError, match="gone.md"):
        test_links_lead_somewhere(tmp_path / "page.md")


def test_pages_with_figures_are_in_step_with_the_benchmarks() -> None:
    for path, make in script("make_guide").PAGES.items():
        assert path.read_text() == make(), "python docs/make_guide.py writes the page anew"


def test_pictures_are_in_step_and_say_what_they_show() -> None:
    made = script("make_pictures")
    shown = (DOCS / "guide" / "why.md").read_text()
    assert {path.name for path in made.FOLDER.iterdir()} == made.PICTURES.keys()
    for name, draw in made.PICTURES.items():
        text = (made.FOLDER / name).read_text()
        assert text == draw(), "python docs/make_pictures.py draws the pictures anew"
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title").text
        assert f"../pictures/{name}" in shown
        assert len(text) < 20_000


def test_all_pages_are_in_the_navigation() -> None:
    listed = (checkout.ROOT / "mkdocs.yml").read_text()
    missing = [page for page in DOCS.rglob("*.md") if f": {page.relative_to(DOCS)}\n" not in listed]
    assert missing == []


def test_the_site_builds_without_a_warning(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=checkout.ROOT, env=checkout.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = (tmp_path / "site" / "results.html").read_text()
    assert 'href="benchmarks/distill_cifar.html"' in results
    assert 'href="benchmarks/distill_cifar.py"' in results
    assert (tmp_path / "site" / "benchmarks" / "distill_cifar.py").exists()
    assert 'id="compresskit.quant.quantize_static"' in (tmp_path / "site" / "api.html").read_text()
