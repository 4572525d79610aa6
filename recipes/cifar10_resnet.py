"""Train (or load) a ResNet-20 for CIFAR-10, prune half of its MACs, quantize it to int8, and export a verified ONNX file.

The dense float network is the teacher in fine-tuning and in quantization-aware training.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from safetensors.torch import load_file
from vision import CifarResNet, Images, cifar10

import compresskit as ck

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--data", default="data", help="torchvision's CIFAR-10 (downloaded where missing), or train/ and test/ folders"
    )
    parser.add_argument("--out", default="runs/cifar10", help="folder of the run; an interrupted run continues")
    parser.add_argument(
        "--from", dest="start", metavar="CHECKPOINT", help="safetensors file of a trained network; skips training"
    )
    parser.add_argument("--depth", type=int, default=20, choices=(8, 20, 32, 44, 56), help="layers of the network")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of the first training; fine-tuning takes a third of it")
    parser.add_argument("--macs", type=float, default=0.5, help="fraction of the multiply-accumulates that stays")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    args = parser.parse_args()

    data = cifar10(args.data, args.limit)
    train = Images(*data["train"], args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, MEAN, STD))

    torch.manual_seed(args.seed)
    model = CifarResNet(args.depth)
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, nesterov=True)
    later = max(1, args.epochs // 3)
    tune = ck.Train(epochs=later, optimizer=partial(sgd, lr=0.05), schedule=ck.lr.OneCycle(), precision=ck.mixed.AMP_BF16,
                    objective=ck.imitate())  # fmt: skip
    stages: list[ck.Stage] = [
        ck.Prune(budget=ck.keep(macs=args.macs), criterion=ck.prune.criteria.taylor, finetune=tune),
        ck.QAT(epochs=max(1, later // 3), optimizer=partial(sgd, lr=0.002), objective=ck.imitate()),
    ]
    if args.start:
        model.load_state_dict(load_file(args.start))
    else:
        first = ck.Train(
            epochs=args.epochs, optimizer=partial(sgd, lr=0.2), schedule=ck.lr.OneCycle(), precision=ck.mixed.AMP_BF16
        )
        stages.insert(0, first)
    print(ck.Recipe(*stages, seed=args.seed).run(model, task, out=args.out))


if __name__ == "__main__":
    main()
