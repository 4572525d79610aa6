"""Remove 90 % of the weights of a network for scikit-learn's digits, keep them at zero through every stage, and export int8.

Train, remove weights on a schedule, fine-tune with the dense network as teacher, quantize, export. Every stage keeps the zeros,
and the int8 file has exactly these. `--dense-sparse-dense` shows another use of masks instead: sparse for some epochs, then dense
again (Han et al., 1607.04381), which improves training and does not compress.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from digits import data, resnet

import compresskit as ck
from compresskit.prune import schedules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/sparse_digits", help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the first training; later stages take a fraction of it")
    parser.add_argument("--ratio", type=float, default=0.9, help="fraction of the weights that is removed")
    parser.add_argument("--dense-sparse-dense", action="store_true", help="remove the masks again and train on")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the initial weights and every stage")
    args = parser.parse_args()

    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    first = ck.Train(epochs=args.epochs, optimizer=sgd, schedule=ck.lr.OneCycle())
    later = ck.Train(epochs=max(1, args.epochs // 2), optimizer=sgd, schedule=ck.lr.OneCycle())
    stages: list[ck.Stage]
    if args.dense_sparse_dense:
        low = ck.Train(epochs=max(1, args.epochs // 2), optimizer=partial(sgd, lr=0.005))
        stages = [first, ck.Sparsify(budget=ck.remove(weights=args.ratio), finetune=later), ck.Densify(), low]
    else:
        stages = [
            first,
            ck.Sparsify(budget=ck.remove(weights=args.ratio), schedule=schedules.Cubic(), finetune=later),
            ck.Distill(epochs=max(1, args.epochs // 4), optimizer=partial(sgd, lr=0.01)),
            ck.QAT(epochs=max(1, args.epochs // 8)),
        ]
    torch.manual_seed(args.seed)
    result = ck.Recipe(*stages, seed=args.seed).run(resnet(32, 64, 128), data(args.seed, args.batch_size), out=args.out)
    print(result)
    masks = ck.prune.masks_of(result.model)
    print(f"zeros held by masks: {0 if masks is None else masks.removed}")


if __name__ == "__main__":
    main()
