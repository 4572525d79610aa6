"""Write `docs/results.md` and `docs/accuracy_latency.svg` from `benchmarks/*.json`: `python docs/make_results.py`.

Every figure that the project quotes stands on that page and is computed here, from the file that a benchmark script wrote. A test
compares the committed page with what this script makes of the committed files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent / "benchmarks"
RESULTS, PICTURE = HERE / "results.md", HERE / "accuracy_latency.svg"

HEAD = """\
# Results

Every figure comes from a script in [benchmarks/](../benchmarks), which writes a JSON file and a full table beside itself; this page
is written from those JSON files by `python docs/make_results.py`. Latencies are medians of ONNX files that ONNX Runtime executes in
turn in one process, on one thread of a CPU with AVX512-VNNI, at batch 1, unless a line says otherwise. Accuracies are those of the
last epoch, on the whole test set. A ratio below 1 means less time than the fp32 file takes.
"""


def load(name: str) -> Any:
    """The results of one benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are aligned to the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] + ['--:'] * (len(head) - 1))}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def source(*names: str) -> str:
    """Links to the scripts and the full tables behind a section."""
    return "; ".join(f"[{n}.py](../benchmarks/{n}.py), [all rows](../benchmarks/{n}.md)" for n in names) + "."


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean and range over seeds."""
    values = list(values)
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def chain() -> str:
    """The whole chain on scikit-learn's digits, over seeds."""
    runs = load("digits_chain")["runs"]
    rows = []
    for stages in zip(*runs, strict=True):
        smaller = mean(run[0]["bytes"] / stage["bytes"] for run, stage in zip(runs, stages, strict=True))
        faster = mean(run[0]["latency_ms"] / stage["latency_ms"] for run, stage in zip(runs, stages, strict=True))
        accuracy = spread((stage["metric"] for stage in stages), 4)
        rows.append((stages[0]["stage"], accuracy, f"{smaller:.1f}x", f"{faster:.2f}x", f"{all(s['verified'] for s in stages)}"))
    return f"""\
## The chain: `recipes/digits.py`

Handwritten digits (scikit-learn, 1,257 images to train on, 540 to test), means over {len(runs)} seeds. {source("digits_chain")}

{table(("stage", "accuracy", "smaller", "faster", "verified"), rows)}
"""


def chain_cifar() -> str:
    """One recipe against two libraries chained by hand."""
    found = load("chain_cifar")
    start, rows = found["start"], []
    for arm, group in groupby(sorted(found["rows"].values(), key=lambda row: row["arm"]), key=lambda row: row["arm"]):
        runs = list(group)
        of = {key: mean(run[key] for run in runs) for key in ("bytes", "latency", "minutes")}
        name = "Torch-Pruning, then onnxruntime's quantizer" if arm == "by hand" else f"`{arm}`"
        rows.append((name, len(runs), spread(run["top1"] for run in runs), f"{start['bytes'] / of['bytes']:.1f}x",
                     f"{1 / of['latency']:.2f}x", f"{of['minutes']:.0f}"))  # fmt: skip
    return f"""\
## One recipe, and two libraries chained by hand

ResNet-56 on CIFAR-10, trained by others ({start["top1"]:.2f} %, {start["bytes"] / 1024:.0f} KiB), four epochs in all or as many as an arm's
name says, autocast in bf16; the minutes are rough, since the machine did other work, too. {source("chain_cifar")}

{table(("arm", "seeds", "int8 %", "smaller", "faster", "minutes"), rows)}
"""


def depth_width() -> str:
    """Blocks and channels together, beside channels alone."""
    labels = {"vit": "vision transformer of 6 layers", "mobilenet_v2": "MobileNetV2, half as wide"}
    rows = []
    for name, found in load("depth_width").items():
        rows.append((labels[name], "", "none", "", "", f"{found['start']['top1']:.2f}", "1", "1"))
        order = sorted(found["rows"], key=lambda row: (-row["share"], row["arm"], row["epochs"]))
        for (share, arm, epochs), group in groupby(order, key=lambda row: (row["share"], row["arm"], row["epochs"])):
            runs = list(group)
            latency = f"{mean(run['latency'] for run in runs):.2f}"
            macs = f"{mean(run['macs'] for run in runs) / found['start']['macs']:.2f}"
            rows.append((labels[name], f"{share:g}", arm, epochs, len(runs), spread(run["top1"] for run in runs), latency, macs))
    return f"""\
## Blocks and channels together

CIFAR-10, float files of a share of the latency that both arms were asked for; each is taught by the network as it was, for as many epochs. The fewer
milliseconds are left, the more of them belong to operators that no width makes fast, and the more blocks are worth. {source("depth_width")}

{table(("network", "asked for", "removed", "epochs", "seeds", "top-1 %", "latency", "MACs"), rows)}
"""


def refit_blocks() -> str:
    """Blocks removed without a training."""
    found = load("refit_blocks")
    rows = [
        (
            row["network"],
            row["importance"],
            row["removed"],
            f"{row['macs']:.2f}",
            f"{row['batchnorm']:.2f}",
            f"{row['refitted']:.2f}",
        )
        for row in found["rows"]
    ]
    whole = ", ".join(f"{network} {top1:.2f} %" for network, top1 in found["whole"].items())
    return f"""\
## Blocks removed without a training

CIFAR-10, networks trained by others ({whole}), top-1 on the 10,000 test images after residual blocks were removed: with BatchNorm re-estimated alone, and with the
layers that are left fitted again on 2,048 images without labels. {source("refit_blocks")}

{table(("network", "importance", "blocks removed", "MACs", "BatchNorm alone %", "refitted %"), rows)}
"""


