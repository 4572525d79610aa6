"""Write the pages of `docs/guide` that quote figures, from `benchmarks/*.json`: `python docs/make_guide.py`.

A test compares the committed pages with what this script makes of the committed files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_results import HERE, load, spread, table, technique_tables  # the two scripts share how they read and print

GUIDE = HERE / "guide"


def linked(name: str) -> str:
    """A link to the full table of a benchmark."""
    return f"[{name}](../../benchmarks/{name}.md)"


def one_network() -> str:
    """What one network becomes by each technique."""
    tables = "\n\n".join(f"{title}:\n\n{rows}" for title, rows in technique_tables().items())
    return f"""\
## One network: ResNet-20 and ResNet-8 on CIFAR-10

Accuracy on the 10,000 test images, executed in ONNX Runtime on one thread; latency of one image as a fraction of the first row's file. What
trains to be compressed imitates the network as it was for one epoch. The small networks train for three epochs from the same start: compare
them with each other. One seed, so a tenth of a point means nothing; the machine was shared, so times are rough. {linked("one_network")}

`Depth` and `LowRank` are `compresskit.prune.depth.Depth` and `compresskit.prune.low_rank.LowRank`; the other stages of the first table are in
`compresskit` itself (`ck.StaticQuant`).

{tables}
"""


def chain() -> str:
    """The stages of the chain, one after another."""
    runs = load("digits_chain")["runs"]
    rows = []
    for stages in zip(*runs, strict=True):
        name = stages[0]["stage"]
        kib = mean(stage["bytes"] for stage in stages) / 1024
        accuracy = spread((100 * stage["metric"] for stage in stages), 2)
        seconds = mean(stage["seconds"] for stage in stages)
        rows.append((name, f"{kib:.0f} KiB", f"{mean(s['latency_ms'] for s in stages):.3f} ms", accuracy, f"{seconds:.0f} s"))
    return f"""\
## One after another: handwritten digits

`recipes/digits.py`, {len(runs)} seeds, each stage on the result of the one before it. {linked("digits_chain")}

{table(("stage", "file", "latency", "accuracy %", "time of the stage"), rows)}
"""


def precision() -> str:
    """Half, autocast, masters."""
    steps = load("mixed_cpu")["CPU-2"]
    rows = [(row["row"], f"{row['ms']:.0f}", f"{row['times_fp32']:.2f}x") for row in steps]
    unstable = load("mixed_divergence")
    fates = [
        (row["row"], part, row["seeds finite"], "-" if row["test"] == "nan" else f"{row['test']:.4g}", f"{row['skipped']:.0f}")
        for part in ("sum", "mean")
        for row in unstable[part]
    ]
    return f"""\
## Float, autocast, masters

