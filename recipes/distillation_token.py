"""Train a vision transformer with a distillation token under a convolutional teacher (DeiT, Touvron et al., 2012.12877).

The token has a head of its own, which learns the teacher's hard decisions; the class token's head learns the labels. Deployed,
the network gives the mean of both. Beside it, the same network is trained with the labels alone. The data is part of
scikit-learn.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from digits import data, resnet
from torch import Tensor, nn

import compresskit as ck
from compresskit import distill as kd


class DistilledViT(nn.Module):
    """(N, 1, 8, 8) to (N, 10): 16 patches, a class token and a distillation token."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.tokens, self.places = nn.Parameter(torch.zeros(1, 2, width)), nn.Parameter(0.02 * torch.randn(1, 18, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head, self.head_dist = nn.LayerNorm(width), nn.Linear(width, 10), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(x.shape[0], -1, -1), patches], 1) + self.places
        x = self.norm(self.encoder(x))
        labels, teacher = self.head(x[:, 0]), self.head_dist(x[:, 1])
        return labels if self.training else (labels + teacher) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/distillation_token", help="folder of the run; an interrupted run continues")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of the transformer; the teacher takes half of it")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the initial weights and every stage")
    args = parser.parse_args()

    task = data(args.seed, args.batch_size)
    adam = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.05)
    how = partial(ck.Train, optimizer=adam, schedule=ck.lr.OneCycle(), clip=1.0)
    torch.manual_seed(args.seed)
    teacher = how(epochs=max(1, args.epochs // 2))(resnet(16, 32), task)
    print(f"teacher: {ck.evaluate(teacher, task):.4f}")
    torch.manual_seed(args.seed)
    alone = how(epochs=args.epochs)(DistilledViT(), task)
    print(f"transformer with the labels alone: {ck.evaluate(alone, task):.4f}")

    torch.manual_seed(args.seed)
    last = [name for name, module in teacher.named_modules() if isinstance(module, nn.Linear)][-1]
    token = kd.Term(kd.losses.hard_targets, "head_dist", last, weight=0.5)
    objective = kd.imitate(teacher, terms=[token], weight=0, task_weight=0.5)
    print(ck.Recipe(how(epochs=args.epochs, objective=objective), seed=args.seed).run(DistilledViT(), task, out=args.out))


if __name__ == "__main__":
    main()