def static() -> str:
    """Static int8 and QAT."""
    cifar, zoo = load("quantize_cifar"), load("quantize_zoo")["rows"]
    longest = max(zoo, key=lambda name: zoo[name]["seconds"])
    rows = []
    for name, result in cifar["static"].items():
        ratio = cifar["latency"][name]["b1"]
        for tool, label in (("ours", "compresskit"), ("ort", "onnxruntime")):
            runs = result[tool]
            rows.append((name, label, f"{result['fp32']['top1']:.2f}", spread(r["top1"] for r in runs),
                         spread((r["sqnr"] for r in runs), 1), f"{ratio[tool]:.3f}"))  # fmt: skip

    def against(key: str) -> str:
        ratios = [row[key][1] / row[key][2] for row in zoo.values()]
        return f"{geometric_mean(ratios):.3f} (largest {max(ratios):.3f})"

    coverage = load("quantize_coverage")["rows"].values()
    cost = load("quantize_cost")["rows"]
    moved = load("quantize_ties")["rows"].values()
    qat = cifar["qat"]["resnet20"]
    exact = sum(row["moved"]["integers"] < 1e-6 for row in moved)
    steps = cifar["steps"]["resnet20"]
    kernels = load("quantize_kernels")["rows"]
    saved = [1 - row["tuned_ms"] / row["plain_ms"] for name, row in kernels.items() if name.startswith("Conv")]
    bent = {name[-3:]: [] for name in kernels if name.startswith("PReLU")}
    for name, row in kernels.items():
        if name.startswith("PReLU"):
            bent[name[-3:]].append(row["tuned_ms"] / row["plain_ms"])
    wide = {name: row["tuned_ms"] / row["plain_ms"] for name, row in kernels.items() if "depthwise" in name}
    few = [row["tuned_ms"] / row["plain_ms"] for name, row in kernels.items() if name.startswith("few channels")]
    joined = {name: row["tuned_ms"] / row["plain_ms"] for name, row in kernels.items() if name.startswith("groups")}
    volumes = [
        row["tuned_ms"] / row["plain_ms"]
        for name, row in kernels.items()
        if name.startswith("volume") and row["tuned_ms"] < 0.9 * row["plain_ms"]
    ]
    pool = next(1 - row["tuned_ms"] / row["plain_ms"] for name, row in kernels.items() if name.startswith("Average"))
    return f"""\
## Static int8 and QAT

CIFAR-10, trained networks, three draws of 512 calibration images, no option set. {source("quantize_cifar")}

{table(("network", "quantizer", "fp32 %", "int8 %", "SQNR dB", "of fp32 latency"), rows)}

* Simulation against execution on the 10,000 test images of CIFAR-10: the least share of outputs within one quantization step over the
  draws is {min(r["within_one_step"] for s in cifar["static"].values() for r in s["ours"]):.3f} %, of equal classes
  {min(r["executed_as_simulated"] for s in cifar["static"].values() for r in s["ours"]):.2f} %.
* QAT of ResNet-20 for two epochs: {spread(qat["qat"]["top1"])} %; float training as long: {spread(qat["float"]["top1"])} % ({len(qat["qat"]["top1"])} seeds).
  A step takes {steps["following"] / steps["float_seconds"]:.2f} times a float step, {steps["held"] / steps["float_seconds"]:.2f} times once the ranges are frozen.
* {len(zoo)} torchvision networks against onnxruntime's quantizer in its strongest setting, geometric mean of the latency ratio:
  {against("ms")} at batch 1, {against("ms_2_threads")} on two threads, {against("ms_batch_32")} at batch 32. {source("quantize_zoo")}
* Quantizing and exporting one of them takes {median(row["seconds"] for row in zoo.values()):.1f} s (median), {longest}
  at most {zoo[longest]["seconds"]:.1f} s; onnxruntime's quantizer alone {median(row["ort_seconds"] for row in zoo.values()):.1f} s (median).
* Coverage: {sum(row["verified"] for row in coverage)} of {len(coverage)} torchvision models (of detection models the backbone) are
  quantized, exported with a dynamic batch and verified without an option. {source("quantize_coverage")}
* Scales away from rounding boundaries: with random weights, {exact} of {len(moved)} networks give the same integers in both forms of
  the file; in the others at most {max(row["moved"]["integers"] for row in moved):.1%} differ (up to
  {max(row["calibrated"]["integers"] for row in moved):.0%} before). {source("quantize_ties")}
* Layers rewritten for ONNX Runtime's integer kernels: first convolutions take {min(saved):.0%} to {max(saved):.0%} less time than as
  they were placed, an average pool {pool:.0%} less. 3x3 convolutions of 16 and 28 channels that compute the PReLU behind them, with a slope
  for each channel, take {" and ".join(f"{ratio:.2f}" for ratio in bent["0.5"])} of the time with slopes up to 0.5, {" and ".join(f"{ratio:.2f}" for ratio in bent["1.5"])}
  with slopes up to 1.5, which take a third filter. Channels around depthwise convolutions are padded with zeros to a multiple of 16: blocks with
  {", ".join(name.split(", ")[-1].split()[0] for name in wide)} channels take {", ".join(f"{ratio:.2f}" for ratio in wide.values())} of the time; 3x3 convolutions
  between 16 channels and 8 or 12, {" and ".join(f"{ratio:.2f}" for ratio in few)}. Grouped convolutions as whole ones:
  {", ".join(f"{name.partition(', ')[2]} {ratio:.2f}" for name, ratio in joined.items())}. {source("quantize_kernels")}
* Narrow convolutions over three dimensions, which `X86` leaves float: {min(volumes):.2f} to {max(volumes):.2f} of the time in integers
  (same table).
* Cost: a ResNet-50 with 512 images takes {cost["ours"]["seconds"]:.1f} s and {cost["ours"]["peak_gib"]:.2f} GiB; onnxruntime's quantizer
  {cost["onnxruntime"]["seconds"]:.1f} s and {cost["onnxruntime"]["peak_gib"]:.2f} GiB. {source("quantize_cost")}
"""


def dynamic() -> str:
    """Dynamic int8 and weight-only quantization."""
    found = load("quantize_dynamic")["rows"]
    names = {"ours": "compresskit", "ours, words in float": "compresskit, embeddings in float", "default": "onnxruntime",
             "ours, per channel": "compresskit, per channel",
             "channel": "onnxruntime, per channel", "fused": "onnxruntime, fused graph"}  # fmt: skip
    rows = [
        (
            r["model"],
            r["weights"].split(",")[0],
            names[r["file"]],
            f"{r['ratio']:.3f}",
            f"{r['sqnr']:.1f}",
            f"{r['bytes'] / 1e6:.1f}",
        )
        for r in found
        if (r["batch"], r["length"]) == (1, 128) and r["file"] in names
    ]
    seeds = load("quantize_weights")["seeds"]
    gptq = mean(seed["int4 GPTQ"]["kl"] / seed["int4 nearest"]["kl"] for seed in seeds)
    return f"""\
## Dynamic int8 and weight-only

One thread, batch 1, length 128. {source("quantize_dynamic")}

{table(("model", "weights", "quantizer", "of fp32 latency", "SQNR dB", "MB"), rows)}

* int4 in blocks on SST-2: GPTQ loses {gptq:.2f} of the KL divergence that rounding to nearest loses ({len(seeds)} seeds).
  {source("quantize_weights")}
"""


