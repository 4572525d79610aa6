"""Trained networks that people deploy: what each effort of static int8 keeps of them, and their latency.

    python benchmarks/real_networks.py --data FOLDER                                          the face detector, FSRCNN
    python benchmarks/real_networks.py --data FOLDER --cifar CIFAR10 --checkpoints FOLDER     also ResNet-20 and -56
    python benchmarks/real_networks.py ... --networks face --ways balanced best               these, measured again
    python benchmarks/real_networks.py ... --latency                                          only times of the files of --folder
    python benchmarks/real_networks.py ... --name real_networks_avx2                          a table of its own: another machine

FOLDER: networks.py with `load(name)`, photographs in images/ and high-resolution pictures in sr/. Pictures that calibrate measure
nothing. Every file runs in ONNX Runtime.

face       calibration: photographs 0 to 127, 320x240. F1, in %, of cells whose score is above 0.3 against those of the float
           network, on photographs 200 to 399. dB: mean of both outputs
pnet, rnet, onet
           of MTCNN, where `pip install --no-deps facenet-pytorch` has put them: as face, a score above 0.6 and 0.7. rnet and onet
           see the places of a photograph for which pnet has the highest scores: eight of each of the photographs that calibrate,
           to test 32 of each of the photographs from 128 on, of which some five hundred crops are confident
fsrcnn_*   calibration: 64 crops of photographs. PSNR in dB on the whole pictures of sr/, 8 pixels cut off at each edge
resnet*    three draws of 512 training images, or --draws; top-1 in % on the 10,000 test images, mean and its standard
           error. "doubt": the standard error of the difference from the float network that these images leave, from how many
           of them one of both alone gets right (McNemar)

ways       onnxruntime (its quantizer, pre-processed, per channel, uint8 activations); NNCF's and AIMET's with their defaults,
           from the float file of `export_onnx`, where `pip install nncf aimet-onnx` has put them; our efforts, "measured": fast
           with choose="measure" for one thread, and "two": balanced with that for two threads
latency    batch 1 (FSRCNN: 128x128), all files of a network in turn, in OpenVINO too where it is installed, medians; torch is
           torch's own ONNX export of the float network, export the one of `export_onnx`
bound      below which no placement of integers can come in this runtime: each layer by the faster of its kernels in export and
           fast, without a single conversion between float and integers or between memory layouts; on one thread
peak       the network's multiplications at the rate of a float product of two matrices of 768 x 768 in this runtime, on one
           thread: what no rewriting of the float file that multiplies as often comes below

Writes `NAME.json` and `NAME.md` beside this file; what is not measured again stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "recipes")]
from quantize_cifar import MEAN, STD, draw, trained  # noqa: E402
from quantize_zoo import Reader  # noqa: E402
from vision import cifar10  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.export.check.profile.layers import profile_layers  # noqa: E402
from compresskit.measure import numpy_inputs, session  # noqa: E402

PEERS = {"onnxruntime": "onnxruntime", "nncf": "nncf", "aimet": "aimet_onnx"}  # way -> package
WAYS = (*PEERS, "fast", "measured", "balanced", "best", "two")
HOW: dict[str, dict[str, Any]] = {
    "measured": {"choose": "measure"},
    "two": {"effort": "balanced", "choose": "measure", "deployment": ck.quant.targets.Deployment(threads=2)},
}
SCORE = 0.3  # of a confident cell
MTCNN = {"pnet": 0.6, "rnet": 0.7, "onet": 0.7}  # scores of a confident cell or crop, those of the package
CROPS, TEST_CROPS = 8, 32  # of a photograph, to calibrate by and to test on: few show a face
CALIBRATION = 128  # photographs
EDGE = 8  # pixels
DRAWS = 3
Run = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Network:
    """A trained network, its calibration data (one list of batches for each draw), and how well a file does.

    dynamic: dimensions that vary. example: what latency is measured on. inputs: what dB is measured on.
    quality: of a network that is run; larger is better. right: which of the samples it gets right, where that is its quality.
    """

    model: nn.Module
    draws: list[list[Tensor]]
    dynamic: tuple[int, ...]
    example: Tensor
    inputs: list[Tensor]
    quality: Callable[[Run], float]
    right: Callable[[Run], Tensor] | None = None


def photographs(folder: Path, size: tuple[int, int] | None = None) -> Iterator[Tensor]:
    """Each (1, 3, H, W), 0..255."""
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".jpg", ".png")):
        picture = decode_image(str(path), ImageReadMode.RGB).float()[None]
        yield picture if size is None else F.interpolate(picture, size, mode="bilinear", antialias=True, align_corners=False)


def halved(picture: Tensor) -> Tensor:
    """(1, 3, H, W) in 0..1 -> (1, 3, H/2, W/2)."""
    size = (picture.shape[2] // 2, picture.shape[3] // 2)
    return F.interpolate(picture, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def face(model: nn.Module, data: Path) -> Network:
    x = torch.cat([(p - 127) / 128 for p in photographs(data / "images", (240, 320))])
    test = list(x[200:400].split(10))
    quality = same_decisions(model, test, lambda outputs: outputs[0].softmax(-1)[..., 1] > SCORE)
    return Network(model, [list(x[:128].split(16))], (0,), x[:1], test, quality)


def same_decisions(model: nn.Module, test: list[Tensor], confident: Callable[[list[Tensor]], Tensor]) -> Callable[[Run], float]:
    """F1 in % of what a run is confident of, against what the float network is."""

    def decisions(run: Run) -> Tensor:
        return torch.cat([confident(run(part)) for part in test])

    with torch.no_grad():
        wanted = decisions(float_run(model))

    def quality(run: Run) -> float:
        found = decisions(run)
        return float(200 * (found & wanted).sum() / (found.sum() + wanted.sum()))

    return quality


def mtcnn(name: str, data: Path) -> Network:
    """One of the three networks of facenet-pytorch, whose last output is of scores."""
    package: Any = importlib.import_module("facenet_pytorch")
    pnet, pictures = package.PNet().eval(), [(p - 127.5) / 128 for p in photographs(data / "images", (240, 320))]
    if name == "pnet":
        model, draw, test = pnet, torch.cat(pictures[:CALIBRATION]).split(16), list(torch.cat(pictures[200:400]).split(10))
    else:
        model, side = (package.RNet() if name == "rnet" else package.ONet()).eval(), 24 if name == "rnet" else 48
        draw = torch.cat([crops_of(pnet, picture, side, CROPS) for picture in pictures[:CALIBRATION]]).split(16 * CROPS)
        test = [crops_of(pnet, picture, side, TEST_CROPS) for picture in pictures[CALIBRATION:]]
    quality = same_decisions(model, test, lambda outputs: outputs[-1][:, 1] > MTCNN[name])
    return Network(model, [list(draw)], (0, 2, 3) if name == "pnet" else (0,), draw[0][:1], test, quality)


@torch.no_grad()
def crops_of(pnet: nn.Module, picture: Tensor, side: int, count: int) -> Tensor:
    """(count, 3, side, side): where `pnet`, on the picture at half its size, has the highest scores; it sees 12 x 12, step 2."""
    scores = pnet(F.interpolate(picture, scale_factor=0.5, mode="bilinear", antialias=True))[1][0, 1]
    places = scores.flatten().topk(count).indices.tolist()
    corners = [(4 * (place // scores.shape[1]), 4 * (place % scores.shape[1])) for place in places]
    crops = torch.cat([picture[..., top : top + 24, left : left + 24] for top, left in corners])
    return crops if side == 24 else F.interpolate(crops, (side, side), mode="bilinear", align_corners=False)


def super_resolution(model: nn.Module, data: Path) -> Network:
    crops = [halved(p[..., :256, :256] / 255) for p in photographs(data / "images")]
    calibration = list(torch.cat(crops[:64]).split(16))
    pairs = []
    for picture in photographs(data / "sr"):
        large = picture[..., : picture.shape[2] // 2 * 2, : picture.shape[3] // 2 * 2] / 255
        pairs.append((halved(large), large))

    def quality(run: Run) -> float:
        errors = [(run(small)[0].clamp(0, 1) - large)[..., EDGE:-EDGE, EDGE:-EDGE] for small, large in pairs]
        return mean(float(-10 * e.square().mean().log10()) for e in errors)

    return Network(model, [calibration], (0, 2, 3), crops[0], [small for small, _ in pairs], quality)


def cifar(model: nn.Module, folder: Path, draws: int = DRAWS) -> Network:
    parts = cifar10(str(folder), 10**6)
    images, labels = parts["test"]
    test = list(((images.float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)).split(500))

    def right(run: Run) -> Tensor:
        return torch.cat([run(part)[0].argmax(1) for part in test]) == labels

    calibration = [draw(parts["train"][0], seed) for seed in range(draws)]
    return Network(model, calibration, (0,), test[0][:1], test[:2], lambda run: float(100 * right(run).double().mean()), right)


def deployed(data: Path) -> Any:
    """The module that loads the networks of a folder."""
    spec = importlib.util.spec_from_file_location("deployed", data / "networks.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{data}: no networks.py there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def networks(args: argparse.Namespace, draws: int = DRAWS) -> Iterator[tuple[str, Network]]:
    for name in ("face", "fsrcnn_x2") if args.data else ():
        if name in (args.networks or [name]):
            yield name, (face if name == "face" else super_resolution)(deployed(args.data).load(name), args.data)
    for name in MTCNN if args.data and importlib.util.find_spec("facenet_pytorch") else ():
        if name in (args.networks or [name]):
            yield name, mtcnn(name, args.data)
    for name in ("resnet20", "resnet56") if args.cifar and args.checkpoints else ():
        if name in (args.networks or [name]):
            yield name, cifar(trained(name, args.checkpoints), args.cifar, draws)


def float_run(model: nn.Module) -> Run:
    def run(x: Tensor) -> list[Tensor]:
        outputs = model(x)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return run


def executed(path: Path) -> Run:
    runtime = session(path)
    return lambda x: [torch.from_numpy(v) for v in runtime.run(None, numpy_inputs(runtime, (x,)))]


def decibels(run: Run, network: Network) -> float:
    """SQNR against the float network, the mean of its outputs."""
    power: dict[int, Tensor] = {}
    for x in network.inputs:
        for k, (a, b) in enumerate(zip(float_run(network.model)(x), run(x), strict=True)):
            power[k] = power.get(k, torch.zeros(2)) + torch.stack([a.square().sum(), (a - b).square().sum()])
    return mean(float(10 * (signal / noise).log10()) for signal, noise in power.values())


def by_onnxruntime(network: Network, batches: list[Tensor], path: Path) -> None:
    start, prepared = path.with_suffix(".fp32.onnx"), path.with_suffix(".pre.onnx")
    ck.export_onnx(network.model, start, (batches[0][:2],), dynamic=network.dynamic)
    quant_pre_process(str(start), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared), str(path), Reader(session(start).get_inputs()[0].name, batches), per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip


def by_nncf(network: Network, batches: list[Tensor], path: Path) -> None:
    nncf: Any = importlib.import_module("nncf")
    source, feeds = float_file(network, batches, path)
    onnx.save(nncf.quantize(source, nncf.Dataset(feeds), subset_size=len(feeds)), path)


def by_aimet(network: Network, batches: list[Tensor], path: Path) -> None:
    aimet: Any = importlib.import_module("aimet_onnx")
    source, feeds = float_file(network, batches, path)
    simulation = aimet.QuantizationSimModel(source)
    simulation.compute_encodings(feeds)
    onnx.save(simulation.to_onnx_qdq(export_int32_bias=True, prequantize_constants=True), path)


def float_file(network: Network, batches: list[Tensor], path: Path) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """The float network as a file, and calibration batches by the name of its input."""
    start = path.with_suffix(".fp32.onnx")
    ck.export_onnx(network.model, start, (batches[0][:2],), dynamic=network.dynamic)
    name = session(start).get_inputs()[0].name
    return onnx.load(start), [{name: x.numpy()} for x in batches]


BY_PEER = {"onnxruntime": by_onnxruntime, "nncf": by_nncf, "aimet": by_aimet}


def measure(name: str, network: Network, way: str, folder: Path) -> dict[str, Any]:
    """Quantize in one way for every draw, and measure the files."""
    rows = []
    for k, batches in enumerate(network.draws):
        path, row = file_of(folder, name, way, k), dict[str, Any]()
        began = time.perf_counter()
        if way in PEERS:
            BY_PEER[way](network, batches, path)
        else:
            how = HOW.get(way) or {"effort": way}
            quantized = ck.quant.quantize_static(network.model, [(x,) for x in batches], dynamic=network.dynamic, **how)
            ck.export_onnx(quantized, path, (batches[0][:2],))
            row["remedies"] = [str(remedy) for remedy in quantized.origin.remedies]
            row["measured"] = None if quantized.origin.measured is None else str(quantized.origin.measured)
            row["verified"] = ck.verify_onnx(path, quantized, [(batches[0],)]).passed
        row["seconds"] = time.perf_counter() - began
        audit = ck.audit(path)
        rows.append(row | {"integer_macs": audit.integer_fraction, "db": decibels(executed(path), network)})
        rows[-1]["quality"] = network.quality(executed(path))
        if network.right is not None:
            ours, floats = network.right(executed(path)), network.right(float_run(network.model))
            rows[-1]["doubt"] = 100 * float((ours != floats).sum()) ** 0.5 / len(ours)
        print(name, way, json.dumps(rows[-1]), flush=True)
    numbers = {key: mean(row[key] for row in rows) for key in ("seconds", "integer_macs", "db", "quality")}
    if len(rows) > 1:
        numbers |= {"draws": len(rows), "error": stdev(row["quality"] for row in rows) / len(rows) ** 0.5}
    if network.right is not None:
        numbers["doubt"] = mean(row["doubt"] for row in rows)
    return rows[0] | numbers | {"verified": all(row.get("verified", True) for row in rows)}


def file_of(folder: Path, name: str, way: str, draw: int = 0) -> Path:
    return folder / f"{name}.{way}.{draw}.onnx"


def times(name: str, network: Network, folder: Path, seconds: float, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Runtime -> threads -> way -> milliseconds, all in turn, medians of repeats; float files are made where they are missing."""
    plain, ours = (file_of(folder, name, way) for way in ("torch", "export"))
    if not plain.exists():
        torch.onnx.export(network.model, (network.example,), plain, dynamo=True, verbose=False)
    ck.export_onnx(network.model, ours, (network.example,))
    found = {way: file_of(folder, name, way) for way in ("torch", "export", *WAYS)}
    ways = {str(path): way for way, path in found.items() if path.exists()}
    found_ms: dict[tuple[str, str, str], list[float]] = {}
    for count in (1, 2) * repeats:
        for row in ck.export.benchmark(list(ways), (network.example,), threads=count, seconds=seconds):
            found_ms.setdefault((row.runtime, str(count), ways[row.path]), []).append(row.milliseconds)
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for (runtime, threads, way), several in found_ms.items():
        measured.setdefault(runtime, {}).setdefault(threads, {})[way] = median(several)
    return measured


