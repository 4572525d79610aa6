"""What weights that cannot overflow cost: SQNR and accuracy of `X86` beside `X86` with weights that may.

    python benchmarks/saturation.py                                              # the torchvision networks of quantize_zoo.py
    python benchmarks/saturation.py --data CIFAR10 --checkpoints FOLDER          # trained CIFAR-10 networks
    python benchmarks/saturation.py --cost                                       # of proving, quantizing and training

Both with exact sums, simulated or (CIFAR-10) executed with kernels that do not saturate: on a machine without VNNI the second is
another network. SQNR: of the outputs, against fp32, in dB. torchvision's networks have random weights and BatchNorm statistics of
random images, and see few and small images to save time (64 pixels, 96 for inception_v3; 16 for calibration and 16 others to
compare on); such networks amplify noise with depth, a row differs by half a dB from draw to draw. CIFAR-10's networks: draws of
512 calibration images, the first `--samples` test images. `--cost`: CPU time of `verify_onnx` with machines="all" and without, of
`quantize_static`, and of a QAT step, in turn.

Writes `saturation.json` and `saturation.md` beside this file; rows that are not measured again are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "recipes")]
from machine_files import UNGUARDED, quiet, transformer, variants  # noqa: E402
from quantize_cifar import MEAN, STD, draw, trained  # noqa: E402
from quantize_zoo import NETWORKS, network  # noqa: E402
from vision import CifarResNet, cifar10  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.quant import X86, Target  # noqa: E402

DRAWS = 3  # of calibration images
TARGETS = {"x86": X86, "overflow": UNGUARDED}


def ratio(wanted: Tensor, got: Tensor) -> float:
    """SQNR in dB."""
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


def random_network(name: str, seed: int) -> dict[str, float]:
    """SQNR for both targets. seed: draws the images."""
    size = 96 if name == "inception_v3" else 64
    x = torch.randn(32, 3, size, size, generator=torch.Generator().manual_seed(seed))
    model = transformer(size) if name == "vit_b_16" else network(name, x[:16])
    with torch.no_grad():
        wanted = main_output(model(x[16:]))
        return {key: ratio(wanted, main_output(quantized(model, [x[:16]], target)(x[16:]))) for key, target in TARGETS.items()}


def main_output(output: Any) -> Tensor:
    """Of a segmentation network that has several, the first."""
    return next(iter(output.values())) if isinstance(output, dict) else output


def quantized(model: nn.Module, batches: list[Tensor], target: Target) -> nn.Module:
    return ck.quant.quantize_static(model, [(x,) for x in batches], target=target)


def trained_network(name: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """SQNR and accuracy for both targets, a row for each draw."""
    parts = cifar10(str(args.data), None)
    labels = parts["test"][1][: args.samples]
    test = (parts["test"][0][: args.samples].float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    model, found = trained(name, args.checkpoints), []
    with torch.no_grad():
        wanted = torch.cat([model(x) for x in test.split(200)])
        for seed in range(3):
            row = {"fp32": accuracy(wanted, labels), "samples": len(labels)}
            classes: dict[str, Tensor] = {}
            for key, target in TARGETS.items():
                got = executed(quantized(model, draw(parts["train"][0], seed), target), test)
                row |= {key: ratio(wanted, got), f"{key} top1": accuracy(got, labels)}
                classes[key] = got.argmax(1) == labels
            row["only x86 right"], row["only overflow right"] = (
                int((classes[a] & ~classes[b]).sum()) for a, b in (("x86", "overflow"), ("overflow", "x86"))
            )
            found.append(row)
            print(name, row, flush=True)
    return found


def executed(model: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs of the file, with exact sums."""
    with tempfile.TemporaryDirectory() as folder:
        path = ck.export_onnx(model, Path(folder) / "q.onnx", (inputs[:2],))
        session = onnxruntime.InferenceSession(variants(path, False)[0], quiet(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return torch.cat([torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for x in inputs.split(200)])


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).double().mean())


