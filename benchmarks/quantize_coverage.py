"""Coverage: every torchvision model captured, quantized for X86, exported with a dynamic batch, executed and verified.

    python benchmarks/quantize_coverage.py              every model without a row, each in a process of its own
    python benchmarks/quantize_coverage.py resnet18 ... these, measured again

Classification, segmentation, video and optical-flow models whole; of detection models the backbone (`inside="backbone"`), since
boxes depend on data. Weights are random (seed 0) with BatchNorm statistics of random images; inputs are as small as the
architecture allows, so that the sweep takes minutes; calibration and verification use random images. Each row is written to
`quantize_coverage.json` and `quantize_coverage.md` beside this file when it is done.

layers: convolutions and matrix products (those of attention included) that ONNX Runtime executes in integers, of all in its
optimized graph. MACs: multiply-accumulates of the layers with weights. seconds: capture, calibration, export and verification.
memory: largest resident set of the process, GiB.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import logging
import multiprocessing
import resource
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision import models

import compresskit as ck

HERE = Path(__file__).parent
FAMILIES = {
    "classification": models,
    "segmentation": models.segmentation,
    "video": models.video,
    "optical flow": models.optical_flow,
    "detection": models.detection,
}
#: Convolutions and matrix products, as `audit` counts them.
LAYER_KINDS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LIMIT = 14 * 2**30  # bytes of memory that a process may use


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is made small: shape of one input without the batch, samples, arguments of its constructor; what is
    quantized of it.
    """

    shape: tuple[int, ...] = (3, 64, 64)
    samples: int = 8
    arguments: dict[str, Any] = field(default_factory=dict)
    inside: str | None = None
    dynamic: tuple[int, ...] = (0,)
    skip: tuple[str, ...] = ()


def setting(name: str) -> Setting:
    """The smallest sensible input of a model."""
    family = family_of(name)
    if family == "detection":
        size = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}.get(name, 128)
        fixed = {} if "ssd" in name else {"min_size": size, "max_size": size}
        arguments = {"weights_backbone": None, **fixed}
        return Setting(shape=(3, size, size), samples=2, arguments=arguments, inside="backbone", dynamic=(0, 2, 3))
    if family == "segmentation":
        return Setting(shape=(3, 96, 96), samples=4, arguments={"weights_backbone": None})
    if family == "optical flow":
        # The first estimate of the flow is zero for any images, so the operators on it, and its concat, have no range.
        return Setting(shape=(3, 128, 128), samples=2, skip=("update_block.motion_encoder",))
    if name.startswith("mvit"):
        return Setting(shape=(3, 16, 224, 224), samples=2)
    if family == "video":
        return Setting(shape=(3, 16 if name == "s3d" else 8, *((224,) * 2 if name == "s3d" else (64,) * 2)), samples=2)
    for start, settings in (
        ("googlenet", Setting(arguments={"aux_logits": False, "init_weights": False})),
        ("inception", Setting(shape=(3, 96, 96), arguments={"aux_logits": False, "init_weights": False})),
        ("vit_b_16", Setting(shape=(3, 224, 224), samples=4)),
        ("vit_h_14", Setting(shape=(3, 112, 112), samples=2, arguments={"image_size": 112})),
        ("vit_l", Setting(shape=(3, 128, 128), samples=2, arguments={"image_size": 128})),
        ("vit", Setting(shape=(3, 224, 224), samples=4)),
        ("maxvit", Setting(shape=(3, 224, 224), samples=4)),
        ("swin", Setting(shape=(3, 112, 112), samples=4)),
    ):
        if name.startswith(start):
            return settings
    return Setting()


def family_of(name: str) -> str:
    return next(family for family, module in FAMILIES.items() if name in models.list_models(module))


#: One of each architecture; they are measured first.
FIRST = """squeezenet1_1 mobilenet_v3_small shufflenet_v2_x0_5 resnet18 mnasnet0_5 mobilenet_v2 regnet_y_400mf vgg11_bn googlenet
 efficientnet_b0 densenet121 inception_v3 vit_b_32 swin_t convnext_tiny lraspp_mobilenet_v3_large ssdlite320_mobilenet_v3_large
 deeplabv3_mobilenet_v3_large r3d_18 s3d fasterrcnn_mobilenet_v3_large_320_fpn fcn_resnet50 swin_v2_t mvit_v2_s swin3d_t
 raft_small maxvit_t ssd300_vgg16 retinanet_resnet50_fpn fcos_resnet50_fpn keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn
 resnext50_32x4d wide_resnet50_2 efficientnet_v2_s regnet_x_400mf mc3_18 r2plus1d_18 alexnet""".split()
#: Large ones, which come last.
LAST = (
    "efficientnet_b7 vgg19 vgg19_bn convnext_large vit_l_32 vit_l_16 regnet_x_32gf regnet_y_32gf regnet_y_128gf vit_h_14".split()
)


def names() -> list[str]:
    """Every model: one of each architecture, then their relatives by size, then the largest."""
    every = [n for module in FAMILIES.values() for n in models.list_models(module) if "quantized" not in n]
    return [*FIRST, *(n for n in every if n not in FIRST and n not in LAST), *LAST]