def channels() -> str:
    """Channel pruning."""
    found = load("prune_cifar")["rows"]
    runs = [(*key.split(" | ")[:2], " | ".join(key.split(" | ")[2:-1]), row) for key, row in found.items() if "bn" in row]
    rows = []
    for (network, tool, setting), group in groupby(sorted(runs, key=lambda r: r[:3]), key=lambda r: r[:3]):
        seeds = [row for *_, row in group]
        cells = [spread(row[key] for row in seeds) for key in ("raw", "bn", "tuned")]
        setting = setting.replace("macs=0.5", "budget=keep(macs=0.5)")  # the name that it had when it was measured
        rows.append((network, tool, setting, len(seeds), f"{mean(r['macs'] for r in seeds) / 1e6:.1f} M", *cells))
    speed = {key.split(" | ")[1]: row for key, row in found.items() if key.startswith("speed")}
    zoo, timed = load("prune_zoo")["rows"].values(), load("prune_time")
    times, stage = timed["rows"], timed["stage"]
    speeds = load("planning_speed")
    proved = sum(bool(row.get("proof")) and row.get("eval") is True for row in zoo)
    return f"""\
## Channel pruning

CIFAR-10. *raw*: right after the cut; *+BN*: with BatchNorm statistics re-estimated, without labels; *tuned*: after 78 steps
(ResNet-20), or ten epochs (ResNet-56, whose dense self ends at {found["resnet56 | compresskit | dense, 10 epochs | 0"]["tuned"]:.2f} %). {source("prune_cifar")}

{table(("network", "tool", "setting", "seeds", "MACs", "raw", "+BN", "tuned"), rows)}

* Executed at half of the MACs: ResNet-20 {speed["resnet20"]["faster"]["ours"]:.2f} times faster (Torch-Pruning's best plan
  {max(v for k, v in speed["resnet20"]["faster"].items() if k.startswith("Torch")):.2f} times), ResNet-18
  {speed["resnet18"]["faster"]:.2f}, MobileNetV2 {speed["mobilenet_v2"]["faster"]:.2f}.
* Coverage: {proved} of {len(zoo)} torchvision models (classification, segmentation, video, flow, detection) lose half of their MACs
  without a hint; each plan is proved and the pruned model runs. {source("prune_zoo")}
* Planning and proving: {", ".join(f"{name} {mean(row['seconds']):.1f} s" for name, row in times.items())}; the whole stage for
  a ResNet-20, which refits layers and estimates BatchNorm again by 3,072 images, {mean(stage):.1f} s. {source("prune_time")}
* Beside version {speeds["about"]["base"]}, one thread: {", ".join(f"{case} {row['ratio']:.2f}" for case, row in speeds["rows"].items())}
  times its time. {source("planning_speed")}
"""


#: Network of `real_networks.py` -> what it is called, and the unit of its quality.
DEPLOYED = {
    "face": ("face detector, 300 k parameters", "F1 in %"),
    "fsrcnn_x2": ("FSRCNN x2", "PSNR in dB"),
    "pnet": ("P-Net of MTCNN", "F1 in %"),
    "rnet": ("R-Net of MTCNN", "F1 in %"),
    "onet": ("O-Net of MTCNN", "F1 in %"),
    "resnet20": ("ResNet-20", "top-1 in %"),
    "resnet56": ("ResNet-56", "top-1 in %"),
}


def deployed() -> str:
    """Trained networks that others deploy."""
    found, forms = load("real_networks"), load("float_forms")
    least = sum(min(part.values()) for part in forms["rows"].values())
    ways = list(dict.fromkeys(way for row in found["networks"].values() for way in row["ways"]))
    ends = ["bound", *["peak"][: any("peak" in row.get("ms", {}).get("1", {}) for row in found["networks"].values())]]
    rows = []
    for name, row in found["networks"].items():
        label, unit = DEPLOYED[name]
        cells = [f"{row['ways'][way]['quality']:.2f}" if way in row["ways"] else "" for way in ways]
        rows.append((f"{label}, {unit}", f"{row['float']:.2f}", *cells, *[""] * len(ends)))
        for threads, times in row.get("ms", {}).items():
            of = [f"{times[way] / times['torch']:.2f}" if way in times else "" for way in ("export", *ways, *ends)]
            rows.append((f"{label}, latency / torch's float file, {threads} thread{'s' if threads != '1' else ''}", *of))
            if there := row.get("openvino", {}).get(threads):
                of = [f"{there[way] / times['torch']:.2f}" if way in there else "" for way in ("export", *ways)]
                rows.append((f"the same in OpenVINO, {threads} thread{'s' if threads != '1' else ''}", *of, *[""] * len(ends)))
    return f"""\
## Networks that people deploy

Trained by others, static int8 without labels, at the effort levels of `quantize_static`, beside onnxruntime's quantizer, NNCF's and AIMET's. Every file ran
in ONNX Runtime, on pictures that calibrated nothing. Latencies on a CPU with {found["cpu"]}. *two*: "balanced", placed by measurement for
two threads. *bound*: each layer by the faster of its float and
its integer kernel, without a single conversion, which no placement can beat in this runtime. {source("real_networks")}

{table(("network", "float", *ways, *ends), rows)}

The float file of FSRCNN: the runtime's fastest kernels for its parts, of all forms tried (a transposed convolution in bands, by positions,
by blocks; slopes by second filters), take {least / forms["plain"]:.2f} of torch's file together, without a single conversion: no file of them is
{forms["plain"] / least:.2f} times as fast. {source("float_forms")}

No choice of layers can be better than the best placement. Each placement of the layers of these networks, in integers with the remedies of "balanced" or in
float; latencies as fractions of our float file. {source("every_placement")}

{table(("network", "placements", "faster than float", "the fastest", "its F1 in %", "the best of the faster ones", "its F1 in %"), every_placement())}

{without_vnni()}
"""


def without_vnni() -> str:
    """The same networks on a processor without VNNI, where plain int8 weights overflow."""
    there, here = load("real_networks"), load("real_networks_avx2")
    rows = []
    for name, row in here["networks"].items():
        label, unit = DEPLOYED[name]
        for way, found in row["ways"].items():
            ratio = row["ms"]["1"][way] / row["ms"]["1"]["torch"]
            known = there["networks"][name]["ways"][way]["quality"]
            rows.append(
                (f"{label}, {unit}", way, f"{row['float']:.2f}", f"{known:.2f}", f"{found['quality']:.2f}", f"{ratio:.2f}")
            )
    return f"""\
On a processor with {here["cpu"]} alone, kernels add pairs of products in int16: a file with plain int8 weights is another network there, and integers
save little time, or none. One draw of calibration images; latencies on one thread, as fractions of torch's float file there.
[real_networks.py](../benchmarks/real_networks.py), [all rows](../benchmarks/real_networks_avx2.md).

{table(("network", "way", "float", "with VNNI", "without", "latency without VNNI"), rows)}"""


def every_placement() -> list[tuple[str, ...]]:
    """Of each network: how many placements are faster than float, the fastest, and the one that decides best."""
    rows = []
    for name, placed in load("every_placement")["networks"].items():
        faster = [row for row in placed if row["ratio"] < 1]
        first, best = min(faster, key=lambda row: row["ratio"]), max(faster, key=lambda row: row["f1"])
        ends = [cell for row in (first, best) for cell in (f"{row['ratio']:.2f}", f"{row['f1']:.1f}")]
        rows.append((DEPLOYED[name][0], str(len(placed)), str(len(faster)), *ends))
    return rows


