"""Time of planning, quantizing, exporting and stepping, this checkout beside another one; one thread.

    python benchmarks/planning_speed.py --base PATH [--name REVISION] [--only plan quantize] [--runs 7]

PATH is another checkout of this project, such as `git worktree add PATH de15f68`. Each checkout has a worker process, and the two
are asked for the same case in turn, so that whatever else the machine does slows both. The ratio is the median of the ratios of
neighbours, the seconds are medians, of processor time (the machine may do other work). "same" says whether both gave the same:
the plan, the integers of the weights and the ranges, the bytes of the file, the weights after the steps. What comes before the
measured call (making the network, quantizing what is exported or trained) is not timed.

Writes `planning_speed.json` and `planning_speed.md` beside this file. `--only` measures some cases and keeps the rows of the
others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"

#: What a case measures: called once, it returns the seconds and what was made, which is compared.
Case = Callable[[], tuple[float, Any]]


def digest(made: Any) -> str:
    """A fingerprint of tensors, files, and what can be written as JSON."""
    import torch

    if isinstance(made, bytes):
        return hashlib.sha256(made).hexdigest()[:16]
    if isinstance(made, torch.Tensor):
        return digest(str(made.dtype).encode() + made.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(made, (list, tuple)):
        return digest("".join(map(digest, made)).encode())
    return digest(json.dumps(made, sort_keys=True, default=str).encode())


@cache
def network(name: str) -> tuple[Any, Any]:
    """(a network in eval mode with seeded weights and statistics of random inputs, two rows of inputs)."""
    import torch
    import torchvision
    from torch import nn

    torch.manual_seed(0)
    if name == "gpt2":
        model: Any = gpt2()
        return model.eval(), torch.randint(0, 500, (2, 16))
    x = torch.randn(2, 3, 32, 32) if name == "resnet20" else torch.randn(2, 3, 64, 64)
    if name == "resnet20":
        sys.path.insert(0, str(RECIPES))
        from vision import CifarResNet

        model = CifarResNet(20)
    elif name == "vit":
        model = torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=256, num_classes=100
        )
        nn.init.normal_(model.heads.head.weight, std=0.1)
    elif name == "vit_b_16":
        model, x = torchvision.models.vit_b_16(weights=None), torch.randn(2, 3, 224, 224)
    else:
        model = torchvision.models.get_model(name, weights=None)
    with torch.no_grad():
        for _ in range(10):
            model.train()(torch.randn(8, *x.shape[1:])) if name != "vit_b_16" else None
    return model.eval(), x


def gpt2() -> Any:
    """A small GPT-2: learned positions, one matrix for queries, keys and values, a head tied to the embedding."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads, self.width = heads, width
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            n, length, _ = x.shape
            parts = self.attention(self.first(x)).split(self.width, dim=2)
            q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(mixed.transpose(1, 2).reshape(n, length, self.width))
            return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(500, 64), nn.Embedding(32, 64)
            self.blocks, self.last = nn.ModuleList(Block(64, 4) for _ in range(4)), nn.LayerNorm(64)
            self.head = nn.Linear(64, 500, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.last(x))

    return GPT2()


def budget() -> dict[str, Any]:
    """Half of the MACs, in the words of the checkout."""
    import compresskit as ck

    return {"budget": ck.keep(macs=0.5)} if hasattr(ck, "keep") else {"macs": 0.5}


def plan_case(name: str) -> Case:
    """Plan half of the MACs, proof included."""
    import compresskit as ck

    model, x = network(name)

    def run() -> tuple[float, Any]:
        begin = time.process_time()
        plan = ck.prune.plan_channels(model, x, **budget())
        return time.process_time() - begin, plan.to_json()

    return run


