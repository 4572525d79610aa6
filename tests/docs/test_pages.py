"""The Python blocks of every page in docs/ run: the blocks of a page one after another, in a process and a folder of its own."""

from __future__ import annotations

import ast
import re

import checkout
import pytest

PAGES = sorted(page for page in (checkout.ROOT / "docs").glob("*.md") if "```python" in page.read_text())

COMMON = """
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
    "loops": """
import other_loops
other_loops.install()
""",
    "mixed": """
model, loader, loss_fn = networks.Chain(), task.train, nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
""",
    "parts": "",
    "pruning": """
from torch import Tensor
from compresskit import prune
from compresskit.prune import *
from compresskit.prune.criteria import wanda
from compresskit.prune.patterns import NM
from residual import ResNet
model, example, blocks_model = networks.build(networks.Residual), networks.image(), networks.build(ResNet)
""",
    "quantization": """
from compresskit.quant import *
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(32, 64), nn.Linear(64, 4)
    def forward(self, x):
        return self.head(torch.relu(self.embed(x)).mean(1))
model, example = Tokens().eval(), (torch.randn(4, 12, 32),)
batches = [(torch.randn(8, 12, 32),) for _ in range(2)]
""",
    "runs": """
stages = [ck.Train(epochs=1)]
model, recipe = networks.Chain(), ck.Recipe(*stages)
""",
}
SLOW = {"quantization"}


def blocks(page) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {"distillation", "loops", "mixed", "pruning", "quantization", "runs"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in PAGES], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(page, tmp_path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join([COMMON, GIVEN[page.stem], *blocks(page)]))
    checkout.python(script, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_that_a_page_imports_are_public(page) -> None:
    """Settings that a block only shows are not a reason to leave its imports out of the surface."""
    import compresskit as ck

    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ck":
                assert node.attr in ck.__all__, f"{page.name}: ck.{node.attr}"
