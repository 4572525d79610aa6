"""Pre-trained distillation of a compact transformer for sentences (Turc et al., 1908.08962), in three stages.

1. The compact model learns to fill in masked words of sentences without labels.
2. It imitates a larger model, which was trained on the labelled sentences, on all sentences; no label is read.
3. It is fine-tuned on the labelled sentences, and exported.

The script also fine-tunes the compact model without the first two stages, for comparison. The data: train.tsv and dev.tsv with
one sentence per line, a tab, and 0 or 1; `--labels` says how many labels are known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from text import PAD, UNKNOWN, Transformer, load, options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import compresskit as ck

MASKED = 0.15  # of the words
IGNORED = -100


class MaskedWords(nn.Module):
    """Word ids (N, L) to the scores of every word at each place, (N, words, L), by a model's own embeddings."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.bias = model, nn.Parameter(torch.zeros(model.words.num_embeddings))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.model.hidden(ids) @ self.model.words.weight.T + self.bias).transpose(1, 2)


def masked(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids of which some are hidden, and those that were; the other places do not count. "Unknown" stands for hidden."""
    ids, _ = batch
    hidden = (torch.rand(ids.shape) < MASKED) & (ids != PAD)
    return ids.masked_fill(hidden, UNKNOWN), ids.masked_fill(~hidden, IGNORED)


class Mapped:
    """A loader whose batches go through a function."""

    def __init__(self, loader: Any, function: Any) -> None:
        self.loader, self.function = loader, function

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return map(self.function, self.loader)


def without_labels(batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    return (batch[0],)


def main() -> None:
    parser = options("runs/pretrained_distillation", __doc__)
    parser.add_argument("--labels", type=int, default=1000, help="labelled sentences; the others have none")
    args = parser.parse_args()
    task, words = load(args)
    every: Any = task.train
    known = DataLoader(Subset(every.dataset, range(min(args.labels, len(every.dataset)))), args.batch_size, shuffle=True,
                       collate_fn=every.collate_fn)  # fmt: skip
    task = replace(task, train=known)
    how = partial(ck.Train, optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01), schedule=ck.lr.OneCycle(), clip=1.0)
    tune = how(epochs=args.epochs)

    torch.manual_seed(args.seed)
    teacher = tune(Transformer(words, width=192, layers=3), task)
    print(f"teacher: {ck.evaluate(teacher, task):.4f}")
    torch.manual_seed(args.seed)
    student = Transformer(words, width=64, layers=2)
    torch.manual_seed(args.seed)
    alone = tune(Transformer(words, width=64, layers=2), task)
    print(f"compact model, fine-tuned alone: {ck.evaluate(alone, task):.4f}")

    unlabelled = ck.Task(train=Mapped(every, masked), loss=partial(F.cross_entropy, ignore_index=IGNORED))
    how(epochs=args.epochs)(MaskedWords(student), unlabelled)  # stage 1
    imitation = ck.imitate(teacher, temperature=2.0, weight=1.0, task_weight=0.0)
    how(epochs=args.epochs, objective=imitation)(student, replace(task, train=Mapped(every, without_labels)))  # stage 2
    print(f"compact model after two stages: {ck.evaluate(student, task):.4f}")
    last = how(epochs=max(1, args.epochs // 2), optimizer=partial(torch.optim.AdamW, lr=2e-4))  # stage 3
    print(ck.Recipe(last, seed=args.seed, dynamic=(0, 1)).run(student, task, out=args.out))


if __name__ == "__main__":
    main()
