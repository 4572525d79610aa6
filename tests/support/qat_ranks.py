"""What two ranks (gloo) do in `test_qat.py`: each leaves what it found in a folder, for the test to compare."""

from __future__ import annotations

from pathlib import Path

import networks
import torch
import torch.distributed as dist
from networks import build, image
from safetensors.torch import save_file
from torch import nn

from compresskit.quant import prepare_qat
from compresskit.quant.numerics.observers import OBSERVERS


def observed(rank: int) -> dict[str, torch.Tensor]:
    """Every observer over a different half of the values on each rank."""
    torch.manual_seed(1)
    values = torch.randn(2, 2, 4, 500) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)  # (rank, channels, batches, values)
    found = {}
    for kind in OBSERVERS:
        observer = kind()
        for i in range(4):
            observer.update(values[rank, :, i])
        found[kind.__name__] = torch.stack(observer.range())
    return found


def trained(rank: int) -> dict[str, torch.Tensor]:
    """Three steps of QAT under DistributedDataParallel, on different data."""
    torch.manual_seed(0)
    model = build(networks.Residual)
    torch.manual_seed(rank)
    quantized = prepare_qat(model, [image(16)])
    wrapped = nn.parallel.DistributedDataParallel(quantized)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(3):
        if step == 2:
            quantized.freeze_statistics_()
        optimizer.zero_grad()
        wrapped(*image(16)).square().mean().backward()
        optimizer.step()
    quantized.convert_()
    return {name: value.clone() for name, value in quantized.state_dict().items()}


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    save_file(observed(rank), Path(folder) / f"observed{rank}.safetensors")
    save_file(trained(rank), Path(folder) / f"trained{rank}.safetensors")
    dist.destroy_process_group()