def bound(name: str, network: Network, folder: Path, seconds: float) -> float | None:
    """The faster kernel of each layer, in float or in integers, as a share of the file `export`; None where a file is missing."""
    fast, export = (file_of(folder, name, way) for way in ("fast", "export"))
    if not fast.exists():
        return None
    profile = profile_layers(fast, (network.example,), against=export, threads=1, seconds=seconds)
    assert profile.against_outside is not None
    assert profile.against_milliseconds is not None
    kernels = 0.0
    for layer in profile.layers:
        kernels += min(time.milliseconds - time.conversions for time in (layer.this, layer.other) if time is not None)
    return (kernels + min(profile.outside, profile.against_outside)) / profile.against_milliseconds


def peak(network: Network, size: int = 768) -> float:
    """Milliseconds that the network's multiplications take at the rate of the runtime's float product, on one thread."""
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, size]) for name in "xy")
    w = onnx.numpy_helper.from_array(torch.randn(size, size).numpy(), "w")
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "peak", [x], [y], [w]), opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runtime = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed, least = {"x": torch.randn(size, size).numpy()}, float("inf")
    for _ in range(50):
        began = time.perf_counter()
        runtime.run(None, feed)
        least = min(least, time.perf_counter() - began)
    return 1e3 * least * ck.count_macs(network.model, (network.example,)) / size**3


