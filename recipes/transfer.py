"""Give a torchvision network another head for an image folder, train it in two steps, and quantize it, with training if need be.

First the head alone learns, with the rest frozen, BatchNorm statistics included; then all of it. Static quantization follows;
where it loses more than `--tolerance` of the accuracy, quantization-aware training follows from the float network. The folder
has train/CLASS/* and val/CLASS/* (or test/CLASS/*).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch import nn
from vision import Images, image_folder

import compresskit as ck

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def frozen_but_head(model: nn.Module, classes: int) -> nn.Module:
    """The network with a new last layer, the only one that learns."""
    model.requires_grad_(False)
    name, last = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    model.set_submodule(name, nn.Linear(last.in_features, classes))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # stays in eval mode through the training
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="data", help="image folder with train/ and val/ (or test/)")
    parser.add_argument("--out", default="runs/transfer", help="folder of the runs; an interrupted run continues")
    parser.add_argument("--model", default="resnet18", help="name of a torchvision classifier")
    parser.add_argument(
        "--weights", default="DEFAULT", help="torchvision's name, which is downloaded, a safetensors file, or none"
    )
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each of the two steps; QAT takes half of it")
    parser.add_argument("--tolerance", type=float, default=0.01, help="accuracy that static quantization may lose")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the new head and every stage")
    args = parser.parse_args()

    data = image_folder(args.data, args.size, args.limit)
    train = Images(*data["train"], args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], args.batch_size, MEAN, STD))
    torch.manual_seed(args.seed)
    is_file = Path(args.weights).is_file()
    model = torchvision.models.get_model(args.model, weights=None if is_file or args.weights == "none" else args.weights)
    if is_file:
        model.load_state_dict(load_file(args.weights))
    model = frozen_but_head(model, int(max(labels.max() for _, labels in data.values())) + 1)

    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)
    ck.Train(epochs=args.epochs, optimizer=partial(sgd, lr=0.05))(model, task)
    print(f"new head: {ck.evaluate(model, task):.4f}")
    model.requires_grad_(True)
    tune = ck.Train(epochs=args.epochs, optimizer=partial(sgd, lr=0.005), schedule=ck.lr.OneCycle())
    result = ck.Recipe(tune, ck.StaticQuant(), seed=args.seed).run(model, task, out=Path(args.out) / "static")
    print(result)
    floating, static = (row.metric for row in result.rows)
    if floating - static <= args.tolerance:
        return
    print(f"static quantization loses {floating - static:.4f}: quantization-aware training follows")
    again = ck.QAT(epochs=max(1, args.epochs // 2), optimizer=partial(sgd, lr=0.001), objective=ck.imitate())
    print(ck.Recipe(tune, again, seed=args.seed).run(model, task, out=Path(args.out) / "qat"))


if __name__ == "__main__":
    main()
