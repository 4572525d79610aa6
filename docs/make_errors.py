"""Write docs/errors.md: every message that the library raises, read from its source. Run `python docs/make_errors.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUBCLASSES = {"MetricError": "DataError"}  # which only the library tells apart -> what users catch
HEAD = """# Errors: what they say, and what to do

Written by `docs/make_errors.py` from the source; `tests/docs/test_errors_page.py` checks that it is complete.

```
{tree}
```

Catch `CompressError` to catch them all. A message says what is wrong and where, what was wanted, what was given, and, after its
last semicolon, what to do; `...` stands for names and numbers. Where there is no remedy in the table, the message says what was
wanted.

What can end a run from outside, and how to resume it:

| cause | error | remedy |
|---|---|---|
| killed, power cut | nothing | run the same command again: the result has the same bits |
| SIGINT, SIGTERM | `Interrupted`: where it was saved; exit code 1 | run the same command again |
| two processes on one folder | `CheckpointError`: in use by another process (its id) | wait, end it, or choose another `out=` |
| disk full, read-only | `CheckpointError`: the file; what was saved before is whole | make room or change rights; run it again |
| out of memory | `TrainingError`: the shapes of the batch | smaller batches with `accumulate=`, half precision; run it again |
| a worker of a loader dies | `DataError`: the batch, what the worker said | look at the data set; `num_workers=0`; run it again |
| a metric or a loss is nan | `DataError`, `TrainingError`: the first that is not finite | lower the rate, `clip=`, clean data |
| a loader changes its length | `DataError`: both lengths | let `len(loader)` be what it gives |
| a process of several dies | `TrainingError`: another process is gone; all end | run it again |
| a file was damaged | `CheckpointError`: the file | delete what it names; the stage runs again |
"""


def text_of(node: ast.expr, texts: Mapping[str, str]) -> str:
    """The text of a message, with `...` for each value that is filled in, but for names that have one of the texts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        said = ""
        for part in node.values:
            said += str(part.value) if isinstance(part, ast.Constant) else filled_in(part, texts, said)
        return said
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, texts) + text_of(node.right, texts)
    return "..."


def filled_in(part: ast.expr, texts: Mapping[str, str], before: str) -> str:
    """What stands for a value in a message: the text of a constant, such as a whole remedy, `...` for any other."""
    name = part.value if isinstance(part, ast.FormattedValue) else part
    text = texts.get(name.id, "...") if isinstance(name, ast.Name) else "..."
    return text.replace(";", ",") if ";" in before else text  # the last one divides cause and remedy


def constants(tree: ast.Module) -> dict[str, str]:
    """The texts to which a file, or one that it imports them from, gives a name."""
    texts: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and any(alias.name.isupper() for alias in node.names):
            path = ROOT.joinpath(*(node.module or "").split("."))
            if path.with_suffix(".py").is_file():
                theirs = constants(ast.parse(path.with_suffix(".py").read_text()))
                texts |= {alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}
    return texts


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """(class, message) of every error that a file raises."""
    tree = ast.parse(path.read_text())
    yield from messages_in(tree, constants(tree))


def messages_in(outer: ast.AST, texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(class, message) of every error that is raised within a node. texts: of the names that its messages fill in."""
    for node in ast.iter_child_nodes(outer):
        known = dict(texts)
        if isinstance(node, ast.FunctionDef):  # an argument that is an advice unless another is given
            given = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
            known |= {arg.arg: texts[value.id] for arg, value in given if isinstance(value, ast.Name) and value.id in texts}
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = getattr(node.exc.func, "id", "")
            if kind.endswith("Error") or kind == "Interrupted":
                yield SUBCLASSES.get(kind, kind), text_of(node.exc.args[0], texts)
        yield from messages_in(node, known)


def page() -> str:
    """The whole page."""
    doc = ast.get_docstring(ast.parse((ROOT / "compresskit" / "base" / "errors.py").read_text())) or ""
    tree = "\n".join(line.removeprefix("    ") for line in doc.split("\n\n", 1)[1].rsplit("\n\n", 1)[0].splitlines())
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((ROOT / "compresskit").rglob("*.py")):
        for kind, said in messages(path):
            if said.strip(".: "):
                found.setdefault(kind, set()).add((str(path.relative_to(ROOT / "compresskit")), said))
    parts = [HEAD.format(tree=tree)]
    for kind in sorted(found):
        if kind in ("SettingError", "DataError", "ModelError", "TrainingError", "StageOrderError", "ExportError",
                    "CheckpointError", "Interrupted"):  # fmt: skip
            rows = []
            for where, said in sorted(found[kind]):
                cause, _, cure = said.rpartition(";") if ";" in said else (said, "", "")
                rows.append(f"| {cell(cause)} | {cell(cure)} | `{where}` |")
            parts.append(f"\n## {kind}\n\n| message | remedy | raised in |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def cell(text: str) -> str:
    """Text that a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    (ROOT / "docs" / "errors.md").write_text(page())
