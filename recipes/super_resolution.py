"""Train a small super-resolution network, quantize it without labels, and export a verified int8 ONNX file.

The network enlarges pictures by two (FSRCNN, Dong et al., 1608.00367, narrower). Pictures are drawn here, so that nothing is
downloaded, or cropped from a folder; their bicubic reductions are the inputs. The metric is the PSNR in dB.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vision import pictures

import compresskit as ck


class SuperResolution(nn.Module):
    """(N, 3, H, W) in 0..1 -> (N, 3, 2 H, 2 W): a wide layer, a narrow middle, and a transposed convolution that enlarges."""

    def __init__(self, width: int = 32, middle: int = 12) -> None:
        super().__init__()
        self.extract = nn.Sequential(nn.Conv2d(3, width, 5, padding=2), nn.PReLU(width))
        self.shrink = nn.Sequential(nn.Conv2d(width, middle, 1), nn.PReLU(middle))
        self.map = nn.Sequential(*(nn.Conv2d(middle, middle, 3, padding=1) for _ in range(2)), nn.PReLU(middle))
        self.expand = nn.Sequential(nn.Conv2d(middle, width, 1), nn.PReLU(width))
        self.enlarge = nn.ConvTranspose2d(width, 3, 9, 2, 4, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.enlarge(self.expand(self.map(self.shrink(self.extract(x)))))


def data(folder: str | None, count: int, batch_size: int, seed: int) -> ck.Task:
    """`count` pictures for training and a quarter as many for testing, which no training or calibration sees."""
    large = pictures(count + count // 4, 48, seed, folder)
    small = F.interpolate(large, scale_factor=0.5, mode="bicubic", antialias=True).clamp(0, 1)
    train, val = (TensorDataset(small[part], large[part]) for part in (slice(None, count), slice(count, None)))
    return ck.Task(
        train=DataLoader(train, batch_size, shuffle=True),
        val=DataLoader(val, batch_size),
        loss=F.mse_loss,
        metric=ck.metrics.agreement("psnr"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="folder of pictures; drawn ones where it is not given")
    parser.add_argument(
        "--from", dest="start", metavar="CHECKPOINT", help="safetensors file of a trained network; skips training"
    )
    parser.add_argument("--out", default="runs/super_resolution", help="folder of the run; an interrupted run continues")
    parser.add_argument("--pictures", type=int, default=512, help="how many to train on")
    parser.add_argument("--epochs", type=int, default=20, help="of the training")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures a step")
    parser.add_argument("--effort", default="balanced", choices=("fast", "balanced", "best"), help="of the quantization")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures, the initial weights and every stage")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    network = SuperResolution()
    stages: list[ck.Stage] = [ck.StaticQuant(effort=args.effort, samples=128)]
    if args.start:
        network.load_state_dict(load_file(args.start))
    else:
        adam = partial(torch.optim.Adam, lr=2e-3)
        stages.insert(0, ck.Train(epochs=args.epochs, optimizer=adam, schedule=ck.lr.OneCycle()))
    task = data(args.data, args.pictures, args.batch_size, args.seed)
    print(ck.Recipe(*stages, seed=args.seed).run(network, task, out=args.out))


if __name__ == "__main__":
    main()
