"""Distil a small transformer for the sentiment of sentences (SST-2) into a bidirectional LSTM, and export a verified ONNX file.

The data: train.tsv and dev.tsv with one sentence per line, a tab, and 0 or 1. The vocabulary is built from the training
sentences.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from text import PAD, BiLSTM, encode, options, read, vocabulary
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck

LENGTH = 48  # words; longer sentences are cut


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


def main() -> None:
    args = options("runs/sst2", __doc__).parse_args()
    train, val = (read(Path(args.data) / name, args.limit) for name in ("train.tsv", "dev.tsv"))
    ids = vocabulary(train[0])
    sets = [TensorDataset(encode(sentences, ids, LENGTH), labels) for sentences, labels in (train, val)]
    task = ck.Task(train=DataLoader(sets[0], args.batch_size, shuffle=True), val=DataLoader(sets[1], 256))

    torch.manual_seed(args.seed)
    words = len(ids) + 2
    adam = partial(torch.optim.AdamW, weight_decay=0.01)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=partial(adam, lr=5e-4), schedule=ck.lr.OneCycle(), clip=1.0),
        ck.Distill(student=partial(BiLSTM, words), epochs=args.epochs, optimizer=partial(adam, lr=2e-3),
                   schedule=ck.lr.OneCycle(), clip=1.0, temperature=2.0, weight=args.soft, task_weight=1 - args.soft),
        seed=args.seed,
    )  # fmt: skip
    print(recipe.run(Transformer(words), task, out=args.out))


if __name__ == "__main__":
    main()
