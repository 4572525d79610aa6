"""How fast the float file of FSRCNN x2 can be in ONNX Runtime: each part in all forms that the runtime has fast kernels for.

    python benchmarks/float_forms.py --data FOLDER

FOLDER: networks.py with `load(name)` and photographs, as for real_networks.py. Every form of a part computes the same (checked);
one photograph, 128x128, one thread, all forms of all parts in turn with torch's own export of the whole network. Milliseconds
are those of the kernels, from the runtime's profile. They are without conversions between memory layouts, which another
neighbour might save, and for bands without cutting the image and adding the results up. So the sum of the fastest is less than
what any file made of these forms takes. Slopes above 1 (15 of 136, up to 1.02) are 1 here: that makes the second filters simpler.

as it is         one operator each: convolution, PReLU, transposed convolution
slopes of ReLU   PReLU(x) = s x + (1 - s) ReLU(x), as products and a sum
second filters   the straight part s x by filters of its own, read from before the layer; ReLU and the sum are fused into them
16 channels      12 channels filled up with zeros to whole blocks of the runtime's layout
bands            the transposed convolution for bands of so many rows, as a batch: its table of products then fits a cache
positions        a convolution 5x5 that makes the 2x2 positions as channels
2x2 blocks       the same for blocks of 2x2 pixels, read as channels

Writes `float_forms.json` and `float_forms.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from real_networks import deployed, halved, photographs
from torch import Tensor, nn
from torch.nn import functional as F

from compresskit.export.check.profile.kernels import ProfiledFile, profiler_cost, run_in_turn

HERE = Path(__file__).parent
CONVERSIONS = ("ReorderInput", "ReorderOutput")
SIZE, SCALE, BORDER = 128, 2, 4  # of the image; of the transposed convolution, and what it cuts off
BANDS = (16, 8, 4)  # rows


class Sloped(nn.Module):
    """A PReLU as products and a sum."""

    def __init__(self, prelu: nn.PReLU) -> None:
        super().__init__()
        self.slope = nn.Parameter(prelu.weight.detach().view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x + (1 - self.slope) * x.relu()


def scaled(conv: nn.Conv2d, factor: Tensor) -> nn.Conv2d:
    """A convolution whose channels are multiplied by factors."""
    made = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding)  # type: ignore[arg-type]
    assert conv.bias is not None
    assert made.bias is not None
    with torch.no_grad():
        made.weight.copy_(conv.weight * factor.view(-1, 1, 1, 1))
        made.bias.copy_(conv.bias * factor)
    return made


class Straight(nn.Module):
    """A convolution and its PReLU by second filters: ReLU((1 - s) x) + s x."""

    def __init__(self, conv: nn.Conv2d, prelu: nn.PReLU) -> None:
        super().__init__()
        slope = prelu.weight.detach()
        self.bent, self.straight = scaled(conv, 1 - slope), scaled(conv, slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.straight(x) + self.bent(x).relu()


class StraightPair(nn.Module):
    """A convolution, its PReLU and a 1x1 one: the straight part of the PReLU is one convolution from before both."""

    def __init__(self, conv: nn.Conv2d, prelu: nn.PReLU, after: nn.Conv2d) -> None:
        super().__init__()
        slope = prelu.weight.detach()
        assert conv.bias is not None
        self.bent, self.after = scaled(conv, 1 - slope), after
        self.straight = nn.Conv2d(conv.in_channels, after.out_channels, conv.kernel_size, padding=conv.padding)  # type: ignore[arg-type]
        assert self.straight.bias is not None
        mix = after.weight.detach()[:, :, 0, 0] * slope
        with torch.no_grad():
            self.straight.weight.copy_(torch.einsum("oc,cikl->oikl", mix, conv.weight))
            self.straight.bias.copy_(mix @ conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.bent(x).relu()) + self.straight(x)


class Filled(nn.Module):
    """Convolutions of 12 channels with 16, the new ones 0; the first 12 of the result count."""

    def __init__(self, convs: list[nn.Conv2d]) -> None:
        super().__init__()
        self.convs = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in convs))
        with torch.no_grad():
            for made, conv in zip(self.convs, convs, strict=True):
                assert conv.bias is not None
                made.weight.zero_()[:12, :12] = conv.weight  # type: ignore[operator]
                made.bias.zero_()[:12] = conv.bias  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convs(x)
        return result


class Banded(nn.Module):
    """A transposed convolution, without bias, of bands cut before: (bands, C, rows, W) -> (bands, 3, 2 rows + 7, 2 W)."""

    def __init__(self, deconv: nn.ConvTranspose2d) -> None:
        super().__init__()
        self.weight = nn.Parameter(deconv.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.weight, stride=SCALE, padding=(0, BORDER), output_padding=(0, 1))


class Positions(nn.Module):
    """A transposed convolution as a convolution of blocks of pixels whose channels are the positions of the result."""

    def __init__(self, deconv: nn.ConvTranspose2d, block: int) -> None:
        super().__init__()
        self.block, self.bias = block, deconv.bias
        # The kernel is what the transposed convolution makes of a block of single ones, as seen from every block around.
        channels, made = deconv.in_channels, deconv.out_channels
        side, reach = block * SCALE, 1 if block > 1 else 2
        ones = torch.zeros(channels * block * block, channels, block * (2 * reach + 1), block * (2 * reach + 1))
        for c in range(channels):
            for i in range(block * block):
                ones[c * block * block + i, c, reach * block + i // block, reach * block + i % block] = 1
        with torch.no_grad():
            seen = F.conv_transpose2d(ones, deconv.weight, None, SCALE, BORDER, 1)
        blocks = seen.unfold(2, side, side).unfold(3, side, side)  # (in, 3, K, K, side, side)
        kernel = blocks.permute(1, 4, 5, 0, 2, 3).flatten(0, 2).flip(-1, -2)
        self.kernel, self.reach, self.side, self.made = nn.Parameter(kernel.contiguous()), reach, side, made

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.block) if self.block > 1 else x
        x = F.pixel_shuffle(F.conv2d(x, self.kernel, padding=self.reach), self.side)
        return x if self.bias is None else x + self.bias.view(-1, 1, 1)


Forms = dict[str, tuple[nn.Module, Tensor]]


@torch.no_grad()
def parts(model: Any, image: Tensor) -> dict[str, Forms]:
    """Part of the network -> its forms, and what they read of an image. The first form is the network's own."""
    first, middle = (
        [model.feature_extract, model.activation_1, model.shrink],
        [model.map_1, model.map_2, model.map_3, model.map_4],
    )
    few = model.activation_2(nn.Sequential(*first)(image))
    bent = model.activation_3(nn.Sequential(*middle)(few))
    many = model.activation_4(model.expand(bent))
    filled = torch.cat([few, torch.zeros(1, 4, SIZE, SIZE)], 1)
    found: dict[str, Forms] = {
        "feature_extract, PReLU, shrink": {
            "as it is": (nn.Sequential(*first), image),
            "slopes of ReLU": (nn.Sequential(first[0], Sloped(first[1]), first[2]), image),
            "second filters": (StraightPair(*first), image),
        },
        "map, four times": {"as it is": (nn.Sequential(*middle), few), "16 channels": (Filled(middle), filled)},
        "expand, PReLU": {
            "as it is": (nn.Sequential(model.expand, model.activation_4), bent),
            "slopes of ReLU": (nn.Sequential(model.expand, Sloped(model.activation_4)), bent),
            "second filters": (Straight(model.expand, model.activation_4), bent),
        },
        "deconv": {"as it is": (model.deconv, many)},
    }
    for rows in BANDS:
        bands = many.unflatten(2, (-1, rows)).transpose(1, 2).flatten(0, 1).contiguous()
        found["deconv"][f"bands of {rows} rows"] = (Banded(model.deconv), bands)
    found["deconv"] |= {"positions": (Positions(model.deconv, 1), many), "2x2 blocks": (Positions(model.deconv, 2), many)}
    return found


