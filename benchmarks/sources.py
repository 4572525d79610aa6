"""The articles' networks under each precision: a small MLP, a UNet, BERT-base's shape, ResNet-50, a word-level LSTM.

Each learns a task of its own for an epoch: handwritten digits of scikit-learn, and made ones, of which every network can learn
something in a few steps (discs in noise, which of two words stands first, the brightest colour, the next word of a chain).
Policies of one network start from the same weights, meet the same batches and are measured in turn, so that other load slows
all of them: milliseconds of a step (process time of one thread on a CPU), seconds of the epoch, the metric on held-out samples
after it, and memory between and within steps, allocated and reserved. On a CPU the batches are small, and levels in fp16 are
left out but for the MLP, since no CPU computes it fast. `--smoke` tries the code on tiny networks and writes nothing; `--only`
chooses.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn

from compresskit import mixed

HERE = Path(__file__).parent
BF16 = {
    "FP32 (O0)": mixed.FP32,
    "autocast (O4)": mixed.AMP_BF16,
    "masters (O5)": mixed.MASTER_BF16,
    "remainders": mixed.SPLIT_BF16,
    "TF32": mixed.TF32,
}
FP16 = {f"{name} (fp16)": mixed.level(name) for name in ("O1", "O2", "O3")}


class UNet(nn.Module):
    """Ronneberger et al., 1505.04597, with BatchNorm: (N, 3, H, W) to (N, 2, H, W), H and W multiples of 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(_double(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.join[i](torch.cat([kept[i], self.up[i](x)], 1))
        return self.head(x)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a in (inputs, outputs):
        layers += [nn.Conv2d(a, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """BERT's shape: token ids (N, L) to two scores."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids))[:, 0])


class WordModel(nn.Module):
    """A word-level language model of two LSTM layers: (N, L) to (N, words, L)."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(ids))[0]).transpose(1, 2)


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its batches (a function of their number), the share of right outputs as metric, and a learning rate."""

    make: Callable[[], nn.Module]
    draw: Callable[[int], Batch]
    size: int
    rate: float = 1e-3


def digits() -> Callable[[int], Batch]:
    """Rows of 64 grey values of handwritten digits."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(x).float() / 16, torch.from_numpy(y)

    def draw(n: int) -> Batch:
        index = torch.randint(len(images), (n,))
        return images[index], labels[index]

    return draw


def discs(side: int, n: int) -> Batch:
    """Noisy pictures of a brighter disc, and where it is."""
    rows = torch.arange(side, dtype=torch.float32)
    centre = side * (0.2 + 0.6 * torch.rand(2, n, 1, 1))
    inside = (rows.view(1, -1, 1) - centre[0]) ** 2 + (rows - centre[1]) ** 2 < (side / 5) ** 2
    return torch.randn(n, 3, side, side) + inside[:, None], inside.long()


def first_words(words: int, length: int, n: int) -> Batch:
    """Word ids, the first of them 0 or 1, and which of the two it is."""
    ids = torch.randint(words, (n, length))
    ids[:, 0] %= 2
    return ids, ids[:, 0].clone()


def colours(side: int, n: int) -> Batch:
    """Noisy pictures, and which of their colours is the brightest."""
    labels = torch.randint(3, (n,))
    return torch.randn(n, 3, side, side) + 0.5 * F.one_hot(labels, 3)[:, :, None, None], labels


def chains(words: int, length: int, n: int) -> Batch:
    """Word ids of which each is the one before plus one, or in a fifth of the places any; and the ids that follow."""
    ids = torch.randint(words, (n, length + 1))
    for i in range(length):
        ids[:, i + 1] = torch.where(torch.rand(n) < 0.8, (ids[:, i] + 1) % words, ids[:, i + 1])
    return ids[:, :-1], ids[:, 1:]


def cases(*, smoke: bool, cuda: bool) -> dict[str, Case]:
    n = 1 if smoke or not cuda else 8
    side, words, length = (32, 100, 8) if smoke else (64, 10_000, 32) if not cuda else (128, 10_000, 128)
    wide, deep, known = (64, 2, 100) if smoke else (768, 12, 30_522)
    return {
        "MLP": Case(
            make=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
            draw=digits(),
            size=64,
        ),
        "UNet": Case(make=lambda: UNet(4 if smoke else 32), draw=partial(discs, side), size=4 * n),
        "BERT-base": Case(
            make=lambda: Encoder(wide, deep, known), draw=partial(first_words, known, length), size=4 * n, rate=1e-4
        ),
        "ResNet": Case(
            make=lambda: torchvision.models.get_model("resnet18" if smoke else "resnet50", num_classes=3),
            draw=partial(colours, side),
            size=8 * n,
        ),
        "LSTM words": Case(make=lambda: WordModel(64 if smoke else 650, words), draw=partial(chains, 10, length), size=8 * n),
    }


def _lstm_in_bf16() -> bool:
    """Whether this processor trains an LSTM in bf16; oneDNN does not where there are no instructions for it."""
    lstm = nn.LSTM(16, 16).bfloat16()
    try:
        lstm(torch.randn(2, 2, 16, dtype=torch.bfloat16))[0].sum().backward()
    except RuntimeError:
        return False
    return True


def measure(name: str, case: Case, device: torch.device, *, steps: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    cuda = device.type == "cuda"
    policies = BF16 | (FP16 if cuda or name == "MLP" else {})
    if not cuda:
        policies.pop("TF32")
    if name == "LSTM words" and not cuda and not _lstm_in_bf16():
        policies = {"FP32 (O0)": mixed.FP32}
    torch.manual_seed(0)
    model = case.make().to(device)
    batches = [_on(device, case.draw(case.size)) for _ in range(steps + 1)]
    held_out = [_on(device, case.draw(case.size)) for _ in range(32)]
    runs: dict[str, mixed.Run] = {}
    spent: dict[str, list[float]] = {key: [] for key in policies}
    adam = partial(torch.optim.AdamW, lr=case.rate, fused=True)
    for key, policy in policies.items():
        own = copy.deepcopy(model)
        runs[key] = mixed.prepare(own, adam(own.parameters()), policy)
    clock = time.perf_counter if cuda else time.process_time
    for x, y in batches:
        for key, run in runs.items():
            begin = clock()
            run.backward(F.cross_entropy(run(x), y))
            run.step()
            if cuda:
                torch.cuda.synchronize(device)
            spent[key].append(clock() - begin)
    right = {key: _share_of_right(run, held_out) for key, run in runs.items()}
    runs.clear()
    report = mixed.memory_report(model, batches[0], loss=F.cross_entropy, optimizer=adam,
                                  policies=list(policies.values()), steps=2)  # fmt: skip
    first = statistics.median(spent["FP32 (O0)"][1:])
    rows = []
    for (key, times), memory in zip(spent.items(), report.rows, strict=True):
        step = statistics.median(times[1:])  # the first one allocates
        row: dict[str, Any] = {"network": name, "policy": key, "step_ms": 1000 * step, "of_fp32": step / first}
        row |= {"epoch_s": sum(times[1:]), "metric": right[key]}
        row |= {"allocated_mib": memory.allocated / 2**20, "peak_mib": memory.peak / 2**20}
        row |= {} if memory.peak_reserved is None else {"reserved_mib": memory.peak_reserved / 2**20}
        rows.append(row)
    return rows


def _on(device: torch.device, batch: Batch) -> Batch:
    return batch[0].to(device), batch[1].to(device)


@torch.no_grad()
def _share_of_right(run: mixed.Run, batches: list[Batch]) -> float:
    run.model.train()  # thirty steps do not settle the running averages of BatchNorm
    found = [(run(x).argmax(1) == y).float().mean().item() for x, y in batches]
    return statistics.mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny networks; writes nothing")
    parser.add_argument("--steps", type=int, default=30, help="steps of the epoch; one more goes before")
    parser.add_argument("--only", nargs="+", help="names of networks; writes nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for name, case in cases(smoke=args.smoke, cuda=device.type == "cuda").items():
        if args.only is None or name in args.only:
            rows += measure(name, case, device, steps=1 if args.smoke else args.steps)
            print("\n".join(str(row) for row in rows if row["network"] == name), flush=True)
    where = f"{device.type}, torch {torch.__version__}, {platform.machine()}"
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        f"# The articles' networks under each precision: {where}",
        "",
        f"An epoch has {args.steps} steps; metric: share of right outputs (images, pixels, words) on held-out samples after it.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|---|" + "--:|" * (len(heads) - 2),
    ]
    lines += [
        "| " + " | ".join(f"{row[h]:.2f}" if isinstance(row.get(h), float) else str(row.get(h, "-")) for h in heads) + " |"
        for row in rows
    ]
    if not args.smoke and args.only is None:
        (HERE / "sources.json").write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
        (HERE / "sources.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
