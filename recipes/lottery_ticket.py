"""Find lottery tickets in a network for scikit-learn's handwritten digits, and compare them with random masks.

At every ratio three sparse networks are trained from the same initial weights, with the same number of steps: the ticket (train,
mask by magnitude, rewind to the initial weights, repeat), its control (as many weights in every layer, at random positions), and
a mask drawn at random over the whole network. Finding a ticket in `--rounds` rounds takes more steps; its last training, which
gives the figure, is as long as the others'.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from functools import partial

import torch
from digits import data
from torch import nn

import compresskit as ck
from compresskit.prune import masks_of, plan_mask, shuffled
from compresskit.prune.criteria import random_scores


def network() -> nn.Module:
    """Three convolutions and a linear layer without BatchNorm, as in the first paper (Frankle & Carbin, 1803.03635)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def compare(ratio: float, train: ck.Train, rounds: int, seed: int, batch_size: int) -> dict[str, float]:
    """Test accuracy of the dense network, the ticket and the two random masks."""
    task = data(seed, batch_size)
    torch.manual_seed(seed)
    start = network()

    def accuracy(model: nn.Module) -> float:
        return ck.evaluate(model, task)

    torch.manual_seed(seed)
    found = {"dense": accuracy(train(copy.deepcopy(start), task))}
    torch.manual_seed(seed)
    ticket = ck.LotteryTicket(budget=ck.remove(weights=ratio), rounds=rounds, train=train)(copy.deepcopy(start), task)
    found["ticket"] = accuracy(ticket)
    masks = masks_of(ticket)
    assert masks is not None
    for name, chosen in (
        ("shuffled", shuffled(masks)),
        ("random", plan_mask(start, ck.remove(weights=ratio), criterion=random_scores)),
    ):
        torch.manual_seed(seed)
        found[name] = accuracy(train(chosen.apply_(copy.deepcopy(start)), task))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.8, 0.95, 0.98], help="fractions of the weights that are removed"
    )
    parser.add_argument("--epochs", type=int, default=12, help="epochs of every training")
    parser.add_argument("--rounds", type=int, default=4, help="how often the ticket is trained, masked and rewound")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--seeds", type=int, default=3, help="runs; the table shows means")
    args = parser.parse_args()

    train = ck.Train(epochs=args.epochs, optimizer=partial(torch.optim.Adam, lr=3e-3), schedule=ck.lr.Cosine())
    print(f"test accuracy, mean of {args.seeds} seeds\n{'removed':>8}{'dense':>10}{'ticket':>10}{'shuffled':>10}{'random':>10}")
    for ratio in args.ratios:
        runs = [compare(ratio, train, args.rounds, seed, args.batch_size) for seed in range(args.seeds)]
        means = [statistics.mean(run[name] for run in runs) for name in ("dense", "ticket", "shuffled", "random")]
        print(f"{ratio:>8.0%}" + "".join(f"{mean:>10.4f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