def processor() -> str:
    """What the processor has for integers; "" where the system does not say."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ", ".join(name for name in ("avx2", "avx512bw", "avx_vnni", "avx512_vnni", "amx_int8") if name in flags)


def write(result: dict[str, Any], file_name: str) -> None:
    result["versions"] = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    result["cpu"] = processor()
    (HERE / f"{file_name}.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["| network | way | quality | dB | MACs in integers | seconds | verified |", "|---|---|--:|--:|--:|--:|---|"]
    for name, row in result["networks"].items():
        lines.append(f"| {name} | float | {row['float']:.3f} | | | | |")
        for way, some in row["ways"].items():
            spread = f" ± {some['error']:.3f} ({some['draws']})" if "draws" in some else ""
            spread += f", doubt {some['doubt']:.2f}" if "doubt" in some else ""
            lines.append(
                f"| {name} | {way} | {some['quality']:.3f}{spread} | {some['db']:.2f} | {some['integer_macs']:.1%}"
                f" | {some['seconds']:.0f} | {'' if way in PEERS else 'yes' if some['verified'] else 'no'} |"
            )
    lines += [
        "",
        f"Milliseconds, a CPU with {result['cpu']}; in brackets as a fraction of torch's float file in ONNX Runtime.",
        "",
    ]
    columns = ("torch", "export", *WAYS, "bound", "peak")
    lines += ["| network, threads | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name, row in result["networks"].items():
        for threads, ms in row.get("ms", {}).items():
            cells = [f"{ms[w]:.2f} ({ms[w] / ms['torch']:.2f})" if w in ms else "" for w in columns]
            lines.append(f"| {name}, {threads} | {' | '.join(cells)} |")
            if there := row.get("openvino", {}).get(threads):
                cells = [f"{there[w]:.2f} ({there[w] / ms['torch']:.2f})" if w in there else "" for w in columns]
                lines.append(f"| {name}, {threads}, in OpenVINO | {' | '.join(cells)} |")
    lines += [
        "",
        f"Quality: F1 in % (face, MTCNN), PSNR in dB (fsrcnn), top-1 in %, mean of {DRAWS} draws or of as many as stand in"
        f" brackets, with its standard error (resnet). {result['versions']}",
    ]
    (HERE / f"{file_name}.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/real_networks"), help="where the files are written")
    parser.add_argument("--name", default="real_networks", help="of the two files that are written")
    parser.add_argument("--networks", nargs="*", default=())
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of calibration images of resnet*")
    parser.add_argument("--latency", action="store_true", help="only the times of files that are there")
    parser.add_argument("--seconds", type=float, default=5, help="for each file and number of threads")
    parser.add_argument("--repeats", type=int, default=1, help="of the times, whose medians count")
    args = parser.parse_args()
    logging.getLogger("compresskit").setLevel(logging.ERROR)
    args.folder.mkdir(parents=True, exist_ok=True)
    known = HERE / f"{args.name}.json"
    result = json.loads(known.read_text()) if known.exists() else {"networks": {}}
    for name, network in networks(args, args.draws):
        row = result["networks"].setdefault(name, {"ways": {}})
        with torch.no_grad():
            row["float"] = network.quality(float_run(network.model))
            for way in () if args.latency else [w for w in args.ways if importlib.util.find_spec(PEERS.get(w, "compresskit"))]:
                row["ways"][way] = measure(name, network, way, args.folder)
                row["ways"] = {w: row["ways"][w] for w in WAYS if w in row["ways"]}
                write(result, args.name)
        measured = times(name, network, args.folder, args.seconds, args.repeats)
        row["repeats"] = args.repeats
        row["ms"], row["openvino"] = measured["onnxruntime"], measured.get("openvino", row.get("openvino", {}))
        least = bound(name, network, args.folder, args.seconds)
        row["ms"]["1"] |= {} if least is None else {"bound": least * row["ms"]["1"]["export"]}
        row["ms"]["1"]["peak"] = peak(network)
        write(result, args.name)


if __name__ == "__main__":
    main()
