"""Dynamic int8: ours against onnxruntime's `quantize_dynamic`, on an LSTM, a DistilBERT-shaped and a MiniLM-shaped model.

    python benchmarks/quantize_dynamic.py [--models lstm minilm distilbert] [--data DIR --train 3] [--seconds 4]

lstm: Embedding 10000 x 128, two bidirectional layers of 256, a linear head; seeded random weights. distilbert: 6 layers of 768,
seeded random weights of standard deviation fan-in ** -0.5 (with the default the network is nearly an identity), mean over words.
minilm: 6 layers of 384, mean over words; trained on SST-2 for `--train` epochs where `--data` is given (train.tsv: a sentence, a
tab, 0 or 1), else random. Transformers need the extra `transformers`.

Peers: onnxruntime's `quantize_dynamic` at its default, per channel (MatMul, Gemm and LSTM), and per channel after
`onnxruntime.transformers`' optimizer; they read the fp32 file of torch's older exporter, which is faster than that of the newer
one. All files of a model are run in turn, forwards and backwards, on one thread; milliseconds are medians of the thread's CPU
time, ratios are to the fp32 file. Cosine and SQNR: of all outputs over 32 inputs of the length (sentences of dev.tsv joined,
where there are any), against PyTorch.

Writes `quantize_dynamic.json` and `quantize_dynamic.md` beside this file; rows of models that are not run are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.export.files import file_bytes
from compresskit.measure import numpy_inputs, session

HERE = Path(__file__).parent
BATCHES, LENGTHS = (1, 8), (16, 128)
SAMPLES = 32
HEADS = {"distilbert": 12, "minilm": 12}
Data = tuple[list[list[int]], list[int]]


class Lstm(nn.Module):
    """Word ids (N, L) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10000, 128)
        self.layers = nn.LSTM(128, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 10)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(input_ids))[0].mean(1))


class Encoder(nn.Module):
    """Word ids and their mask (N, L) to the mean of the encoder's last states, (N, width)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2).to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1)


def network(name: str, words: int) -> nn.Module:
    """Seeded weights."""
    torch.manual_seed(0)
    if name == "lstm":
        return Lstm().eval()
    transformers: Any = importlib.import_module("transformers")  # an extra: `pip install compresskit[transformers]`
    if name == "distilbert":
        encoder = transformers.DistilBertModel(transformers.DistilBertConfig(vocab_size=30522))
    else:
        how = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        encoder = transformers.BertModel(transformers.BertConfig(vocab_size=words, **how), add_pooling_layer=False)
    for parameter in encoder.parameters():
        if parameter.ndim == 2 and name == "distilbert":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return Encoder(encoder).eval()


def read(folder: Path) -> tuple[Data, Data, int]:
    """Ids and labels of train.tsv and dev.tsv, and how many words there are; 0 pads, 1 is unknown, 2 and 3 begin and end."""
    parts = []
    for name in ("train.tsv", "dev.tsv"):
        rows = [line.rsplit("\t", 1) for line in (folder / name).read_text().splitlines()]
        parts.append(([s.lower().split() for s, _ in rows], [int(label) for _, label in rows]))
    known: dict[str, int] = {}
    for sentence in parts[0][0]:
        for word in sentence:
            known.setdefault(word, len(known) + 4)
    found = [([[2, *(known.get(w, 1) for w in s), 3] for s in sentences], labels) for sentences, labels in parts]
    return found[0], found[1], len(known) + 4


def train_(model: nn.Module, data: Data, epochs: int) -> None:
    """A linear head on the encoder, sentences of like length together."""
    sentences, labels = data
    head = nn.Linear(384, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-4)
    size, steps = 64, epochs * (len(sentences) // 64 + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-4, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = sorted(torch.randperm(len(sentences)).tolist(), key=lambda i: len(sentences[i]))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        for k in torch.randperm(len(groups)).tolist():
            longest = max(len(sentences[i]) for i in groups[k])
            ids = torch.tensor([sentences[i] + [0] * (longest - len(sentences[i])) for i in groups[k]])
            loss = nn.functional.cross_entropy(head(model(ids, (ids > 0).long())), torch.tensor([labels[i] for i in groups[k]]))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


def inputs(name: str, rows: int, length: int, sentences: list[list[int]]) -> dict[str, Tensor]:
    """Sentences joined until they are long enough, or random words."""
    if name == "minilm" and sentences:
        joined = [word for sentence in sentences for word in sentence]
        joined *= rows * length // len(joined) + 1
        ids = torch.tensor(joined[: rows * length]).view(rows, length)
    else:
        ids = torch.randint(4, 9999, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    return {"input_ids": ids} | ({} if name == "lstm" else {"attention_mask": torch.ones_like(ids)})


def variants(name: str) -> dict[str, dict[str, Any]]:
    """Settings of ours: all of it, and what each model may rather want."""
    if name == "lstm":
        return {"ours": {}, "ours, per channel": {"weights": ck.quant.X86.weights}}
    return {"ours": {}, "ours, words in float": {"operators": ("linear", "matmul")}}


def write_files(name: str, model: nn.Module, folder: Path) -> dict[str, Path]:
    """The fp32 file, ours and the peers'."""
    from onnxruntime.quantization import quantize_dynamic

    example = inputs(name, 2, 16, [])
    example["input_ids"] %= 1000
    files = {n: folder / f"{name}-{n.replace(', ', '-')}.onnx" for n in ("fp32", *variants(name), "default", "channel")}
    axes = {n: {0: "rows", 1: "steps"} for n in example} | {"output": {0: "rows"}}
    torch.onnx.export(model, tuple(example.values()), str(files["fp32"]), dynamo=False, opset_version=17,
                      input_names=list(example), output_names=["output"], dynamic_axes=axes)  # fmt: skip
    for n, how in variants(name).items():
        quantized = ck.quant.quantize_dynamic(model, example, dynamic=(0, 1), **how)
        ck.export_onnx(quantized, files[n], example)
        proof = ck.verify_onnx(files[n], quantized, [inputs(name, 2, 24, [])] if name != "minilm" else [example])
        assert proof.passed, proof
    quantize_dynamic(files["fp32"], files["default"])
    quantize_dynamic(files["fp32"], files["channel"], per_channel=True, op_types_to_quantize=["MatMul", "Gemm", "LSTM"])
    if name in HEADS:
        from onnxruntime.transformers import optimizer

        width = 768 if name == "distilbert" else 384
        fused = optimizer.optimize_model(str(files["fp32"]), model_type="bert", num_heads=12, hidden_size=width, opt_level=0)
        fused.save_model_to_file(str(folder / "fused.onnx"))
        files["fused"] = folder / f"{name}-fused.onnx"
        quantize_dynamic(folder / "fused.onnx", files["fused"], per_channel=True, extra_options={"DefaultTensorType": 1})
    return files


