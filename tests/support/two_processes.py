"""What two processes do in `test_processes.py`; started by torchrun: `two.py CASE OUT [STOP]`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from quick import make_quick
from safetensors.torch import save_file
from torch import nn

import compresskit as ck
from compresskit import mixed, prune
from compresskit.base import distributed

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """A shortcut and BatchNorm; no dropout, whose numbers differ between one process and two."""

    def __init__(self, width=16):
        super().__init__()
        self.stem, self.n1 = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.inner, self.n2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.relu(self.n1(self.stem(x)))
        return self.head((torch.relu(self.n2(self.inner(x)) + x)).mean((2, 3)))


def task(batch=15):
    """61 samples: batches of 15 and a last one of 1, so that no two processes ever have as many rows."""
    fixed = torch.Generator().manual_seed(5)
    labels = torch.arange(61) % 4
    images = torch.randn(61, 1, 8, 8, generator=fixed) + labels.view(-1, 1, 1, 1)
    data = torch.utils.data.TensorDataset(images, labels)
    return ck.Task(train=torch.utils.data.DataLoader(data, batch, shuffle=True), val=torch.utils.data.DataLoader(data, 17))


def stages(name):
    train = partial(ck.Train, epochs=2, optimizer=sgd, exact=True)
    return {
        "train": [train()],
        "half": [train(precision=mixed.MASTER_BF16, clip=1.0, accumulate=2)],
        "fp16": [train(precision=mixed.MASTER_FP16)],
        "prune": [train(), ck.Prune(budget=ck.keep(macs=0.6), criterion=prune.criteria.taylor, round_to=2,
                                    finetune=train(objective=ck.imitate()))],
        "sparse": [train(), ck.Sparsify(budget=ck.remove(weights=0.6), schedule=prune.schedules.Cubic(), updates=4, regrow=0.2,
                                        criterion=prune.criteria.taylor, finetune=train())],
        "qat": [train(), ck.QAT(epochs=1, optimizer=sgd, samples=61, learned=True, exact=True)],
        "observed": [train(), ck.QAT(epochs=1, optimizer=sgd, samples=61, exact=True)],
    }[name]  # fmt: skip


def sharded(number, out):
    """`fit_` on a model that FSDP2 shards, and on one that is whole; on labels, and taught."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    with distributed.process_group("cpu"):
        for kind, taught in itertools.product(("whole", "shards"), (False, True)):
            torch.manual_seed(0)
            teacher, model = Net().eval(), Net()
            if kind == "shards":
                fully_shard(model, mp_policy=mixed.fsdp_policy(mixed.FP32))
            objective = ck.imitate(teacher) if taught else None
            ck.fit_(model, task(), ck.Train(epochs=2, optimizer=sgd, clip=1.0), objective=objective)
            for name, value in model.state_dict().items():
                full = getattr(value, "full_tensor", lambda value=value: value)()
                found[f"{kind} {'taught ' * taught}{name}"] = full.float().contiguous()
    save_file(found, Path(out) / f"{number}.safetensors")


def main(name, out, stop=None):
    torch.set_num_threads(1)
    number = int(os.environ.get("RANK", "0"))
    if name == "sharded":
        sharded(number, out)
        return
    if stop is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        real, steps = mixed.Run.step, [0]

        def step(self, closure=None):
            steps[0] += 1
            if steps[0] == int(stop) and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, closure)

        mixed.Run.step = step
    torch.manual_seed(number)  # processes need not agree: process 0's model is everybody's
    make_quick()
    model = Net()
    recipe = ck.Recipe(*stages(name), save=ck.Every(seconds=None, steps=3), export="last")
    made = recipe.run(model, task(), Path(out) / "run").model
    state = {name: value.float().contiguous() for name, value in made.state_dict().items()}
    masks = ck.graph.masks.masks_of(made)
    state |= {} if masks is None else {f"mask {name}": mask.float() for name, mask in masks.masks.items()}
    save_file(state, Path(out) / f"{number}.safetensors")
    assert distributed.world_size() == 1  # no process group is left behind


if __name__ == "__main__":
    main(*sys.argv[1:])