def same(got: Tensor, wanted: Tensor, bias: Tensor) -> bool:
    """Whether a form computes what the first one does: its first channels, or bands whose overlapping rows are added up."""
    if len(got) > 1:
        rows, whole = got.shape[2] - 2 * BORDER + 1, torch.zeros(1, got.shape[1], SIZE * SCALE + 2 * BORDER - 1, got.shape[3])
        for k, band in enumerate(got):
            whole[0, :, k * rows : k * rows + got.shape[2]] += band
        got = whole[:, :, BORDER : BORDER + SIZE * SCALE]
        wanted = wanted - bias.view(-1, 1, 1)
    return torch.allclose(got[:, : wanted.shape[1]], wanted, rtol=1e-3, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4, help="for each form")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = deployed(args.data).load("fsrcnn_x2").eval()
    for slopes in (m.weight for m in model.modules() if isinstance(m, nn.PReLU)):
        slopes.data.clamp_(max=1)
    image = halved(next(iter(photographs(args.data / "images")))[..., : 2 * SIZE, : 2 * SIZE] / 255)
    found = parts(model, image)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder, files = Path(name), dict[tuple[str, str], ProfiledFile]()
        for part, forms in found.items():
            own, x = next(iter(forms.values()))
            wanted = own(x)
            for form, (module, x) in forms.items():
                if not same(module(x), wanted, model.deconv.bias):
                    raise SystemExit(f"{part}, {form}: computes something else: {module(x).shape} {wanted.shape}")
                files[part, form] = profiled(module, x, folder, len(files))
        whole = profiled(model, image, folder, len(files))
        cost = profiler_cost(folder)
        run_in_turn([whole, *files.values()], args.seconds, 10_000)
        rows = {part: {form: kernels(files[part, form], cost) for form in forms} for part, forms in found.items()}
        result = {"rows": rows, "plain": whole.milliseconds, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    (HERE / "float_forms.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "float_forms.md").write_text(table(result))
    print(table(result))


def profiled(module: nn.Module, x: Tensor, folder: Path, number: int) -> ProfiledFile:
    path = folder / f"{number}.onnx"
    torch.onnx.export(module.eval(), (x,), path, dynamo=True, verbose=False)
    return ProfiledFile(path, (x,), 1, folder / str(number))


def kernels(file: ProfiledFile, cost: Any) -> float:
    """Milliseconds of the kernels of a file, without conversions."""
    operators, taken = file.kernel_times(cost)
    return sum(ms for name, ms in taken.items() if operators[name].operator not in CONVERSIONS)


def table(result: dict[str, Any]) -> str:
    lines = ["| part | form | ms |", "|---|---|--:|"]
    for part, forms in result["rows"].items():
        least = min(forms, key=forms.__getitem__)
        lines += [f"| {part} | {f'**{form}**' if form == least else form} | {ms:.2f} |" for form, ms in forms.items()]
    least_ms = sum(min(forms.values()) for forms in result["rows"].values())
    lines += [
        f"| sum of the fastest | | {least_ms:.2f} |",
        f"| torch's float file | | {result['plain']:.2f} |",
        "",
        f"No file of these forms is {result['plain'] / least_ms:.2f} times as fast as torch's. torch {result['torch']},"
        f" onnxruntime {result['onnxruntime']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