def milliseconds(sessions: list[Any], feed: dict[str, Tensor], seconds: float) -> list[float]:
    """Medians of the thread's CPU time, all sessions in turn."""
    feeds = [numpy_inputs(run, feed) for run in sessions]
    times: list[list[float]] = [[] for _ in sessions]
    begin, turn = time.perf_counter(), 0
    while turn < 6 or (time.perf_counter() - begin < seconds and turn < 200):
        order = range(len(sessions))
        for i in order if turn % 2 == 0 else reversed(order):
            start = time.thread_time()
            sessions[i].run(None, feeds[i])
            times[i].append(1000 * (time.thread_time() - start))
        turn += 1
    return [statistics.median(t[1:]) for t in times]


def fidelity(wanted: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    """Cosine and SQNR in dB."""
    a, b = wanted.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b))), float(10 * np.log10(a @ a / max(np.square(a - b).sum(), 1e-30)))


def measure(name: str, model: nn.Module, sentences: list[list[int]], folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each file, batch and length."""
    files = write_files(name, model, folder)
    sessions = {n: session(path) for n, path in files.items()}
    for length in LENGTHS:
        many = inputs(name, SAMPLES, length, sentences)
        with torch.no_grad():
            wanted = torch.cat([model(**{k: v[i : i + 1] for k, v in many.items()}) for i in range(SAMPLES)]).numpy()
        close = {}
        for n, run in sessions.items():
            rows = [run.run(None, numpy_inputs(run, {k: v[i : i + 1] for k, v in many.items()}))[0] for i in range(SAMPLES)]
            close[n] = fidelity(wanted, np.concatenate(rows))
        for batch in BATCHES:
            times = milliseconds(list(sessions.values()), inputs(name, batch, length, sentences), seconds)
            for n, t in zip(sessions, times, strict=True):
                yield {
                    "model": name, "file": n, "batch": batch, "length": length, "milliseconds": t, "ratio": t / times[0],
                    "cosine": close[n][0], "sqnr": close[n][1], "bytes": file_bytes(files[n]),
                }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = ["# Dynamic int8", "", record["how"], "", f"Versions: {record['versions']}.", ""]
    head = "| model | batch | length | file | MB | ms | of fp32 | cosine | SQNR dB |"
    lines += [head, "|---|--:|--:|---|--:|--:|--:|--:|--:|"]
    for r in record["rows"]:
        bold = "**" if r["file"].startswith("ours") else ""
        exact = r["file"] == "fp32"
        lines.append(
            f"| {r['model']} | {r['batch']} | {r['length']} | {bold}{r['file']}{bold} | {r['bytes'] / 1e6:.1f} |"
            f" {r['milliseconds']:.2f} | {r['ratio']:.3f} | {'1' if exact else format(r['cosine'], '.5f')} |"
            f" {'-' if exact else format(r['sqnr'], '.1f')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lstm", "minilm", "distilbert"], help="which of the three")
    parser.add_argument("--data", help="folder with train.tsv and dev.tsv: minilm is trained on it")
    parser.add_argument("--train", type=int, default=3, help="epochs of that training")
    parser.add_argument("--weights", help="safetensors file to keep the trained weights in, or to read them from")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing, for each model, batch and length")
    parser.add_argument("--out", default=str(HERE / "quantize_dynamic"), help="name of both results, without an ending")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    import onnxruntime
    import safetensors.torch

    trained = read(Path(args.data)) if args.data else None
    kept = Path(f"{args.out}.json")
    before = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows: list[dict[str, Any]] = [row for row in before if row["model"] not in args.models]
    for name in args.models:
        model = network(name, trained[2] if trained else 10000)
        if name == "minilm" and trained is not None:
            if args.weights and Path(args.weights).exists():
                model.load_state_dict(safetensors.torch.load_file(args.weights))
            else:
                train_(model, trained[0], args.train)
            if args.weights:
                safetensors.torch.save_file(model.state_dict(), args.weights)
        weights = f"trained on SST-2, {args.train} epochs" if name == "minilm" and trained else "random"
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, model, trained[1][0] if trained else [], Path(folder), args.seconds)
            rows += [row | {"weights": weights} for row in found]
    versions = f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    how = "Written by `benchmarks/quantize_dynamic.py`; one thread, CPU time, medians of runs in turn. Weights: "
    how += ", ".join(f"{name} {weights}" for name, weights in {row["model"]: row["weights"] for row in rows}.items()) + "."
    record = {"how": how, "versions": versions, "rows": rows}
    Path(f"{args.out}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.out}.md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