A training step of ResNet-20 on one thread of a CPU with bf16 units; images a second against fp32 in the same memory layout.
Not measured on a GPU. {linked("mixed_cpu")}; memory: [mixed precision](../mixed.md#policies)

{table(("policy", "ms a step", "images a second"), rows)}

A small network whose loss is a sum (large gradients) or a mean (small ones): fp16 without a loss scale gets nan in one and hardly learns in
the other. Test: squared error a pixel of the sum, accuracy of the mean. {linked("mixed_divergence")}

{table(("policy", "loss", "seeds finite", "test", "steps skipped"), fates)}
"""


def few_bits() -> str:
    """Dynamic and weight-only quantization."""
    kept = {"fp32": "float", "ours": "`quantize_dynamic`", "ours, words in float": "`quantize_dynamic`, embeddings in float"}
    found = [r for r in load("quantize_dynamic")["rows"] if (r["model"], r["batch"], r["length"]) == ("minilm", 1, 128)]
    rows = [
        (kept[r["file"]], f"{r['bytes'] / 1e6:.1f} MB", f"{r['ratio']:.2f}", "-" if r["file"] == "fp32" else f"{r['sqnr']:.1f}")
        for r in found
        if r["file"] in kept
    ]
    seeds = load("quantize_weights")["seeds"]
    weights = [
        (
            name,
            f"{mean(seed[name]['bytes'] for seed in seeds) / 1e6:.2f} MB",
            spread((100 * seed[name]["accuracy"] for seed in seeds), 2),
            "-" if name == "float" else f"{mean(seed[name]['db'] for seed in seeds):.1f}",
        )
        for name in ("float", "int4 nearest", "int4 GPTQ", "int4 AWQ", "int4 AWQ + GPTQ", "int3 nearest", "int3 GPTQ")
    ]
    return f"""\
## Text: dynamic, and few bits

A MiniLM, batch 1, length 128, latency as a fraction of the float file's; dB against the float outputs. {linked("quantize_dynamic")}

{table(("method", "file", "latency", "SQNR dB"), rows)}

A small transformer trained on SST-2, {len(seeds)} seeds, weights alone, in blocks. {linked("quantize_weights")}

{table(("weights", "file", "accuracy %", "SQNR dB"), weights)}
"""


def teachers() -> str:
    """With a teacher and without."""
    cifar, rows = load("distill_cifar"), load("prune_cifar")["rows"]
    names = {"alone": "no teacher", "kd": "soft targets (`imitate()`)", "dkd": "DKD"}
    small = []
    for arm, name in names.items():
        runs = [row for row in cifar["rows"] if row["arm"] == arm]
        accuracy = spread(100 * row["accuracy"] for row in runs)
        small.append((name, accuracy, f"{mean(row['seconds'] for row in runs) / 60:.0f} min"))
    labels = {
        "pruned, 10 epochs": "no teacher",
        "taught, 10 epochs": "soft targets of the dense network",
        "taught by DKD and hints, 10 epochs": "DKD, and hints (features)",
        "taught on mixtures, and hints, 10 epochs": "soft targets on mixtures, and hints",
        "blocks removed, taught by the checkpoint, 10 epochs, fp32": "blocks removed instead of channels, soft targets of the network before it",
    }
    pruned = [(text, f"{rows[f'resnet56 | compresskit | {name} | 0']['tuned']:.2f}") for name, text in labels.items()]
    return f"""\
## With a teacher

ResNet-{cifar["settings"]["depth"]} under a ResNet-56, {cifar["settings"]["epochs"]} epochs, three seeds. The machine was shared, so the times are rough. {linked("distill_cifar")}

{table(("training", "accuracy %", "time"), small)}

ResNet-56 with half of its MACs, ten epochs, one seed. {linked("prune_cifar")}

{table(("training", "accuracy %"), pruned)}

Responses, features and relations beside each other: the first tables of this page. Other losses of relations (CRD, ...) are in the library and
tested; their accuracy has not been measured.
"""


def comparison() -> str:
    """The page of comparisons."""
    head = """\
# Comparison tables

Written by `python docs/make_guide.py` from the JSON files in [benchmarks/](../../benchmarks); all figures: [results](../results.md).
"""
    return "\n".join([head, one_network(), chain(), precision(), few_bits(), teachers()])


def gains() -> dict[str, str]:
    """What each technique gained where it was measured."""
    cifar, channels, zoo = load("quantize_cifar"), load("prune_cifar")["rows"], load("quantize_dynamic")["rows"]
    int8 = {name: found["b1"]["ours"] for name, found in cifar["latency"].items()}
    size = [mean(run["kib"] for run in found["ours"]) / found["fp32"]["kib"] for found in cifar["static"].values()]
    lost = [mean(run["top1"] for run in found["ours"]) - found["fp32"]["top1"] for found in cifar["static"].values()]
    arms = {arm: mean(r["accuracy"] for r in load("distill_cifar")["rows"] if r["arm"] == arm) for arm in ("alone", "kd")}
    text = next(r for r in zoo if (r["model"], r["file"], r["batch"], r["length"]) == ("minilm", "ours", 1, 128))
    bf16 = next(row for row in load("mixed_cpu")["CPU-2"] if row["row"] == "MASTER_BF16")
    face = load("real_networks")["networks"]["face"]
    gptq = mean(seed["int4 GPTQ"]["kl"] / seed["int4 nearest"]["kl"] for seed in load("quantize_weights")["seeds"])
    sparse = [r for r in load("sparsity")["runs"] if (r["ratio"], r["method"]) == (0.5, "gradual")]
    return {
        "static": f"{span(int8.values())} of the latency, {span(size)} of the bytes, {span(lost, '+.2f')} points (ResNet-20, ResNet-56)",
        "effort": f"F1 {face['ways']['fast']['quality']:.1f} to {face['ways']['balanced']['quality']:.1f} % (a face detector)",
        "dynamic": f"{text['ratio']:.2f} of the latency, {text['sqnr']:.0f} dB (MiniLM)",
        "weights": f"{gptq:.2f} of the KL divergence of nearest rounding (GPTQ, int4)",
        "prune": f"{channels['speed | resnet20']['faster']['ours']:.2f} times faster at half of the MACs (ResNet-20),"
        f" {channels['speed | mobilenet_v2']['faster']:.2f} times (MobileNetV2)",
        "sparse": f"{mean(run['zip'] / run['onnx'] for run in sparse):.2f} of the bytes in a zip at 50 % zeros; no speed",
        "distill": f"{100 * (arms['kd'] - arms['alone']):+.1f} points (ResNet-8 under ResNet-56)",
        "bf16": f"{bf16['times_fp32']:.2f} times as many images a second (a CPU with bf16 units)",
    }


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The range of some numbers, as one where they are printed alike."""
    shown = [format(value, form) for value in sorted(values)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def which() -> str:
    """The page that says which technique to use."""
    gain = gains()
    goals = [
        ("faster on a CPU, without training", "`StaticQuant`, [quantize_static](../quantization.md)", gain["static"], "minutes, a few hundred inputs", "accuracy of narrow networks"),
        ("the same, where it lost accuracy", '`effort="balanced"`, [effort](../quantization.md#effort)', gain["effort"], "minutes", "some layers stay float"),
        ("the same, and you have labels and time", "`QAT`, [QAT](../quantization.md)", "[measured](../results.md#static-int8-and-qat)", "epochs, about twice a float step each", "a training that has to be tuned"),
        ("faster text on a CPU", "`DynamicQuant`, [quantize_dynamic](../quantization.md)", gain["dynamic"], "seconds, one example", "ranges are found at run time: small models gain less"),
        ("a smaller file of a large matrix model", "`WeightQuant`, [few bits](../quantization.md#weights-in-few-bits)", gain["weights"], "minutes, a hundred inputs", "not faster by itself"),
        ("fewer operations in every runtime", "`Prune`, [channels](../pruning.md#channels)", gain["prune"], "a fine-tuning", "accuracy, more of it the deeper the cut"),
        ("a file that compresses well", "`Sparsify`, [masks](../pruning.md#masks)", gain["sparse"], "a fine-tuning", "no runtime here gets faster by zeros"),
        ("a small network as good as can be", "`Distill`, [distillation](../distillation.md)", gain["distill"], "the teacher's forward pass in each step", "a teacher that is too large"),
        ("a shorter training", "`MASTER_BF16`, [mixed precision](../mixed.md)", gain["bf16"], "one argument", "needs a processor with bf16 units"),
    ]  # fmt: skip
    return f"""\
# Which technique when

Written by `python docs/make_guide.py`. A gain is what was measured on the network that is named, not a promise for yours:
[comparison tables](comparison.md), [all results](../results.md).

{table(("you want", "use", "gain where it was measured", "cost", "risk"), goals).replace("--:", "---")}

## By what you have

| you have | start with | then |
|---|---|---|
| a trained model and unlabelled inputs | `quantize_static` | `effort="balanced"` where [accuracy dropped](accuracy.md) |
| labels, and time for a fine-tuning | `Prune` with `finetune=`, then `StaticQuant` | `QAT` in its place |
| labels, and time for whole trainings | `Distill` into a smaller network, `Prune`, `QAT` | a larger student |
| no data at all | `quantize_dynamic` (linear layers) with one made-up input of the right shape | any real inputs |
| a model that cannot be captured whole | [`inside="backbone"`](detection.md) | |
| a deadline in milliseconds, or a largest size | `ck.compress(model, task, ck.at_most(latency="5ms"), out="runs/fast")`, [from a budget to a file](../compress.md) | `train=` or `minutes=`, so that candidates are trained |
| a fraction of the latency that may stay | `Prune(budget=ck.keep(latency=0.5))`: half of it, measured on this machine | `StaticQuant(choose="measure")` |

## By where it runs

| device | target | technique |
|---|---|---|
| x86 | `X86`, the default | static for convolutions, dynamic for text |
| ARM64: phone, Raspberry Pi | `ARM` | the same |
| browser | `X86`, `ARM` | the same, see [where a file runs](devices.md) |
| OpenVINO | `OPENVINO` | static |
| NVIDIA, TensorRT | `TENSORRT` (not run by this project) | static, QAT |

## Order

Train, distil, prune channels, quantize. Masks may be set before quantization, which keeps their zeros. A recipe refuses the orders that
cannot work before it trains, and names the legal one ([pruning](../pruning.md#orders-that-are-refused)).
"""


PAGES: dict[Path, Callable[[], str]] = {GUIDE / "comparison.md": comparison, GUIDE / "which_technique.md": which}

if __name__ == "__main__":
    for path, make in PAGES.items():
        path.write_text(make())
