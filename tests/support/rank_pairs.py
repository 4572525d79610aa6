"""Two processes on this machine, each of which runs the same cases on its rank."""

from __future__ import annotations

import warnings

import checkout
import torch
import torch.distributed as dist


def start(main, folder) -> None:
    """Run `main(rank, folder)` on each of two ranks; a mistake shows here with its process's traceback."""
    checkout.forkserver()
    torch.multiprocessing.start_processes(main, args=(str(folder),), nprocs=2, start_method="forkserver")


def both(main, folder):
    """What `main(rank, folder)` left on each of two ranks."""
    start(main, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def run_cases(cases, argument, rank, folder) -> None:
    """All cases on one rank, one after the other, each called with `argument`; results to a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for case in cases:
        dist.barrier()
        results[case.__name__] = case(argument)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
