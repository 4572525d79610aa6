"""Distil a ResNet-56 into a ResNet-20 on CIFAR-10, with the loss terms that are named on the command line.

Soft targets are always used; `--terms dkd`, `--terms at rkd`, ... add losses to them, with the weights of their papers.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from safetensors.torch import load_file
from vision import CifarResNet, Images, cifar10

import compresskit as ck
from compresskit import distill as kd

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
POOLED = "linear:in"  # the input of the last layer: (N, 64)
TERMS = {
    "dkd": [kd.Term(partial(kd.losses.dkd, beta=2.0), weight=kd.linear_warmup)],
    "standardized": [kd.Term(kd.losses.standardized_soft_targets, weight=9.0)],
    "dist": [kd.Term(partial(kd.losses.dist, beta=2.0, gamma=2.0))],
    "hint": [kd.Term(kd.losses.hint, "layer2", weight=10.0, adapt=kd.project)],
    "at": [kd.Term(kd.losses.attention_transfer, "layer?", weight=1000.0)],
    "similarity": [kd.Term(kd.losses.similarity_preserving, "layer3", weight=3000.0)],
    "rkd": [kd.Term(kd.losses.rkd_distance, POOLED, weight=25.0), kd.Term(kd.losses.rkd_angle, POOLED, weight=50.0)],
    "pkt": [kd.Term(kd.losses.pkt, POOLED, weight=3e4)],
    "cc": [kd.Term(kd.losses.correlation_congruence, POOLED, weight=0.02)],
    "nce": [kd.Term(kd.losses.info_nce, POOLED, weight=0.8, adapt=kd.project)],
    "review": [kd.Term(kd.losses.reviewkd, ("layer1", "layer2", "layer3"), weight=kd.linear_warmup, adapt=kd.losses.abf)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--data", default="data", help="torchvision's CIFAR-10 (downloaded where missing), or train/ and test/ folders"
    )
    parser.add_argument("--out", default="runs/cifar10-distill", help="folder of the run; an interrupted run continues")
    parser.add_argument(
        "--teacher", metavar="CHECKPOINT", help="safetensors file of a trained teacher; without it one is trained first"
    )
    parser.add_argument("--terms", nargs="*", choices=sorted(TERMS), default=[], help="losses besides the soft targets")
    parser.add_argument("--soft", type=float, default=0.9, help="weight of the soft targets; 0 uses the other terms only")
    parser.add_argument("--task", type=float, default=0.1, help="weight of the labels")
    parser.add_argument("--depth", type=int, default=20, choices=(8, 14, 20, 32, 44), help="layers of the student")
    parser.add_argument("--teacher-depth", type=int, default=56, choices=(8, 20, 32, 44, 56), help="layers of the teacher")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of either network")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--limit", type=int, help="use only so many images of each split, to try things out")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and every stage")
    args = parser.parse_args()

    data = cifar10(args.data, args.limit)
    train = Images(*data["train"], args.batch_size, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, MEAN, STD))

    torch.manual_seed(args.seed)
    teacher = CifarResNet(args.teacher_depth)
    settings = {
        "epochs": args.epochs,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
        "schedule": ck.lr.OneCycle(),
        "precision": ck.mixed.AMP_BF16,
    }
    terms = [term for name in args.terms for term in TERMS[name]]
    student = partial(CifarResNet, args.depth)
    stages: list[ck.Stage] = [ck.Distill(student=student, terms=terms, weight=args.soft, task_weight=args.task, **settings)]
    if args.teacher:
        teacher.load_state_dict(load_file(args.teacher))
    else:
        stages.insert(0, ck.Train(**settings))
    print(ck.Recipe(*stages, seed=args.seed).run(teacher, task, out=args.out))


if __name__ == "__main__":
    main()