def budgets() -> str:
    """`compress` at several budgets."""
    found, without = load("budgets"), load("budgets_avx2")
    narrowest, on_vnni = (min(load(name)["rows"], key=lambda row: row["latency"]) for name in ("face_widths", "face_widths_vnni"))
    head = ("network", "at most", "chosen", "float", "quality", "latency", "size", "time")
    return f"""\
## From a budget to a file

`compress` called once for each budget, {found["about"]["trials"]} candidates, {found["about"]["finalists"]} finalist; quality is F1 or top-1 in %, latency and
size are shares of the uncompressed file's, measured again after the call. The last column: seconds of the call by those of the training of what was
chosen. {source("budgets")}

{table(head, kept_budgets(found))}

On a processor with AMX the face detector does not come to 0.35 by width: with {narrowest["width"]:g} of all widths, {narrowest["parameters"] // 1000} k parameters, its
fastest form, untrained, takes {narrowest["latency"]:.2f}. {source("face_widths")} With VNNI alone the same width takes {on_vnni["latency"]:.3f}:
[all rows](../benchmarks/face_widths_vnni.md).

On a processor with AVX2 alone, where integers save little time, training in fp32, {without["about"]["trials"]} candidates:
[all rows](../benchmarks/budgets_avx2.md). The row within half a point was chosen while half of what is lost after a short training was expected to stay, not
three tenths as now.

{table(head, kept_budgets(without))}
"""


