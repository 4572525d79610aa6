"""Pre-trained distillation of a compact transformer for sentences (Turc et al., 1908.08962), in three stages.

1. The compact model learns to fill in masked words of sentences without labels.
2. It imitates a larger model, which was trained on the labelled sentences, on all sentences; no label is read.
3. It is fine-tuned on the labelled sentences, and exported.

The script also fine-tunes the compact model without the first two stages, for comparison. The data: train.tsv and dev.tsv with
one sentence per line, a tab, and 0 or 1; `--labels` says how many labels are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from text import PAD, UNKNOWN, Transformer, load, options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import compresskit as ck

MASKED = 0.15  # of the words


@dataclass(frozen=True)
class MaskedWords(ck.Objective):
    """The cross entropy of words that are hidden from the model, scored by its own embeddings; "unknown" stands for hidden."""

    model: Transformer | None = None
    hidden: list[Tensor] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)

    def bind(self, model: nn.Module, task: ck.Task) -> MaskedWords:
        """Watch the last hidden states of the model."""
        assert isinstance(model, Transformer)
        bound = MaskedWords(model)
        bound.hooks.append(model.norm.register_forward_hook(lambda module, inputs, output: bound.hidden.append(output)))
        return bound

    def __call__(self, model: Callable[..., Any], batch: tuple[Tensor]) -> dict[str, Tensor]:
        """Hide words of a batch, and compare the scores at their places with them."""
        assert self.model is not None
        (ids,) = batch
        chosen = (torch.rand(ids.shape) < MASKED) & (ids != PAD)
        model(ids.masked_fill(chosen, UNKNOWN))
        scores = self.hidden.pop()[chosen] @ self.model.words.weight.T
        return {"masked words": F.cross_entropy(scores, ids[chosen])}

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()


class WithoutLabels:
    """The inputs of a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return ((ids,) for ids, _ in self.loader)


def main() -> None:
    parser = options("runs/pretrained_distillation", __doc__)
    parser.add_argument("--pretrain", type=int, default=8, help="epochs of masked words")
    parser.add_argument("--imitate", type=int, default=8, help="epochs of imitation")
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

    unlabelled = ck.Task(train=WithoutLabels(every))
    recipe = ck.Recipe(
        how(epochs=args.pretrain, objective=MaskedWords()),
        how(epochs=args.imitate, objective=ck.imitate(teacher, temperature=2.0, weight=1.0, task_weight=0.0)),
        how(epochs=max(1, args.epochs // 2), optimizer=partial(torch.optim.AdamW, lr=2e-4)),
        seed=args.seed,
        dynamic=(0, 1),
    )
    print(recipe.run(student, task, out=args.out, tasks=(unlabelled, unlabelled, None)))


if __name__ == "__main__":
    main()
