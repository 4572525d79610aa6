"""The Python blocks of every page in docs/ run: the blocks of a page one after another, as one script in a folder of its own."""

from __future__ import annotations

import ast
import builtins
import re

import checkout
import pytest

DOCS = checkout.ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())
GUIDES = sorted(page for page in (DOCS / "guide").glob("*.md") if "```python" in page.read_text())

COMMON = """
from pathlib import Path
import networks, torch
import compresskit as ck
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
task = networks.images_task(ck)
"""

#: What the blocks of a page take for granted, by the page's name.
GIVEN = {
    "distillation": """
class ResNet20(networks.Chain): pass
class ResNet56(networks.Residual): pass
resnet56 = ResNet56().eval()
resnet56.layer2 = nn.Identity()
student_logits, teacher_logits = torch.randn(2, 8, 10)
""",
    "index": """
import torchvision
from PIL import Image
from torchvision.models.resnet import BasicBlock, ResNet

for i in range(8):
    Path(f"images/{i % 2}").mkdir(parents=True, exist_ok=True)
    Image.fromarray((torch.rand(8, 8, 3) * 255).byte().numpy()).resize((256, 256)).save(f"images/{i % 2}/{i}.jpg")

def untrained(weights):
    model = ResNet(BasicBlock, [1, 1, 1, 1])
    model.layer2, model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(64, 1000)
    return model

torchvision.models.resnet18 = untrained
""",
    "loops": "",
    "mixed": """
model, loader, loss_fn = networks.Chain(), task.train, nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
""",
    "compress": "",
    "parts": "",
    "pruning": "",
    "quantization": """
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(256, 1024), nn.Linear(1024, 4)  # so large that float is not the fastest
    def forward(self, x):
        return self.head(torch.relu(self.embed(x)).mean(1))
model, example = Tokens().eval(), (torch.randn(4, 12, 256),)
batches = [(torch.randn(8, 12, 256),) for _ in range(2)]
""",
    "tracking": """
import mlflow, os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # without a database
mlflow.set_tracking_uri("file:mlflow")
""",
    "training": "",
    "runs": """
stages = [ck.Train(epochs=1)]
model, recipe = networks.Chain(), ck.Recipe(*stages)
""",
}
#: What the blocks of the guide take for granted; each page has its own.
GIVEN_TO_GUIDES = """
from functools import partial
import torch.nn.functional as F
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
).eval()
example = networks.image(8)
images = example[0]
batches = [networks.image(8)[0] for _ in range(4)]
loader = [(x, torch.arange(8) % 10) for x in batches]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = loader[0]
"""
#: Names that a page does not define, by the page's name: what stands for the reader's own, such as a trained model.
OF_THE_READER = {
    "accuracy": {"model", "batches"},
    "devices": {"model", "batches"},
    "distillation": {"ResNet20", "resnet56", "student_logits", "teacher_logits"},
    "mixed": {"model", "optimizer", "loader", "loss_fn"},
    "nan": {"model", "images", "batches"},
    "quantization": {"model", "example", "batches"},
    "runs": {"model", "recipe", "stages", "task"},
    "speed": {"model", "batches"},
}
#: Packages of which a page shows the use, and without which it is skipped. The extra `dev` has none of them, so they are slow.
NEEDS = {"loops": ["lightning", "transformers", "accelerate"], "tracking": ["tensorboard", "mlflow"]}
SLOW = {"quantization", *NEEDS}


def blocks(page) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def unknown_names(written: list[str]) -> set[str]:
    """Names that blocks read and that no block up to there defines or imports."""
    known, unknown = set(dir(builtins)), set()
    for block in written:
        nodes = list(ast.walk(ast.parse(block)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        known |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        known |= {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        unknown |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - known
    return unknown


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: page.stem)
def test_a_page_imports_and_defines_what_its_blocks_read(page) -> None:
    """So that a reader can paste them. What is given to the script of a page may stand for the reader's own alone."""
    assert unknown_names(blocks(page)) <= OF_THE_READER.get(page.stem, set())


def test_a_name_that_no_block_defines_is_seen() -> None:
    assert unknown_names(["import torch\nx = torch.ones(1)", "y = [f(a) for a in x]", "f = y"]) == {"f"}
    assert unknown_names(["def g(x):\n    return x + z\n\n\nclass A(B): ..."]) == {"z", "B"}


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {"distillation", "loops", "mixed", "pruning", "quantization", "runs"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in PAGES], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(page, run_script) -> None:
    for name in NEEDS.get(page.stem, []):
        pytest.importorskip(name, reason=f"{name} is not installed")
    run_script("\n".join([COMMON, GIVEN[page.stem], *blocks(page)]))


@pytest.mark.slow
def test_the_code_of_the_guide_runs(tmp_path) -> None:
    """One process for all of its pages, each from the same start."""
    written = {page.stem: blocks(page) for page in GUIDES}
    script = tmp_path / "guide.py"
    script.write_text(f"""
for page, blocks in {written!r}.items():
    names = {{}}
    for block in ({COMMON!r}, {GIVEN_TO_GUIDES!r}, *blocks):
        exec(compile(block, page, "exec"), names)
""")
    checkout.python(script, cwd=tmp_path)


def rows_of_migration() -> dict[str, list[str]]:
    """Library -> the code in the right column of its table, without the head."""
    found = {}
    for section in (DOCS / "guide" / "migration.md").read_text().split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        cells = [line.split(" | ")[-1] for line in rest.splitlines() if line.startswith("|")][2:]
        found[name] = [code for cell in cells for code in re.findall(r"^`([^`]+)`", cell)]
        assert len(found[name]) >= len(cells) - 1, name
    return found


@pytest.mark.slow
def test_every_line_to_migrate_to_runs(tmp_path) -> None:
    written = rows_of_migration()
    assert len(written) == 7
    script = tmp_path / "migration.py"
    script.write_text(f"""
for library, lines in {written!r}.items():
    names = {{}}
    for line in ({COMMON!r}, {GIVEN_TO_GUIDES!r}, *lines):
        try:
            exec(line, names)
        except Exception as error:
            raise RuntimeError(f"{{library}}: {{line}}") from error
""")
    checkout.python(script, cwd=tmp_path)


def test_the_first_page_needs_twelve_lines() -> None:
    first = blocks(DOCS / "index.md")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: page.stem)
def test_the_names_that_a_page_imports_are_public(page) -> None:
    """Settings that a block only shows are not a reason to leave its imports out of the surface."""
    import compresskit as ck

    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ck":
                assert node.attr in ck.__all__, f"{page.name}: ck.{node.attr}"