def network(name: str, how: Setting) -> nn.Module:
    """Seeded random weights whose activations have a sane size."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, **how.arguments)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
        if type(module).__name__ == "CNBlock":
            nn.init.constant_(module.layer_scale, 0.3)  # with 1e-6 the body would not affect the output
    if hasattr(model, "heads"):
        nn.init.normal_(model.heads[-1].weight, 0, 0.02)  # the same with zeros
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        part = model.get_submodule(how.inside) if how.inside else model
        with torch.no_grad():
            for _ in range(2):
                part.train()(*inputs(name, how, max(4, how.samples)))
    return model.eval()


def inputs(name: str, how: Setting, count: int) -> tuple[Any, ...]:
    """Random inputs of the whole model, or of its backbone."""
    images = torch.randn(count, *how.shape)
    return (images, torch.randn(count, *how.shape), 2) if family_of(name) == "optical flow" else (images,)


def batch(name: str, how: Setting, count: int) -> tuple[Any, ...]:
    """What the model is called with: detection models take a list of images in [0, 1]."""
    if family_of(name) == "detection":
        return (list(torch.rand(count, *how.shape)),)
    return inputs(name, how, count)


def measure(name: str) -> dict[str, Any]:
    """One row. Whatever fails is named in `cause`."""
    how = setting(name)
    shape = "x".join(map(str, how.shape))
    row: dict[str, Any] = {"family": family_of(name), "input": shape, "captured": False, "exported": False, "verified": False}
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(name, how, Path(folder) / "model.onnx", row)
    except Exception as error:
        lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        row["cause"] = lines[0][:300]
        logging.exception(name)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    row["memory"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return row


def _measure(name: str, how: Setting, path: Path, row: dict[str, Any]) -> None:
    batches = [batch(name, how, how.samples)]
    model = network(name, how)
    row["parameters"] = ck.count_parameters(model)
    quantized = ck.quant.quantize_static(model, batches, inside=how.inside, dynamic=how.dynamic, skip=how.skip)
    del model  # two copies of the largest take many GiB
    row["captured"] = True
    ck.export_onnx(quantized, path, batches[0], inside=how.inside)
    row["exported"] = True
    row["mb"] = round(sum(f.stat().st_size for f in path.parent.glob("model.onnx*")) / 1e6, 1)
    found = ck.audit(path)
    counts = [found.operators[kind] for kind in LAYER_KINDS if kind in found.operators]
    row["layers"] = [sum(done for done, _ in counts), sum(every for _, every in counts)]
    row["macs"] = round(found.integer_fraction, 4)
    others = [batch(name, how, count) for count in ((3, 5) if how.samples >= 8 else (1, 2))]
    proof = ck.verify_onnx(path, quantized, others, inside=how.inside)
    row["verified"] = proof.passed
    row["proof"] = proof.to_json()["optimized"]
    if not proof.passed:
        row["cause"] = str(proof.reason)


def separately(name: str, log: Path | None) -> dict[str, Any]:
    """`measure` in a process of its own, which is ended where it holds more than `LIMIT`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        process = multiprocessing.get_context("fork").Process(target=_child, args=(name, out, log))
        process.start()
        largest = 0
        while process.is_alive():
            largest = max(largest, resident(process.pid))
            if largest > LIMIT:
                process.kill()
            process.join(0.2)
        if process.exitcode == 0:
            return dict(json.loads(out.read_text()))
    cause = f"needs more than {LIMIT // 2**30} GiB" if largest > LIMIT else f"the process ended with {process.exitcode}"
    return {"family": family_of(name), "cause": cause, "memory": round(largest / 2**30, 2)}


def _child(name: str, out: Path, log: Path | None) -> None:
    gc.set_threshold(50_000)  # tracing makes millions of objects
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if log is not None:
        logging.basicConfig(filename=log, force=True)
    out.write_text(json.dumps(measure(name)))


def resident(pid: int | None) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def write(rows: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "compresskit": ck.__version__}
    rows = {name: rows[name] for name in sorted(rows, key=lambda n: (list(FAMILIES).index(rows[n]["family"]), n))}
    (HERE / "quantize_coverage.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    head = "model, input, captured, layers in integers, MACs, exported, verified, seconds, GiB, exception".split(", ")
    lines = ["# Coverage of torchvision", ""]
    done = sum(bool(row.get("verified")) for row in rows.values())
    lines.append(
        f"{done} of {len(rows)} models are captured, quantized for X86, exported with a dynamic batch and verified. {versions}"
    )
    for family in FAMILIES:
        own = {name: row for name, row in rows.items() if row["family"] == family}
        if not own:
            continue
        lines += ["", f"## {family}" + (" (backbones)" if family == "detection" else ""), ""]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for name, row in own.items():
            yes = ["yes" if row.get(key) else "no" for key in ("captured", "exported", "verified")]
            layers = "{} of {}".format(*row["layers"]) if "layers" in row else ""
            macs = f"{row['macs']:.1%}" if "macs" in row else ""
            cells = [
                name,
                row.get("input", ""),
                yes[0],
                layers,
                macs,
                *yes[1:],
                str(row.get("seconds", "")),
                str(row.get("memory", "")),
            ]
            lines.append(f"| {' | '.join([*cells, row.get('cause', '')])} |")
    (HERE / "quantize_coverage.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="measure these again; else all that have no row yet")
    parser.add_argument("--failed", action="store_true", help="also measure again what is not verified")
    parser.add_argument("--log", type=Path, help="append what each process says to this file")
    parser.add_argument("--reverse", action="store_true", help="from the other end, for a second sweep at the same time")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        print(json.dumps(measure(args.row)))
        return
    import onnxscript.optimizer  # noqa: F401  loaded once, before the processes part
    import torch._dynamo
    import torch.onnx._internal.exporter._core  # noqa: F401

    gc.freeze()
    for name in args.models or (names()[::-1] if args.reverse else names()):
        rows = read()
        if not args.models and name in rows and (rows[name].get("verified") or not args.failed):
            continue
        row = separately(name, args.log)
        print(name, json.dumps({k: v for k, v in row.items() if k not in ("family", "proof")}), flush=True)
        with Path(__file__).open() as lock:  # several sweeps may write
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(read() | {name: row})


def read() -> dict[str, Any]:
    path = HERE / "quantize_coverage.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


if __name__ == "__main__":
    main()
