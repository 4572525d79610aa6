"""Weight-only quantization of a small transformer for sentiment (SST-2): round to nearest, GPTQ, AWQ, in blocks of 32.

    python benchmarks/quantize_weights.py --data data/sst2 --seeds 3

For each seed the transformer of recipes/sst2_text.py is trained, then every matrix except the word embedding is rounded (the
embedding would be the same in all rows), and its file is written and run in ONNX Runtime. Loss: mean cross-entropy on dev.tsv.
KL: of the rounded model's predictions from the float model's, which is finer than accuracy on 872 sentences.

Writes `quantize_weights.json` and `quantize_weights.md` beside this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.weight_only import gptq, round_to_nearest

HERE = Path(__file__).parent
HOW: dict[str, dict[str, Any]] = {
    "nearest": {"rounding": round_to_nearest},
    "GPTQ": {"rounding": gptq},
    "AWQ": {"awq": True},
    "AWQ + GPTQ": {"awq": True, "rounding": gptq},
}
GRIDS = {
    f"int{bits}{'' if symmetric else ' asymmetric'}": BlockScheme(bits=bits, symmetric=symmetric)
    for bits in (4, 3)
    for symmetric in (True, False)
}


def recipe() -> Any:
    """The module of the recipe, whose network and reader of files are used here."""
    spec = importlib.util.spec_from_file_location("sst2_text", HERE.parent / "recipes" / "sst2_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures(outputs: Tensor, floats: Tensor, labels: Tensor) -> dict[str, float]:
    kl = F.kl_div(outputs.log_softmax(1), floats.log_softmax(1), log_target=True, reduction="batchmean")
    noise = (outputs - floats).square().sum()
    return {
        "accuracy": ck.accuracy(outputs, labels),
        "loss": float(F.cross_entropy(outputs, labels)),
        "kl": float(kl),
        "db": float(10 * torch.log10(floats.square().sum() / noise)) if noise > 0 else 200.0,
    }


def measure(model: nn.Module, data: list[tuple[Tensor]], val: tuple[Tensor, Tensor], folder: Path) -> dict[str, Any]:
    """Every grid and every way of rounding, in ONNX Runtime as the file is written."""
    ids, labels = val
    with torch.no_grad():
        floats = model(ids)
    path = ck.export_onnx(model, folder / "float.onnx", (ids,))
    row: dict[str, Any] = {"float": figures(floats, floats, labels) | {"bytes": path.stat().st_size}}
    for grid, scheme in GRIDS.items():
        for way, how in HOW.items():
            begin = time.perf_counter()
            quantized = quantize_weights(model, data, scheme=scheme, embeddings=None, **how)
            seconds = time.perf_counter() - begin
            path = ck.export_onnx(quantized, folder / "q.onnx", (ids,))
            runtime = session(path, optimize=False)
            outputs = torch.from_numpy(runtime.run(None, numpy_inputs(runtime, (ids,)))[0])
            proof = ck.verify_onnx(path, quantized, [(ids[:64],)])
            row[f"{grid} {way}"] = figures(outputs, floats, labels) | {
                "seconds": seconds,
                "bytes": path.stat().st_size,
                "verified": proof.passed,
            }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = ["weights", "KL", "share of nearest", "loss more", "accuracy", "dB", "file KB", "verified"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in rows[0]:
        kl = [row[name]["kl"] for row in rows]
        base = name.rsplit(" ", 3)[0] if "AWQ + " in name else name.rsplit(" ", 1)[0]
        shares = [row[name]["kl"] / row[f"{base} nearest"]["kl"] for row in rows] if name != "float" else []
        cells = [
            name,
            f"{statistics.mean(kl):.2e}",
            f"{statistics.mean(shares):.2f} ({', '.join(f'{s:.2f}' for s in shares)})" if shares else "",
            f"{statistics.mean(row[name]['loss'] - row['float']['loss'] for row in rows):+.5f}",
            f"{statistics.mean(row[name]['accuracy'] for row in rows):.2%}",
            f"{statistics.mean(row[name]['db'] for row in rows):.1f}" if name != "float" else "",
            f"{rows[0][name]['bytes'] / 1000:.0f}",
            "" if name == "float" else "yes" if all(row[name]["verified"] for row in rows) else "NO",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with train.tsv and dev.tsv", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512, help="sentences of the training data that calibrate")
    args = parser.parse_args()
    sst2 = recipe()
    train, dev = (sst2.read(Path(args.data) / name, None) for name in ("train.tsv", "dev.tsv"))
    counts = sst2.Counter(word for words in train[0] for word in words)
    vocabulary = {word: i for i, (word, n) in enumerate(counts.most_common(), 2) if n > 1}
    ids, val = sst2.encode(train[0], vocabulary), (sst2.encode(dev[0], vocabulary), dev[1])
    rows = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = sst2.Transformer(len(vocabulary) + 2)
        loader = sst2.DataLoader(sst2.TensorDataset(ids, train[1]), 64, shuffle=True)
        task = ck.Task(train=loader, val=[val])
        how = ck.Train(
            epochs=args.epochs,
            optimizer=partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.01),
            schedule=ck.lr.OneCycle(),
            clip=1.0,
        )
        model = how(model, task).eval()
        data = [(ids[i : i + 64],) for i in range(0, args.samples, 64)]
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(model, data, val, Path(folder)))
        record = {"seeds": rows, "epochs": args.epochs, "samples": args.samples, "versions": {"torch": torch.__version__}}
        (HERE / "quantize_weights.json").write_text(json.dumps(record, indent=1) + "\n")
        note = f"\n\nMeans over {len(rows)} seeds, each in brackets. {args.epochs} epochs, {args.samples} sentences calibrate.\n"
        (HERE / "quantize_weights.md").write_text(table(rows) + note)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
