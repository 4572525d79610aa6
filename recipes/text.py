"""Shared by the recipes on sentences: reading files, vocabulary, batches padded to their longest sentence, two networks."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import compresskit as ck

LONGEST = 256  # words; longer sentences are cut
PAD, UNKNOWN = 0, 1

Sentences = list[list[str]]


class Block(nn.Module):
    """A pre-norm transformer layer: (N, L, width), and a mask that is true at words and false at padding (N, 1, 1, L)."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, real).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.feed(x))


class Transformer(nn.Module):
    """Word ids (N, L), 0 for padding, to (N, 2); L up to `LONGEST`."""

    def __init__(self, words: int, width: int = 128, layers: int = 2, heads: int = 4, drop: float = 0.3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=PAD), nn.Embedding(LONGEST, width)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Sequential(nn.Dropout(drop), nn.Linear(width, 2))

    def hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states, (N, L, width)."""
        real = ids != PAD
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, real[:, None, None])
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        weight = (ids != PAD).unsqueeze(2).to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1).clamp(min=1))


class BiLSTM(nn.Module):
    """Word ids (N, L), 0 for padding, to (N, 2), by a bidirectional LSTM and the maximum of every unit over the sentence."""

    def __init__(self, words: int, width: int = 128, hidden: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.words(ids)))
        x = x.masked_fill((ids == PAD).unsqueeze(2), -1.0)  # no output of an LSTM is lower
        return self.head(self.drop(x.amax(1)))


def rows_of(file: Path, columns: int) -> list[list[str]]:
    """The parts of each line that tabs separate; the last is 0 or 1."""
    wanted = "a line for each sample, " + "a sentence, a tab, " * (columns - 1) + "and 0 or 1"
    if not file.is_file():
        raise SystemExit(f"{file}: there is no such file; wanted {wanted}")
    rows = [line.rsplit("\t", columns - 1) for line in file.read_text().splitlines()]
    for i, row in enumerate(rows, 1):
        if len(row) != columns or row[-1] not in ("0", "1"):
            raise SystemExit(f"{file}, line {i}: wanted {wanted}; got {'(tab)'.join(row)!r:.80}")
    if not rows:
        raise SystemExit(f"{file}: it is empty; wanted {wanted}")
    return rows


def read(file: Path, limit: int | None) -> tuple[Sentences, Tensor]:
    """Words of each sentence, and the labels."""
    rows = rows_of(file, 2)[:limit]
    return [sentence.lower().split() for sentence, _ in rows], torch.tensor([int(label) for _, label in rows])


def vocabulary(sentences: Sentences) -> dict[str, int]:
    """Ids of the words that occur more than once."""
    counts = Counter(word for words in sentences for word in words)
    return {word: i for i, (word, n) in enumerate(counts.most_common(), 2) if n > 1}


def encode(sentences: Sentences, ids: dict[str, int], length: int | None = None) -> Tensor:
    """Word ids (N, length); `length` None takes that of the longest sentence."""
    rows = [[ids.get(word, UNKNOWN) for word in words[: length or LONGEST]] for words in sentences]
    longest = length or max(1, *(len(row) for row in rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def load(args: argparse.Namespace) -> tuple[ck.Task, int]:
    """Batches of `train.tsv` and `dev.tsv` as a task, and the number of words."""
    train, val = (read(Path(args.data) / name, args.limit) for name in ("train.tsv", "dev.tsv"))
    ids = vocabulary(train[0])

    def batch(rows: list[tuple[list[str], Tensor]]) -> tuple[Tensor, Tensor]:
        return encode([words for words, _ in rows], ids), torch.stack([label for _, label in rows])

    sets: list[Any] = [list(zip(*part, strict=True)) for part in (train, val)]
    loader = partial(DataLoader, collate_fn=batch)
    return ck.Task(train=loader(sets[0], args.batch_size, shuffle=True), val=loader(sets[1], 64)), len(ids) + 2


def options(out: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of the recipes on sentences."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data/sst2", help="folder with train.tsv and dev.tsv")
    parser.add_argument("--out", default=out, help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of either network")
    parser.add_argument("--batch-size", type=int, default=64, help="sentences a step")
    parser.add_argument("--soft", type=float, default=0.9, help="weight of the soft targets; the labels get the rest")
    parser.add_argument("--limit", type=int, help="use only so many sentences of each file, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    return parser