def kept_budgets(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each budget."""
    labels = {"face": "face detector, no labels", "resnet20": "ResNet-20", "resnet56": "ResNet-56"}
    rows: list[tuple[str, ...]] = []
    for name, parts in found["networks"].items():
        for row in parts:
            asked = ", ".join(f"{key} {value}" for key, value in row["budget"].items())
            if "refused" in row:
                nearest = row["refused"].partition("that can is ")[2].partition(";")[0]
                rows.append((labels[name], asked, f"none; nearest: `{nearest}`", *[""] * 5))
                continue
            figures = [f"{row['float']:.2f}", f"{row['quality']:.2f}", f"{row['latency']:.2f}", f"{row['bytes']:.2f}"]
            rows.append((labels[name], asked, row["chosen"], *figures, f"{row['seconds'] / row['chosen_training']:.2f}"))
    return rows


def few_bits() -> str:
    """Weights of few bits, without labels."""
    found = load("low_bit")["networks"]
    labels = {
        "resnet20": "ResNet-20, trained on these pictures",
        "resnet20-12fca82f.th": "ResNet-20, trained on the original pictures",
        "resnet56": "ResNet-56, trained on these pictures",
        "face": "face detector, 300 k parameters, separable convolutions",
        "vit": "vision transformer of 6 layers, trained on these pictures",
    }
    peers, rows = ("onnxruntime", "ModelOpt", "MCT", "AIMET", "AIMET, AdaRound"), []
    for name, parts in found.items():
        cells = {(row["weights"], row["way"]): row for row in parts}
        whole = cells["8", "nearest"]
        for bits in dict.fromkeys(row["weights"] for row in parts if row["way"]):
            ways = [cells.get((bits, way)) for way in ("nearest", "learned", "tuned")]
            if bits.endswith("average"):
                ways = [cells.get((bits, way)) for way in ("mixed, checked", "mixed, learned")] + [None]
            size = next(row["bytes"] for row in ways if row is not None) / whole["bytes"]
            ways += [cells.get((bits, peer)) for peer in peers]
            figures = ["" if row is None else f"{row['quality']:.2f}" for row in ways]
            rows.append((labels.get(name, name), f"{cells['fp32', '']['quality']:.2f}", bits, f"{size:.3f}", *figures))
    short = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "vit": "vision transformer", "face": "face detector, no labels"}
    trained = []
    for network, arms in load("low_bit_qat").items():
        cells = {(row["weights"], row["way"]): row for row in found[network]}
        start, whole = cells["fp32", ""]["quality"], cells["8", "nearest"]["bytes"]
        for name, row in arms.items():
            size = f"{row['bytes'] / whole:.3f}"
            trained.append((short[network], name, f"{row['top1']:.2f}", f"{start - row['top1']:.2f}", size, row["epochs"]))
    costs = "; ".join(
        f"{row['network']}{', ' if ',' in row['way'] else ''}{row['way'].partition(', ')[2]} {row['seconds'] / 60:.1f} minutes and"
        f" {row['peak_gib']:.1f} GiB"
        for row in load("reconstruct_cost")["rows"][1:]
    )
    costs = f"Block reconstruction, 512 images, 60 steps a block, two threads, memory of the whole process: {costs}. {source('reconstruct_cost')}"
    return f"""\
## Few bits

ResNets and transformer: top-1 in % on 10,000 test pictures of CIFAR-10, one draw of 512 calibration pictures without labels; face detector: F1 in % of
confident cells against those of the float network. Executed in ONNX Runtime. *nearest* is `quantize_static(bits=)`, *learned* is `reconstruct_blocks_` after it, *tuned* `imitate_float_` after that;
"on average" are bits by layer of `choose_bits`; learned, with `check=False`. Its check takes uniform bits where the outputs say so: the choice
is right in two of three networks at 3 bits. Activations have 8 bits, in rows "4, A4" 4, but for the first and the last layer and sums of
residual paths. The last five columns are other quantizers with the same pictures and bits, all but onnxruntime's simulated; onnxruntime has no weights
of 3 and 2 bits, MCT none of 3. {source("low_bit")}

{table(("network", "fp32", "bits of weights", "file / int8 file", "nearest", "learned", "tuned", *peers), rows)}

Trained with labels: networks of the rows above, learned ranges, the first and the last layer and the sums of residual blocks in 8
bits, W2A2 of the ResNet-20 with hints; W1A1 are layers of signs (`Binarize`), computed in float: XNOR-Net++ (1909.13863), whose form they have, publishes a loss of 12.2 points
for a ResNet-18 on ImageNet (57.1 of 69.3 %), after many more epochs. {source("low_bit_qat")}

{table(("network", "weights and activations", "top-1, %", "lost", "file / int8 file", "epochs"), trained)}

{costs}
"""


def training_steps() -> list[dict[str, Any]]:
    """The rows of all groups of `training_speed.py`."""
    return [row for rows in load("training_speed")["groups"].values() for row in rows]


def joint_bits() -> str:
    """Channels and bits chosen together, beside one after the other."""
    found, rows = load("joint_bits"), []
    for size, ways in sorted(found["sizes"].items()):
        means = {way: mean(row["top1"] for row in draws.values()) for way, draws in ways.items()}
        turns = {way: top1 for way, top1 in means.items() if way.startswith(("mixed", "uniform"))}
        best = max(turns, key=lambda way: turns[way])
        rows.append((size, f"{means['joint']:.2f}", f"{turns[best]:.2f}", best, len(turns)))
    return f"""\
## Channels and bits together

ResNet-20 ({found["int8"]["top1"]:.2f} % with 8 bits and all channels, {found["int8"]["bytes"] / 1024:.0f} KiB) at sizes of its int8 file, without labels, all rows treated alike, one draw of 512 images:
`choose_channels_and_bits(check=False)`, and the best of pruning first (to several fractions of the parameters) and choosing bits
afterwards. Top-1 in % on 10,000 test pictures of CIFAR-10, executed in ONNX Runtime; the best is the best on these pictures. {source("joint_bits")}

{table(("of the int8 file", "together", "in turn, the best", "which is", "of so many"), rows)}
"""


def data_free() -> str:
    """Calibration by inputs made of BatchNorm statistics."""
    found = load("data_free")
    rows = [(r["inputs"], r["samples"], r["bits"], f"{r['top1']:.2f}", f"{r['db']:.1f}") for r in found["rows"]]
    return f"""\
## Calibration without data

ResNet-20 ({found["float"]:.2f} % in float), activations of 8 bits, calibrated by training pictures, by inputs that `synthesize` made of the BatchNorm
statistics (in {found["seconds"]:.0f} s), and by normally distributed noise; nothing is learned. Top-1 in % on 10,000 test pictures of CIFAR-10,
executed in ONNX Runtime. {source("data_free")}

{table(("calibrated by", "inputs", "bits of weights", "top-1 %", "SQNR dB"), rows)}
"""


def palettes() -> str:
    """Weights as palettes beside the uniform grid."""
    found = load("palettes")["rows"]
    whole = found["float"]
    rows = [
        (
            name,
            f"{row['top1']:.2f}",
            f"{row['db']:.1f}" if "db" in row else "",
            f"{row['bytes'] / 1024:.0f}",
            f"{row['bytes'] / whole['bytes']:.3f}",
            f"{row['load_ms']:.1f}",
            f"{row['ms'] / whole['ms']:.2f}",
        )
        for name, row in found.items()
    ]
    return f"""\
## Palettes

ResNet-20, all weights in few bits, first and last layer too; activations and products in float, nothing calibrated or trained. Top-1 in % on
10,000 test pictures of CIFAR-10, executed in ONNX Runtime. *uniform* has one scale for each channel and stores 3 bits in 4. {source("palettes")}

{table(("weights", "top-1 %", "SQNR of weights, dB", "KiB", "of the float file", "load, ms", "of float latency"), rows)}
"""


def repairs() -> str:
    """Networks that 8 bits break, and what `repair` made of them."""
    labels = {
        "scaled": "ResNet-20, a channel times 100; top-1 in %",
        "outlier": "ResNet-20, an unread channel of 400; top-1 in %",
        "sample": "ResNet-20, one bad calibration picture; top-1 in %",
        "separable": "face detector, depthwise pairs out of balance; F1 in %",
        "face": "face detector as published, `drop=3`; F1 in %",
    }
    rows = []
    for name, row in load("repair").items():
        figures = [f"{row[key]:.2f}" for key in ("float", "plain", "repaired")]
        rows.append((labels[name], *figures, f"{row['integer_macs']:.0%}", f"{row['seconds']:.0f}"))
    return f"""\
## Repair

Networks broken on purpose, and one that loses much by itself; executed files, data that chose nothing, no labels. What was found and what each
remedy bought: {source("repair")}

{table(("network", "float", "`quantize_static`", "`repair`", "MACs in integers", "seconds"), rows)}
"""


def families() -> str:
    """Families of published models."""
    rows = load("families")["rows"]

    def share(part: str, key: str) -> str:
        able = [row[part] for row in rows.values() if part in row and row.get("export", {}).get("torch", True)]
        return f"{sum(bool(found.get(key)) for found in able)} of {len(able)}"

    pruned = [row["prune"] for row in rows.values() if "prune" in row]
    half = sum(found.get("left", 1) <= 0.505 for found in pruned)
    libraries = " and ".join(
        f"{sum(name.startswith(start) for name in rows)} {label}"
        for start, label in (("timm/", "of timm"), ("hf/", "of Hugging Face"))
    )
    return f"""\
## Families

Small variants of published architectures with random weights, {libraries}, each in a process of its own. Not every part was run
for every family, nor at one commit; a figure is of those for which it was, without those that torch cannot export. int8 files are of target
`X86`. {source("families")}

* Float files that ONNX Runtime agrees with: {share("export", "verified")}; static int8, other batch sizes: {share("static", "verified")};
  dynamic int8, other batches and lengths: {share("dynamic", "verified")}.
* Half of the MACs removed without a hint: {half} of {len(pruned)}; every plan was compared with the network whose removed values are
  zero: {sum(bool(found.get("proved")) for found in pruned)} of {sum("left" in found for found in pruned)} agree.
"""


def sparsity() -> str:
    """Masks of single weights."""
    runs, cost = load("sparsity")["runs"], load("mask_cost")["rows"]
    keys = sorted({(run["ratio"], run["method"]) for run in runs})
    rows = []
    for ratio, method in keys:
        accuracies = [100 * run["accuracy"] for run in runs if (run["ratio"], run["method"]) == (ratio, method)]
        rows.append((f"{ratio:.0%}", method, len(accuracies), spread(accuracies)))
    swept = load("sweep_cifar")
    found: dict[tuple[str, float], list[float]] = {}
    for point in swept["points"]:
        found.setdefault((point["method"], point["ratio"]), []).append(100 * point["metric"])
    ratios = sorted({ratio for _, ratio in found})
    curves = [
        (method, *(f"{mean(found[method, ratio]):.2f}" for ratio in ratios))
        for method in dict.fromkeys(method for method, _ in found)
    ]
    return f"""\
## Sparsity

ResNet-20 on CIFAR-10, {load("sparsity")["settings"]["steps"]} steps. {source("sparsity")} On digits, three seeds, 50 to 95 %:
[all rows](../benchmarks/sparsity_digits.md).

{table(("zeros", "method", "seeds", "accuracy %"), rows)}

What is left after removing more and more at once, and training again in three ways ([picture](../benchmarks/sweep_cifar.svg)): ResNet-20 on
{swept["about"]["images"]:,} images, {swept["about"]["epochs"]} epochs and two thirds of them again, one seed, at 80 and 90 % the mean of {len(swept["dense"])}. Unpruned it
gains from the longer training too: the first column. {source("sweep_cifar")}

{table(("training again", *(f"{ratio:.0%}" for ratio in ratios)), curves)}

* Holding masks costs {min(r["cost"] for r in cost):.1%} to {max(r["cost"] for r in cost):.1%} of a training step. {source("mask_cost")}
  Zeros make files smaller when they are compressed; no speed is claimed for them.
"""


def distillation() -> str:
    """Distillation."""
    cifar, losses, teacher = load("distill_cifar"), load("distill_losses")["bars"], load("distill_teacher")["rows"]
    arms = list(dict.fromkeys(row["arm"] for row in cifar["rows"]))
    names = {"alone": "no teacher", "kd": "soft targets", "dkd": "DKD"}
    rows = [(names[arm], spread(100 * row["accuracy"] for row in cifar["rows"] if row["arm"] == arm)) for arm in arms]
    chunked = losses["chunked_soft_targets / soft_targets"]
    memory = sorted(bar["memory"] for name, bar in losses.items() if "rkd" in name)
    labels = load("few_labels")
    few = [
        (task, labels["rows"][task][name], spread(100 * accuracy for accuracy in accuracies))
        for task, rows_of_task in labels["accuracy"].items()
        for name, accuracies in rows_of_task.items()
    ]
    return f"""\
## Distillation

A ResNet-{cifar["settings"]["depth"]} on CIFAR-10, {cifar["settings"]["epochs"]} epochs, three seeds; its teacher is a ResNet-56 with {cifar["teacher"]:.2%}.
{source("distill_cifar")}

{table(("training", "accuracy %"), rows)}

* Chunked KL at a vocabulary of 32,000 takes {chunked["memory"]:.1f} times less memory than plain KL; RKD {memory[0]:.0f} to {memory[-1]:.0f}
  times less than a direct implementation. {source("distill_losses")}
* A teacher in the loop costs {teacher["fp32"]["added_share"]:.0%} of its own forward pass in fp32; cached predictions cost nothing
  that can be measured. {source("distill_teacher")}

Where few samples have labels, three seeds each. {source("few_labels")}

{table(("task", "network and training", "accuracy %"), few)}
"""


def mixed() -> str:
    """Mixed precision on a CPU."""
    found = load("mixed_cpu")
    rows = [(r["row"], f"{r['ms']:.0f}", f"{r['times_fp32']:.2f}x") for r in found["CPU-2"]]
    step = {r["row"]: r["times_bare"] for r in found["CPU-1"]}
    bare = ("SPLIT_BF16", "KAHAN_BF16", "SR_BF16")
    unasked, listed = (
        ", ".join(f"{step[f'{name}, {form}']:.2f} ({name})" for name in bare) for form in ("as it is chosen", "foreach")
    )
    parts: dict[str, dict[str, Any]] = {}
    for row in load("sources")["rows"]:
        parts.setdefault(row["network"], {})[row["policy"]] = row
    steps = [name for name in parts["UNet"] if not name.startswith("FP32")]
    articles = [
        (name, f"{by['FP32 (O0)']['step_ms']:.1f}", *(f"{by[policy]['of_fp32']:.2f}x" for policy in steps))
        for name, by in parts.items()
    ]
    return f"""\
## Mixed precision

ResNet-20, one thread of a CPU with bf16 units: a training step, and images a second against fp32 in the same memory layout. On a GPU
nothing has been measured yet. {source("mixed_cpu")} What diverges without loss scaling: [table](../benchmarks/mixed_divergence.md).

{table(("policy", "ms a step", "images a second"), rows)}

A step of the networks that articles measure, small batches, in parts of fp32's; all have learned about the same in an epoch of 30 steps
but for O3, weights in fp16 without masters, which learned nothing. Memory too: {source("sources")}

{table(("network", "ms in fp32", *steps), articles)}

* The optimizer's step with fp32 masters takes {step["MASTER_BF16, foreach"]:.2f} times a bare fused AdamW, {step["MASTER_BF16, compiled"]:.2f} times
  compiled; torch's GradScaler {step["fused AdamW + torch GradScaler"]:.2f} times. Weights without masters, as the step is chosen where a
  compiler is at hand: {unasked}; by torch's operations: {listed}.
"""


QAT_STEPS = ("QAT, ranges follow", "QAT, ranges held")


def runs() -> str:
    """Runs that survive."""
    resume = load("resume_cost")
    alone, both, two, exact = load("processes")["times"].values()
    steps = {(row["group"].partition(" ")[0].strip(","), row["step"]): row["ratio"] for row in training_steps()}
    follow, held = (f"{steps['ResNet-20', kind]:.2f} ({steps['MobileNetV2', kind]:.2f})" for kind in QAT_STEPS)
    masters = ", ".join(
        f"{steps['step', policy]:.2f} ({policy})" for policy in ("MASTER_BF16", "SPLIT_BF16", "KAHAN_BF16", "SR_BF16")
    )
    qat_peak = max(row["peak"] for row in training_steps() if row["step"] in QAT_STEPS)
    last, qat_last = (
        f"{steps['ResNet-20', kind]:.2f} ({steps['MobileNetV2', kind]:.2f})"
        for kind in ("float, channels_last", f"{QAT_STEPS[1]}, channels_last")
    )
    taught = {step: ratio for (_, step), ratio in steps.items() if step.startswith(("teacher", "predictions"))}
    teachers = ", ".join(f"{ratio:.2f} ({step})" for step, ratio in taught.items())
    with_teacher, tuning, rounding = (steps["half", step] for step in ("torch, with the teacher", "fine-tuning", "QAT"))
    return f"""\
## Runs

* Checkpoints inside a training cost {resume["resnet20"]["share"]:.3%} of ResNet-20's training time at one a minute. {source("resume_cost")}
* Two processes on two cores take a step of ResNet-20 in {two / alone:.2f} of the time of one process on one core, and in {two / both:.2f} of one that has
  both; with `exact=True` in {exact / both:.2f}. {source("processes")}
* A step of QAT takes {follow} times the CPU time of a float step of ResNet-20 (of MobileNetV2) while the ranges follow the batches, {held}
  with ranges held; its tensors take at most {qat_peak:.2f} times the memory. The float step of ResNet-20 with
  `Train(compile=True)` takes {steps["ResNet-20", "float, compiled"]:.2f} of it, with `channels_last=True` {last}, under QAT with ranges held {qat_last}. The optimizer's step without compilation, of a plain AdamW: {masters}. {source("training_speed")}
* A step of ResNet-20 under autocast with a ResNet-56 as its teacher, of the step without one: {teachers}. {source("training_speed")}
* Half of a ResNet-56 under the whole one, both under autocast: a loop of torch alone takes {with_teacher:.2f} times its step without the teacher,
  fine-tuning in a recipe {tuning:.2f}, QAT {rounding:.2f}. {source("training_speed")}
"""


def machines() -> str:
    """The same files on other machines."""
    found = load("machines")
    names = list(dict.fromkeys(name for row in found["rows"].values() for name in row["cells"]))
    kinds = {name: [row for title, row in found["rows"].items() if kind(title)] for name, kind in FILE_KINDS.items()}
    rows = [(name, *(cell_of(group, name) for group in kinds.values())) for name in names if not name.startswith("OpenVINO")]
    proved = [row for title, row in found["rows"].items() if "saturates" not in title]
    simulated = sum(all("whatever the inputs" in text for text in row["simulated"].values()) for row in proved)
    single = [
        cell["one by one"]
        for title, row in found["rows"].items()
        for cell in row["cells"].values()
        if "saturates" not in title and not title.startswith("lstm,") and "kernels" in cell.get("one by one", {})
    ]
    kernels, rounded = ([sum(cell[key][k] for cell in single) for k in (0, 1)] for key in ("kernels", "roundings"))
    inside = [
        cell["db"]
        for title, row in found["rows"].items()
        for name, cell in row["cells"].items()
        if title.endswith("OPENVINO") and name.startswith("OpenVINO") and "db" in cell
    ]
    openvino = (
        f" Inside OpenVINO, `OPENVINO` files keep {min(inside):.0f} to {max(inside):.0f} dB to the file as written ({len(inside)} files)."
        if inside
        else ""
    )
    return f"""\
## The same files on other machines

Integers / classes in percent that are those of exact sums, the least over the files (their number); networks, samples and every cell:
{source("machines")}

{table(("machine", *kinds), rows)}

* {simulated} of {len(proved)} files for `X86`, `ARM`, `OPENVINO` and dynamic ones are proved from their weights alone to give the same sums on
  VNNI, AMX, AVX2, AVX512, NEON and WASM.{openvino}
* One operator at a time, each given equal integers: {kernels[0]:,} of {kernels[1]:,} results of integer kernels differ on all these machines, and
  {rounded[0]:,} of {rounded[1]:,} integers that are rounded from float values. These are a machine's float arithmetic (the order of a sum,
  `exp`, `tanh`), whose last bits decide where a value lies near the middle of two integers. Run as a whole, one such integer moves
  others: that is all by which dynamic files, networks with layer norm, softmax or GELU (they stay float: ViT), and `OPENVINO` files
  outside OpenVINO, whose additions stay float there, differ. An LSTM is one operator, which rounds its state at every word; it is
  counted on one word.
