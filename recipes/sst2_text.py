"""Distil a small transformer that judges sentences (SST-2) into a bidirectional LSTM, and hand over a verified ONNX file.

The data: train.tsv and dev.tsv with a sentence, a tab and 0 or 1 a line. The vocabulary is built from the training sentences.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck

LENGTH = 48  # words; longer sentences are cut
PAD, UNKNOWN = 0, 1


class Transformer(nn.Module):
    """Word ids (N, LENGTH), 0 for padding, to (N, 2)."""

    def __init__(self, words: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=PAD), nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.3, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.3), nn.Linear(width, 2))

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids != PAD).unsqueeze(2).float()
        x = self.encoder(self.words(ids) + self.places, src_key_padding_mask=ids == PAD)
        return self.head((x * real).sum(1) / real.sum(1).clamp(min=1))


class BiLSTM(nn.Module):
    """The same, smaller."""

    def __init__(self, words: int, width: int = 48, hidden: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.words(ids)))
        x = x.masked_fill((ids == PAD).unsqueeze(2), -1.0)  # below anything that an LSTM says
        return self.head(self.drop(x.amax(1)))


def read(file: Path, limit: int | None) -> tuple[list[list[str]], Tensor]:
    """Words of each sentence, and the labels."""
    rows = [line.rsplit("\t", 1) for line in file.read_text().splitlines()][:limit]
    return [sentence.lower().split() for sentence, _ in rows], torch.tensor([int(label) for _, label in rows])


def encode(sentences: list[list[str]], vocabulary: dict[str, int]) -> Tensor:
    """Ids (N, LENGTH)."""
    rows = [[vocabulary.get(word, UNKNOWN) for word in words[:LENGTH]] for words in sentences]
    return torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data/sst2", help="folder with train.tsv and dev.tsv")
    parser.add_argument("--out", default="runs/sst2", help="folder of the run; an interrupted run goes on where it was")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of either network")
    parser.add_argument("--batch-size", type=int, default=64, help="sentences a step")
    parser.add_argument("--soft", type=float, default=0.9, help="weight of the soft targets; the labels have the rest")
    parser.add_argument("--limit", type=int, help="use only so many sentences of each file, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    args = parser.parse_args()

    train, val = (read(Path(args.data) / name, args.limit) for name in ("train.tsv", "dev.tsv"))
    counts = Counter(word for words in train[0] for word in words)
    vocabulary = {word: i for i, (word, n) in enumerate(counts.most_common(), 2) if n > 1}
    sets = [TensorDataset(encode(sentences, vocabulary), labels) for sentences, labels in (train, val)]
    task = ck.Task(train=DataLoader(sets[0], args.batch_size, shuffle=True), val=DataLoader(sets[1], 256))

    torch.manual_seed(args.seed)
    words = len(vocabulary) + 2
    adam = partial(torch.optim.AdamW, weight_decay=0.01)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=partial(adam, lr=5e-4), schedule=ck.one_cycle, clip=1.0),
        ck.Distill(student=partial(BiLSTM, words), epochs=args.epochs, optimizer=partial(adam, lr=2e-3), schedule=ck.one_cycle,
                   clip=1.0, temperature=2.0, weight=args.soft, task_weight=1 - args.soft),
        seed=args.seed,
    )  # fmt: skip
    print(recipe.run(Transformer(words), task, out=args.out))


if __name__ == "__main__":
    main()
