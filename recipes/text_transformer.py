"""Train a transformer for the sentiment of sentences (SST-2) in bf16, distil it into a smaller one, quantize that dynamically.

The data: train.tsv and dev.tsv with one sentence per line, a tab, and 0 or 1. The vocabulary is built from the training
sentences. The ONNX files take any batch size and length.
"""

from __future__ import annotations

from functools import partial

import torch
from text import Transformer, load, options

import compresskit as ck


def main() -> None:
    args = options("runs/text_transformer", __doc__).parse_args()
    task, words = load(args)
    torch.manual_seed(args.seed)
    adam = partial(torch.optim.AdamW, weight_decay=0.01)
    recipe = ck.Recipe(
        ck.Train(epochs=args.epochs, optimizer=partial(adam, lr=5e-4), schedule=ck.lr.OneCycle(), clip=1.0,
                 precision=ck.mixed.AMP_BF16),
        ck.Distill(student=partial(Transformer, words, width=128, layers=2), epochs=args.epochs, optimizer=partial(adam, lr=1e-3),
                   schedule=ck.lr.OneCycle(), clip=1.0, temperature=2.0, weight=args.soft, task_weight=1 - args.soft),
        ck.DynamicQuant(dynamic=(0, 1)),
        seed=args.seed,
        dynamic=(0, 1),
    )  # fmt: skip
    print(recipe.run(Transformer(words, width=192, layers=3), task, out=args.out))


if __name__ == "__main__":
    main()