def prune_case(name: str) -> Case:
    """The stage: plan, refit, re-estimate BatchNorm on 256 images."""
    import copy

    import torch

    import compresskit as ck

    model, x = network(name)
    count = 16 if name == "vit_b_16" else 256
    images = torch.randn(count, *x.shape[1:])
    rows = [(part, torch.zeros(len(part), dtype=torch.long)) for part in images.split(8 if name == "vit_b_16" else 64)]
    task = ck.Task(train=rows, val=rows)

    def run() -> tuple[float, Any]:
        given = copy.deepcopy(model)
        begin = time.process_time()
        pruned = ck.Prune(**budget())(given, task)
        return time.process_time() - begin, [v for v in pruned.state_dict().values() if v.is_floating_point()]

    return run


def batches(x: Any) -> list[tuple[Any]]:
    """Two batches of 16 rows like `x`."""
    import torch

    torch.manual_seed(1)
    shape = (16, *x.shape[1:])
    return [(torch.randn(shape) if x.is_floating_point() else torch.randint(0, 500, shape),) for _ in range(2)]


def quantize_case(name: str) -> Case:
    """Static quantization on 32 rows, with its search for scales off rounding boundaries."""
    import compresskit as ck

    model, x = network(name)
    data = batches(x)

    def run() -> tuple[float, Any]:
        begin = time.process_time()
        quantized = ck.quant.quantize_static(model, data)
        seconds = time.process_time() - begin
        return seconds, [v for _, v in sorted(quantized.deployed().state_dict().items())]

    return run


def export_case(name: str) -> Case:
    """The file of a statically quantized network; the network is quantized beforehand."""
    import compresskit as ck

    model, x = network(name)
    quantized = ck.quant.quantize_static(model, batches(x))
    folder = Path(tempfile.mkdtemp())

    def run() -> tuple[float, Any]:
        begin = time.process_time()
        file = ck.export_onnx(quantized, folder / "model.onnx", (x,))
        return time.process_time() - begin, Path(file).read_bytes()

    return run


def qat_case(name: str, *, held: bool = False) -> Case:
    """Six QAT steps of 16 rows, forward, backward and SGD; `held`: with frozen ranges and BatchNorm statistics."""
    import torch

    import compresskit as ck

    model, x = network(name)
    data = batches(x)

    def run() -> tuple[float, Any]:
        torch.manual_seed(0)
        trained: Any = ck.quant.prepare_qat(model, data)
        if held:
            (trained.freeze_statistics_ if hasattr(trained, "freeze_statistics_") else trained.hold_)()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            trained(data[0][0]).square().mean().backward()
            optimizer.step()

        step()
        begin = time.process_time()
        for _ in range(6):
            step()
        return time.process_time() - begin, list(trained.parameters())

    return run


def optimizer_case(_: str) -> Case:
    """Sixty-four tensors of 64 x 64, AdamW with fp32 masters, 200 steps."""
    import torch
    from torch import nn

    from compresskit import mixed

    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run_ = mixed.prepare(model, optimizer, mixed.MASTER_BF16)
    grads = [torch.randn(64, 64) for _ in range(64)]

    def run() -> tuple[float, Any]:
        parameters = list(model.parameters())
        begin = time.process_time()
        for _ in range(200):
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
            run_.step()
        return time.process_time() - begin, parameters

    return run


def train_case(name: str) -> Case:
    """Training steps with fp32 masters of bf16 weights, AdamW: forward, backward, step."""
    import torch
    from torch import nn

    from compresskit import mixed

    torch.manual_seed(0)
    if name == "64 layers":
        model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(64)))
        x, steps = torch.randn(32, 64), 30
    else:
        model, x = network(name)
        x, steps = batches(x)[0][0], 4
    run_ = mixed.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3), mixed.MASTER_BF16)

    def run() -> tuple[float, Any]:
        begin = time.process_time()
        for _ in range(steps):
            loss = run_(x).float().square().mean()
            run_.backward(loss)
            run_.step()
        return time.process_time() - begin, list(model.parameters())

    return run


