"""The articles' networks under each precision: a small MLP, a UNet, BERT-base's shape, ResNet-50, a word-level LSTM.

Rows of one network are measured in turn, so that other load slows all of them: milliseconds of a step (process time of one
thread on a CPU), the loss after the steps, and memory between and within steps. On a CPU the batches are small and levels in
fp16 are left out but for the MLP, since no CPU computes it fast. `--smoke` tries the code on tiny networks and writes nothing;
`--only` chooses.
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, a batch for it, and a learning rate."""

    make: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    rate: float = 1e-3


def cases(*, smoke: bool, cuda: bool) -> dict[str, Case]:
    n = 1 if smoke or not cuda else 32
    side, words, length = (32, 100, 8) if smoke else (64, 10_000, 32) if not cuda else (128, 10_000, 128)
    wide, deep = (64, 2) if smoke else (768, 12)
    ids = torch.randint(words, (4 * n, length + 1))
    return {
        "MLP": Case(
            make=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
            batch=(torch.randn(256, 64), torch.arange(256) % 10),
        ),
        "UNet": Case(
            make=lambda: UNet(4 if smoke else 32),
            batch=(torch.randn(2 * n, 3, side, side), torch.randint(2, (2 * n, side, side))),
        ),
        "BERT-base": Case(
            make=lambda: Encoder(wide, deep, 100 if smoke else 30_522),
            batch=(torch.randint(100, (n, length)), torch.arange(n) % 2),
            rate=1e-4,
        ),
        "ResNet": Case(
            make=lambda: torchvision.models.get_model("resnet18" if smoke else "resnet50"),
            batch=(torch.randn(2 * n, 3, side, side), torch.arange(2 * n)),
        ),
        "LSTM words": Case(make=lambda: WordModel(64 if smoke else 650, words), batch=(ids[:, :-1], ids[:, 1:])),
    }


def measure(name: str, case: Case, device: torch.device, *, steps: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    cuda = device.type == "cuda"
    policies = BF16 | (FP16 if cuda or name == "MLP" else {})
    if not cuda:
        policies.pop("TF32")
    if name == "LSTM words" and not cuda:
        policies = {"FP32 (O0)": mixed.FP32}  # oneDNN trains no LSTM in bf16 where the processor has no bf16
    torch.manual_seed(0)
    model = case.make().to(device)
    x, y = (value.to(device) for value in case.batch)
    runs: dict[str, mixed.Run] = {}
    spent: dict[str, list[float]] = {key: [] for key in policies}
    adam = partial(torch.optim.AdamW, lr=case.rate, fused=True)
    for key, policy in policies.items():
        own = copy.deepcopy(model)
        runs[key] = mixed.prepare(own, adam(own.parameters()), policy)
    losses: dict[str, float] = {}
    clock = time.perf_counter if cuda else time.process_time
    for _ in range(steps + 1):
        for key, run in runs.items():
            begin = clock()
            loss = F.cross_entropy(run(x), y)
            run.backward(loss)
            run.step()
            if cuda:
                torch.cuda.synchronize(device)
            spent[key].append(1000 * (clock() - begin))
            losses[key] = loss.item()
    runs.clear()
    report = mixed.memory_report(model, (x, y), loss=F.cross_entropy, optimizer=adam,
                                  policies=list(policies.values()), steps=2)  # fmt: skip
    first = statistics.median(spent["FP32 (O0)"][1:])
    rows = []
    for (key, times), memory in zip(spent.items(), report.rows, strict=True):
        ms = statistics.median(times[1:])
        row = {"network": name, "policy": key, "ms": ms, "of_fp32": ms / first, "loss": losses[key]}
        row |= {"allocated_mib": memory.allocated / 2**20, "peak_mib": memory.peak / 2**20}
        row |= {} if memory.peak_reserved is None else {"reserved_mib": memory.peak_reserved / 2**20}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny networks; writes nothing")
    parser.add_argument("--steps", type=int, default=5, help="steps that count; one more goes before")
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