* The emulated aarch64 has SME: for the products of dynamic files ONNX Runtime takes other kernels there, which round their inputs
  otherwise. Integers are compared without them, classes with them.
"""


def across_runtimes() -> str:
    """The classes of one file in several runtimes."""
    found = load("across_runtimes")
    names = {re.sub(r" [\d.]+$", "", name): name for row in found["rows"] for name in row["runtimes"]}
    rows = [(row["file"], *(row["runtimes"][full]["differ"] for full in names.values())) for row in found["rows"]]
    return f"""\
## One file in four runtimes

Of 1,000 images, how many get another class than in ONNX Runtime; each file in a bundle of `ck.export.bundle`. {source("across_runtimes")}

{table(["file", *(full.replace("infer.py", "`infer.py`") for full in names.values())], rows)}

A file that is quantized for ONNX Runtime runs in OpenVINO with other roundings; `target=ck.quant.OPENVINO` gives one that both compute alike.
"""


def technique_tables() -> dict[str, str]:
    """Title -> table of what one network becomes by each technique, with its title's first row as the measure of latency."""
    made = {}
    for title, found in load("one_network")["tables"].items():
        rows = []
        for row in found:
            size = f"{row['bytes'] / 1024:.0f} KiB" + (f", {row['zipped'] / 1024:.0f} in a zip" if row.get("zipped") else "")
            latency = f"{row['latency_ms'] / found[0]['latency_ms']:.2f}"
            time = "-" if row["seconds"] is None else f"{row['seconds']:.0f} s"
            rows.append((row["arm"], size, latency, f"{row['macs'] / 1e6:.1f} M", f"{100 * row['metric']:.2f}", time))
        made[title] = table(("technique", "file", "latency", "MACs", "accuracy %", "time"), rows)
    return made