GROUPS: dict[str, tuple[Callable[[str], Case], tuple[str, ...]]] = {
    "plan": (plan_case, ("resnet18", "resnet20", "mobilenet_v2", "vit", "gpt2")),
    "prune": (prune_case, ("resnet20",)),
    "quantize": (quantize_case, ("resnet18", "resnet20", "mobilenet_v2", "vit", "gpt2")),
    "export": (export_case, ("resnet18", "mobilenet_v2", "vit", "gpt2")),
    "qat": (qat_case, ("resnet18", "resnet20", "mobilenet_v2", "vit")),
    "qat-held": (partial(qat_case, held=True), ("resnet20",)),
    "optimizer": (optimizer_case, ("64 tensors",)),
    "train": (train_case, ("64 layers", "resnet20")),
}
BIG: dict[str, tuple[str, ...]] = {"plan": ("vit_b_16",), "prune": ("vit_b_16",)}


def case_of(group: str, name: str) -> Case:
    return GROUPS[group][0](name)


def work() -> None:
    """Answer requests `group name` on standard input by a line with the seconds and the digest."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cases: dict[str, Case] = {}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        if line not in cases:
            cases[line] = case_of(*line.rstrip("\n").split("/"))
        seconds, made = cases[line]()
        print(json.dumps({"seconds": seconds, "digest": digest(made)}), file=answers, flush=True)


class Worker:
    """A process that measures one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )

    def ask(self, case: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(case, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{case}: the worker in {self.process.args!r} ended")
        return dict(json.loads(answer))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(case: str, here: Worker, base: Worker, runs: int) -> dict[str, Any]:
    """Ask both in turn; the first run of each warms up."""
    pairs = [(here.ask(case), base.ask(case)) for _ in range(runs + 1)]
    same = all(a["digest"] == b["digest"] for a, b in pairs)
    ours, theirs = zip(*((a["seconds"], b["seconds"]) for a, b in pairs[1:]), strict=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    medians = statistics.median(ours), statistics.median(theirs)
    return {"seconds": round(medians[0], 4), "base": round(medians[1], 4), "ratio": round(ratio, 3), "same": same, "runs": runs}


def write(rows: dict[str, Any], about: dict[str, Any]) -> None:
    (HERE / "planning_speed.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = [
        f"# Planning, quantizing and stepping beside {about['base']}",
        "",
        f"Medians of runs in turn, one thread, {about['machine']}, torch {about['torch']}. See the head of `planning_speed.py`.",
        "",
        "| case | seconds | before | ratio | same result |",
        "|---|--:|--:|--:|---|",
    ]
    for case, row in rows.items():
        same = "yes" if row["same"] else "no"
        lines.append(f"| {case} | {row['seconds']:.3g} | {row['base']:.3g} | {row['ratio']:.2f} | {same} |")
    (HERE / "planning_speed.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def processor() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--name", default="de15f68", help="its revision, for the table")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="such as plan, or plan/resnet18")
    parser.add_argument("--big", action="store_true", help="measure ViT-B/16 too")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="print, but keep the files")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    if args.base is None:
        parser.error("--base: wanted another checkout to compare with")
    names = {group: (*listed, *(BIG.get(group, ()) if args.big else ())) for group, (_, listed) in GROUPS.items()}
    cases = [f"{group}/{name}" for group, listed in names.items() for name in listed]
    if args.only:
        cases = [case for case in cases if case in args.only or case.partition("/")[0] in args.only]
    here, base = Worker(HERE.parent), Worker(args.base)
    rows = {}
    for case in cases:
        rows[case] = compare(case, here, base, args.runs)
        print(case, rows[case], flush=True)
    here.end()
    base.end()
    if args.dry:
        return
    import torch

    saved = HERE / "planning_speed.json"
    before = json.loads(saved.read_text())["rows"] if saved.exists() and args.only else {}
    write(before | rows, {"base": args.name, "machine": processor(), "torch": torch.__version__})


if __name__ == "__main__":
    main()
