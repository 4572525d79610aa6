"""Train a word-level LSTM language model in mixed precision, and quantize it dynamically.

The data: train.tsv and dev.tsv with one sentence per line and a tab before its label, which is not read. The metric is
perplexity. Time, loss scale and skipped steps of the training are in the report of the run.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from text import PAD, encode, read, vocabulary
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck

LENGTH = 24  # words; longer sentences are cut
POLICIES = {policy.name: policy for policy in (ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16, ck.mixed.MASTER_FP16)}


class WordModel(nn.Module):
    """Word ids (N, L) to the scores of the next word at each place, (N, words, L)."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(words, width, padding_idx=PAD), nn.Dropout(0.3)
        self.lstm, self.head = nn.LSTM(width, width, layers, batch_first=True), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.words(ids)))
        return self.head(self.drop(x)).transpose(1, 2)


loss = partial(F.cross_entropy, ignore_index=PAD)


def perplexity(scores: Tensor, target: Tensor) -> float:
    """Return exp of the mean cross-entropy of the words; padding does not count."""
    return loss(scores, target).exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data/sst2", help="folder with train.tsv and dev.tsv")
    parser.add_argument("--out", default="runs/word_lm", help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the training")
    parser.add_argument("--width", type=int, default=128, help="of embeddings and hidden states")
    parser.add_argument("--layers", type=int, default=1, help="of the LSTM")
    parser.add_argument("--precision", default="FP32", choices=sorted(POLICIES), help="of the training")
    parser.add_argument("--batch-size", type=int, default=32, help="sentences a step")
    parser.add_argument("--limit", type=int, help="use only so many sentences of each file, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    args = parser.parse_args()

    sentences = {split: read(Path(args.data) / f"{split}.tsv", args.limit)[0] for split in ("train", "dev")}
    ids = vocabulary(sentences["train"])
    coded = {split: encode(part, ids, LENGTH + 1) for split, part in sentences.items()}
    sets: dict[str, Any] = {split: TensorDataset(part[:, :-1], part[:, 1:]) for split, part in coded.items()}
    task = ck.Task(
        train=DataLoader(sets["train"], args.batch_size, shuffle=True), val=DataLoader(sets["dev"], 64), loss=loss,
        metric=perplexity, higher_is_better=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=partial(torch.optim.AdamW, lr=4e-3), schedule=ck.lr.OneCycle(), clip=1.0,
                 precision=POLICIES[args.precision]),
        ck.DynamicQuant(),
        seed=args.seed,
    )  # fmt: skip
    print(recipe.run(WordModel(len(ids) + 2, args.width, args.layers), task, out=args.out))


if __name__ == "__main__":
    main()