def one_network() -> str:
    """One network, every technique."""
    tables = "\n\n".join(f"{title}:\n\n{rows}" for title, rows in technique_tables().items())
    return f"""\
## One network, every technique

CIFAR-10, one seed, one thread. Accuracy on 10,000 test images, executed in ONNX Runtime; latency of one image as a fraction of the first row's
file, in turn. Compressed networks imitate the ResNet-20 for one epoch where they train at all; the small ones train for three epochs from the
same start, so that they are compared with each other and not with a finished network. The machine was shared, so times are rough. {source("one_network")}

{tables}
"""


def recipes() -> str:
    """The recipes as their users run them."""
    found = load("gallery")
    return f"""\
## Recipes

[The page of recipes](../recipes/README.md) shows {len(found)} of them with their figures, times and pictures, as
[gallery.py](../benchmarks/gallery.py) ran them.
"""


def cell_of(group: list[dict[str, Any]], machine: str) -> str:
    """The least integers and classes of a group of files on a machine."""
    here = [row["cells"][machine] for row in group if "failed" not in row["cells"].get(machine, {"failed": ""})]
    integers, classes = ([cell[key] for cell in here if cell.get(key) is not None] for key in ("integers", "classes"))
    return f"{share(min(integers))} / {share(min(classes))} ({len(here)})" if integers else "-"


def saturation() -> str:
    """What weights that cannot overflow cost."""
    found = load("saturation")
    losses = {name: mean(draw["x86"] - draw["overflow"] for draw in draws) for name, draws in found["networks"].items()}
    worst = min(losses, key=lambda name: losses[name])
    trained = [
        f"{name.replace('resnet', 'ResNet-')} {mean(r['x86 top1'] - r['overflow top1'] for r in rows):+.2f} points,"
        f" {mean(r['x86'] - r['overflow'] for r in rows):+.2f} dB ({len(rows)} draws, {rows[0]['samples']:,} test images; right with one kind of"
        f" weights alone: {sum(r['only x86 right'] for r in rows)} / {sum(r['only overflow right'] for r in rows)})"
        for name, rows in found["trained"].items()
    ]
    cost = [
        f"{name} {times['verify']['all'] / times['verify']['plain']:.2f}, {times['quantize']['x86'] / times['quantize']['overflow']:.2f}"
        f" and {times['QAT step']['x86'] / times['QAT step']['overflow']:.2f}"
        for name, times in found.get("costs", {}).items()
    ]
    said = (
        f"""
* CPU time of `verify_onnx(machines="all")`, in times of that without machines, of `quantize_static` and of a QAT step, in times of
  those with weights that may overflow: {"; ".join(cost)}."""
        if cost
        else ""
    )
    return f"""\
## Weights that cannot overflow

Against int8 weights that may overflow int16, both with exact sums. {source("saturation")}

* {len(losses)} untrained torchvision networks: {mean(losses.values()):+.2f} dB on average, {worst} {losses[worst]:+.2f} dB.
* Trained on CIFAR-10, means over draws of calibration images: {"; ".join(trained)}.{said}
* Files run as fast: they differ in values only, which a test holds.
"""


def share(fraction: float) -> str:
    """A percentage that is 100 only where all are equal."""
    return "100" if fraction == 1 else f"{min(100 * fraction, 99.9999):.6g}" if fraction > 0.999 else f"{100 * fraction:.1f}"


#: Columns of the table of machines -> which files are meant.
FILE_KINDS: dict[str, Callable[[str], bool]] = {
    "static, `X86` and `ARM`": lambda title: title.endswith((" X86", " ARM")),
    "static, `OPENVINO`": lambda title: title.endswith(" OPENVINO"),
    "dynamic": lambda title: "dynamic" in title,
    "weights that may overflow": lambda title: "saturates" in title,
}


