"""What two ranks (gloo) do in `test_masks_in_chains.py`: each plans masks by its own data and trains under DDP."""

from __future__ import annotations

import networks
import torch
import torch.distributed as dist

import compresskit as ck
from compresskit.graph.masks import enforce_masks_
from compresskit.prune import masks_of, plan_mask
from compresskit.prune.criteria import random_scores, snip


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = networks.Residual()
    torch.manual_seed(rank)  # other data, other random numbers
    task = networks.images_task(ck, samples=32)
    for name, criterion in (("random", random_scores), ("snip", snip)):
        masks = plan_mask(model, ck.remove(weights=0.7), criterion=criterion, task=task).masks
        torch.save(dict(masks), f"{folder}/{name}{rank}")
    plan_mask(model, ck.remove(weights=0.9), criterion=snip, task=task).apply_(model)
    run = ck.mixed.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), ck.mixed.MASTER_BF16)
    release = enforce_masks_(model, run)
    run.model = torch.nn.parallel.DistributedDataParallel(run.model)
    for x, y in task.train:
        run.backward(task.loss(run(x), y))
        run.step()
    release()
    run.finish()
    torch.save((model.state_dict(), masks_of(model).masks, masks_of(model).violations(model)), f"{folder}/model{rank}")
    dist.destroy_process_group()
