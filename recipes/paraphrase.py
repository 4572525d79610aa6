"""Train a transformer to tell whether two sentences say the same, and quantize it dynamically; the metric is the F1 of "yes".

The task has the shape of MRPC, on which the articles measure a BERT. With `--data`: train.tsv and dev.tsv with two sentences and
0 or 1 a line, separated by tabs. Without it pairs are made of a small grammar: a paraphrase has other words of the same
meaning, in another order; the other pairs differ by one meaning, and have as many words in common.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from text import Transformer, encode, rows_of, vocabulary
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck

LENGTH = 24  # words; longer sentences are cut
#: Words of one meaning stand together.
WHO = (("child", "kid"), ("doctor", "physician"), ("teacher", "instructor"), ("thief", "robber"), ("boss", "chief"))
DID = (("bought", "purchased"), ("repaired", "fixed"), ("started", "began"), ("finished", "completed"), ("hid", "concealed"))
HOW = (("big", "large"), ("quick", "fast"), ("old", "ancient"), ("strange", "odd"), ("shiny", "glossy"))
WHAT = (("car", "automobile"), ("house", "home"), ("picture", "image"), ("stone", "rock"), ("present", "gift"))
WHEN = (("today", "this day"), ("often", "frequently"), ("soon", "shortly"), ("now", "presently"))
KINDS = (WHO, DID, HOW, WHAT, WHEN)


class Pairs(nn.Module):
    """Word ids of two sentences, (N, L) each, 0 for padding, to (N, 2): one transformer reads both, a layer compares them."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.reader = Transformer(words, width, layers, drop=0.1)
        self.reader.head = nn.Sequential()  # nothing: the mean of the hidden states
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        u, v = self.reader(one), self.reader(other)
        return self.head(torch.cat([(u - v).abs(), u * v], 1))


def f1(scores: Tensor, labels: Tensor) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where nothing of it was found."""
    found = scores.argmax(1) == 1
    right = (found & (labels == 1)).sum().item()
    return 2 * right / max(1, (found.sum() + (labels == 1).sum()).item())


def made(count: int, seed: int) -> list[list[str]]:
    """Rows of two sentences and a label, two thirds of them paraphrases as in MRPC."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    rows = []
    for _ in range(count):
        first = [(kind[draw(len(kind))], draw(2)) for kind in KINDS]
        # Each word of a paraphrase is the other one of its meaning or the same, by a coin.
        second = [(meaning, draw(2)) for meaning, _ in first]
        if not (same := draw(3) > 0):
            place = draw(len(KINDS))
            others = [meaning for meaning in KINDS[place] if meaning != first[place][0]]
            second[place] = (others[draw(len(others))], draw(2))
        sentences = []
        for pairs in (first, second):
            who, did, how, what, when = (meaning[word] for meaning, word in pairs)
            active, passive = f"the {who} {did} the {how} {what} {when}", f"{when} the {how} {what} was {did} by the {who}"
            sentences.append((active, passive)[draw(2)])
        rows.append([*sentences, str(int(same))])
    return rows


def load(args: argparse.Namespace) -> tuple[ck.Task, int]:
    """The pairs as a task, and the number of words."""
    if args.data is None:
        rows = {"train": made(args.pairs, args.seed), "dev": made(1000, args.seed + 10_000)}
    else:
        rows = {split: rows_of(Path(args.data) / f"{split}.tsv", 3) for split in ("train", "dev")}
    ids = vocabulary([sentence.lower().split() for row in rows["train"] for sentence in row[:2]])
    sets = {}
    for split, part in rows.items():
        one, other = (encode([row[i].lower().split() for row in part], ids, LENGTH) for i in range(2))
        sets[split] = TensorDataset(one, other, torch.tensor([int(row[2]) for row in part]))
    return ck.Task(train=DataLoader(sets["train"], args.batch_size, shuffle=True), val=DataLoader(sets["dev"], 100), metric=f1,
                   higher_is_better=True), len(ids) + 2  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="folder with train.tsv and dev.tsv; made pairs where it is not given")
    parser.add_argument("--out", default="runs/paraphrase", help="folder of the run; an interrupted run continues")
    parser.add_argument("--pairs", type=int, default=3000, help="made pairs to train on")
    parser.add_argument("--epochs", type=int, default=3, help="of the training")
    parser.add_argument("--width", type=int, default=128, help="of the transformer")
    parser.add_argument("--layers", type=int, default=2, help="of the transformer")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs a step")
    parser.add_argument("--seed", type=int, default=0, help="of the made pairs, the initial weights and every stage")
    args = parser.parse_args()
    task, words = load(args)
    torch.manual_seed(args.seed)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01), schedule=ck.lr.OneCycle(),
                 clip=1.0, precision=ck.mixed.AMP_BF16),
        ck.DynamicQuant(),
        seed=args.seed,
    )  # fmt: skip
    print(recipe.run(Pairs(words, args.width, args.layers), task, out=args.out))


if __name__ == "__main__":
    main()