def seconds(ways: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median CPU time of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begin = time.process_time()
            run()
            taken[name].append(time.process_time() - begin)
    return {name: median(values) for name, values in taken.items()}


def costs(name: str) -> dict[str, dict[str, float]]:
    """Seconds of proving, quantizing and a QAT step."""
    torch.manual_seed(0)
    x = torch.randn(32, 3, 32, 32) if name == "resnet20" else torch.randn(16, 3, 128, 128)
    model = CifarResNet(20) if name == "resnet20" else network(name, x)
    with torch.no_grad():
        model.train()(x)
    model.eval()
    made, found = quantized(model, [x], X86), {}
    with tempfile.TemporaryDirectory() as folder:
        path = ck.export_onnx(made, Path(folder) / "q.onnx", (x[:2],))
        verify: dict[str, Any] = {"plain": (), "all": "all"}
        found["verify"] = seconds(
            {key: lambda m=machines: ck.verify_onnx(path, made, [(x,)], machines=m) for key, machines in verify.items()}  # type: ignore[misc]
        )
    found["quantize"] = seconds({key: lambda t=t: quantized(model, [x], t) for key, t in TARGETS.items()}, rounds=3)  # type: ignore[misc]
    steps = {key: ck.quant.prepare_qat(model, (x,), target=target).train() for key, target in TARGETS.items()}
    for step in steps.values():
        step(x)
    found["QAT step"] = seconds({key: lambda s=s: s(x).square().mean().backward() for key, s in steps.items()})  # type: ignore[misc]
    return found


def loss(draw: dict[str, float]) -> float:
    """How many dB weights that cannot overflow cost (negative) or gain."""
    return draw["x86"] - draw["overflow"]


def page(result: dict[str, Any]) -> str:
    """The Markdown page."""
    lines = [
        "Weights that cannot overflow / that may, simulated with exact sums. torchvision's networks are untrained.",
        "",
        "| network | mean SQNR dB | difference, by draw |",
        "|---|--:|--:|",
    ]
    zoo = result["networks"]
    for name, draws in zoo.items():
        pair = " / ".join(f"{mean(draw[key] for draw in draws):.2f}" for key in TARGETS)
        lines.append(f"| {name} | {pair} | {', '.join(f'{loss(draw):+.2f}' for draw in draws)} |")
    everything = [mean(loss(draw) for draw in draws) for draws in zoo.values()]
    if everything:
        lines += [f"| mean of {len(zoo)} | | {mean(everything):+.2f} |", ""]
    if result.get("trained"):
        lines += ["| network, draw | images | SQNR dB | top-1 % | fp32 % |", "|---|--:|--:|--:|--:|"]
    for name, rows in result.get("trained", {}).items():
        for k, row in enumerate(rows):
            pairs = [f"{row[key]:.2f} / {row[other]:.2f}" for key, other in (("x86", "overflow"), ("x86 top1", "overflow top1"))]
            lines.append(f"| {name}, {k} | {row['samples']} | {pairs[0]} | {pairs[1]} | {row['fp32']:.2f} |")
    for name, found in result.get("costs", {}).items():
        verify, quantize, step = (list(found[key].values()) for key in ("verify", "quantize", "QAT step"))
        lines += [
            "",
            f"{name}, CPU time, medians: `verify_onnx` with all machines / none {verify[1] / verify[0]:.2f}; with weights that",
            f"cannot overflow / that may: `quantize_static` {quantize[0] / quantize[1]:.2f}, a QAT step {step[0] / step[1]:.2f}.",
        ]
    return "\n".join([*lines, ""])


def write(result: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--samples", type=int, default=10000)
    parser.add_argument("--trained", nargs="*", default=("resnet20", "resnet56"))
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "saturation.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    result = json.loads(args.out.read_text()) if args.out.exists() else {"networks": {}}
    if args.cost:
        for name in ("resnet20", "mobilenet_v2"):
            result.setdefault("costs", {})[name] = costs(name)
            write(result, args.out)
    elif args.data:
        for name in args.trained:
            result.setdefault("trained", {})[name] = trained_network(name, args)
            write(result, args.out)
    else:
        for name in args.networks:
            result["networks"][name] = []
            for seed in range(1, args.draws + 1):
                result["networks"][name].append(random_network(name, seed))
                print(name, result["networks"][name][-1], flush=True)
                write(result, args.out)
    write(result, args.out)


if __name__ == "__main__":
    main()