def old_runtimes() -> str:
    """Files in older releases of ONNX Runtime."""
    rows = load("old_runtimes")["rows"]
    releases = list(rows[0]["errors"])
    least = {row["model"]: row for row in rows}  # the second of each model is of the lowest opset
    everywhere = [name for name, row in least.items() if None not in row["errors"].values()]
    others = [
        f"{name} {next(release for release, error in row['errors'].items() if error is not None)}"
        for name, row in least.items()
        if name not in everywhere and any(error is not None for error in row["errors"].values())
    ]
    errors = [error for name in everywhere for error in least[name]["errors"].values()]
    return f"""\
## Older runtimes

* Files written with `opset="lowest"` load and run in {len(releases)} releases of ONNX Runtime, {releases[0]} to {releases[-1]}: {", ".join(everywhere)} (at
  most {max(errors):.1g} steps from the installed release). Later releases are needed by {", ".join(others)}. {source("old_runtimes")}
"""


def proof_mutants() -> str:
    """What damage `verify_onnx` lets through."""
    rows = load("proof_mutants")
    counts = list(rows[0]["survivors"])[:-1]
    cells = []
    for form in [*dict.fromkeys(row["form"] for row in rows), "all"]:
        of = [row for row in rows if form in (row["form"], "all")]
        passing = [sum(row["survivors"][n] for row in of) for n in counts]
        cells.append((form, sum(row["mutants"] for row in of), sum(row["material"] for row in of), *passing))
    refused, intact = sum(sum(row["refused"].values()) for row in rows), len(rows) * len(counts)
    return f"""\
## How much damage `verify_onnx` lets through

Files of six small trained networks in six forms, changed in one place at a time: a channel of weights that is zero, negated or in the place of another, a lost
bias, a scale of a half, a zero point that is off, no activation function. *material*: the mutants that lose more than a point of accuracy, or
leave less than 20 dB of an output, on images that nothing else saw. Behind that: how many of those are taken for the model's file. Of {intact} intact
files {refused or "none"} {"is" if refused == 1 else "are"} refused. {source("proof_mutants")}

{table(("form", "mutants", "material", *(f"pass with {n} image{'s' * (n != '1')}" for n in counts)), cells)}
"""


def predicted_latencies() -> str:
    """The latency model of a search, on candidates that it was not made of."""
    networks = load("latency_model")["networks"]
    named = [
        (name, kind, [r for r in found["rows"] if r["precision"] == kind])
        for name, found in networks.items()
        for kind in ("fp32", "int8")
    ]
    named.append(("all", "both", [row for found in networks.values() for row in found["rows"]]))
    elsewhere = [row for found in load("latency_model_amx")["networks"].values() for row in found["rows"]]

    def errors(rows: list[dict[str, Any]], column: str) -> str:
        found = sorted(abs(row[column] / row["milliseconds"] - 1) for row in rows)
        return f"{found[len(found) // 2]:.1%} ({found[int(0.9 * (len(found) - 1))]:.1%})"

    rows = [(name, kind, len(some), errors(some, "predicted"), errors(some, "by_macs")) for name, kind, some in named]
    return f"""\
## Latencies that are predicted

Files of pruned networks that were not run, predicted from the operators of twelve others of the same network: the middle relative error, and in brackets
the one that nine of ten do not exceed; beside it, a line through the MACs of the same twelve files. {source("latency_model")}

{table(("network", "precision", "files", "predicted", "by MACs"), rows)}

On a processor with AMX all {len(elsewhere)} are predicted to {errors(elsewhere, "predicted")}: \
[all rows](../benchmarks/latency_model_amx.md).
"""


SECTIONS: tuple[Callable[[], str], ...] = (
    chain,
    chain_cifar,
    depth_width,
    refit_blocks,
    budgets,
    one_network,
    static,
    dynamic,
    deployed,
    few_bits,
    joint_bits,
    data_free,
    palettes,
    repairs,
    channels,
    families,
    sparsity,
    distillation,
    mixed,
    runs,
    machines,
    across_runtimes,
    saturation,
    old_runtimes,
    proof_mutants,
    recipes,
)
if (BENCHMARKS / "latency_model.json").exists():  # measured on a machine that does nothing else
    SECTIONS += (predicted_latencies,)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section() for section in SECTIONS)])


def points() -> list[tuple[str, str, float, float]]:
    """(network, file, milliseconds, accuracy in percent) of the picture: trained CIFAR-10 networks before and after int8."""
    found = load("quantize_cifar")
    rows = []
    for name, result in found["static"].items():
        times = found["latency"][name]["b1"]
        label = name.replace("resnet", "ResNet-")
        rows.append((label, "fp32", times["fp32_ms"], result["fp32"]["top1"]))
        for tool, kind in (("ort", "int8, onnxruntime"), ("ours", "int8, compresskit")):
            rows.append((label, kind, times["fp32_ms"] * times[tool], mean(run["top1"] for run in result[tool])))
    return rows


COLORS = {"fp32": "#5f6b7a", "int8, onnxruntime": "#c2703d", "int8, compresskit": "#1f8f6b"}  # seen on white and on black
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 64, 700, 16, 268
FONT = 'font-family="sans-serif" font-size="13" fill="#7d8794"'


def at(ms: float, accuracy: float) -> tuple[float, float]:
    """The place in the picture of 0 to 2.8 ms and 87 to 90.5 %."""
    return LEFT + (RIGHT - LEFT) * ms / 2.8, TOP + (BOTTOM - TOP) * (90.5 - accuracy) / 3.5


def picture() -> str:
    """Accuracy against latency as an SVG."""
    title = "CIFAR-10 accuracy against latency of ResNet-20 and ResNet-56, in fp32 and in int8"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{title}</title>']
    for percent in (87, 88, 89, 90):
        x, y = at(0, percent)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#7d8794" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.1f}" text-anchor="end" {FONT}>{percent}</text>')
    for halves in range(6):
        x, _ = at(halves / 2, 87)
        parts.append(f'<text x="{x:.0f}" y="{BOTTOM + 18}" text-anchor="middle" {FONT}>{halves / 2:.1f}</text>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 42}" text-anchor="middle" {FONT}>ms for one image, one thread</text>'
    )
    middle = (TOP + BOTTOM) // 2
    parts.append(f'<text x="18" y="{middle}" transform="rotate(-90 18 {middle})" text-anchor="middle" {FONT}>accuracy, %</text>')
    for name, kind, ms, accuracy in points():
        x, y = at(ms, accuracy)
        label = f"{name}, {kind}: {accuracy:.2f} %, {ms:.2f} ms"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{COLORS[kind]}"><title>{label}</title></circle>')
        if kind == "fp32":
            parts.append(f'<text x="{x:.1f}" y="{y + 24:.1f}" text-anchor="middle" {FONT}>{name}</text>')
    for line, (kind, color) in enumerate(COLORS.items()):
        y = BOTTOM - 64 + 20 * line
        parts.append(
            f'<circle cx="{RIGHT - 150}" cy="{y}" r="5" fill="{color}"/><text x="{RIGHT - 138}" y="{y + 4}" {FONT}>{kind}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    RESULTS.write_text(page())
    PICTURE.write_text(picture())
