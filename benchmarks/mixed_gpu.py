"""Mixed precision on a GPU: speed, memory and host synchronisations of a training step, against autocast and an apex-style loop.

GPU-1  ResNet-50, 224 x 224, images/s             GPU-4  ResNet-20, where launches and synchronisations decide; CUDA graphs
GPU-2  a BERT-base shape, tokens/s                GPU-5  fp8: one product by torch._scaled_mm; a 4096-wide MLP
GPU-3  the optimizer step alone, 25 M, 110 M, 1 B GPU-6  accuracy after the last epoch, scikit-learn's digits, by policy, 3 seeds

Synthetic data on the device (except GPU-6), channels_last, CUDA events, median and spread of the timed steps. A row that cannot
run reports why and the others go on; rows that would start after `--minutes` are listed as left out. Prints tables and writes
`mixed_gpu.json` and `mixed_gpu.md` beside this file. `--smoke` tries the code in seconds on a CPU, on tiny sizes, and writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mixed_cpu import Stack, resnet20, table
from torch import Tensor, nn

from compresskit import mixed

HERE = Path(__file__).parent
Step = Callable[[], None]
Make = Callable[[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]], Step]


def fast(model: nn.Module) -> nn.Module:
    """The compiled model; on a CPU with the eager backend, which is enough to try the code."""
    cuda = next(model.parameters()).device.type == "cuda"
    return torch.compile(model, backend="inductor" if cuda else "eager")  # type: ignore[return-value]


def bare(dtype: torch.dtype | None, *, compiled: bool = False) -> Make:
    """The loop of torch's documentation: fp32, or autocast with GradScaler (for fp16 only)."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor]) -> Step:
        device = next(model.parameters()).device.type
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
        forward = fast(model) if compiled else model

        def step() -> None:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                value = loss(forward)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make


def ours(policy: mixed.Policy, *, compiled: bool = False, **settings: Any) -> Make:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor]) -> Step:
        on_cpu = next(model.parameters()).device.type == "cpu"
        own = replace(policy, fp8="emulated") if policy.fp8 and on_cpu else policy
        run = mixed.prepare(model, optimizer, own, **settings)
        if compiled:
            run.model = fast(run.model)

        def step() -> None:
            run.backward(loss(run))
            run.step()

        return step

    return make


def apex_style(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor]) -> Step:
    """Half weights, masters in a loop, the sum of every gradient read by the host, as apex's Python path did."""
    for module in model.modules():
        if not isinstance(module, mixed.formats.policy.BATCH_NORMS):
            for p in module.parameters(recurse=False):
                p.data = p.data.bfloat16()
    parameters = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in parameters]
    held = type(optimizer)(masters, **{k: optimizer.defaults[k] for k in ("lr", "fused")})  # type: ignore[call-arg]

    def half(*args: Any) -> Any:
        return model(*(a.bfloat16() if a.is_floating_point() else a for a in args)).float()

    def step() -> None:
        loss(half).backward()
        for p, master in zip(parameters, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        if all(bool(torch.isfinite(m.grad.sum())) for m in masters if m.grad is not None):
            held.step()
        for p, master in zip(parameters, masters, strict=True):
            p.data.copy_(master)
            p.grad = None

    return step


def graphed(row: Make) -> Make:
    """A row whose whole step is one recorded CUDA graph; on a CPU the step itself, to try the code."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor]) -> Step:
        device = next(model.parameters()).device
        for group in optimizer.param_groups:  # settings that must not be frozen into a graph
            group["lr"] = torch.tensor(group["lr"], device=device)
            group["capturable"] = device.type == "cuda"
        step = row(model, optimizer, loss)
        if device.type != "cuda":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return lambda: graph.replay()

    return make


ROWS: dict[str, Make] = {
    "fp32, IEEE": bare(None),
    "fp32, TF32": bare(None),
    "torch autocast bf16": bare(torch.bfloat16),
    "torch autocast fp16 + GradScaler": bare(torch.float16),
    "apex style, bf16": apex_style,
    "AMP_BF16": ours(mixed.AMP_BF16),
    "MASTER_BF16": ours(mixed.MASTER_BF16),
    "MASTER_BF16, compiled step": ours(mixed.MASTER_BF16, backend="compiled"),
    "MASTER_FP16": ours(mixed.MASTER_FP16),
    "SPLIT_BF16, compiled step": ours(mixed.SPLIT_BF16, backend="compiled"),
}
GRAPHS: dict[str, Make] = {
    "torch autocast bf16, CUDA graph": graphed(bare(torch.bfloat16)),
    "torch autocast fp16 + GradScaler, CUDA graph": graphed(bare(torch.float16)),
    "MASTER_BF16, CUDA graph": graphed(ours(mixed.MASTER_BF16)),
    "MASTER_BF16, compiled step, CUDA graph": graphed(ours(mixed.MASTER_BF16, backend="compiled")),
    "MASTER_FP16, CUDA graph": graphed(ours(mixed.MASTER_FP16)),
    "SPLIT_BF16, CUDA graph": graphed(ours(mixed.SPLIT_BF16)),
}
COMPILED: dict[str, Make] = {
    "torch autocast bf16, compiled model": bare(torch.bfloat16, compiled=True),
    "MASTER_BF16, compiled model and step": ours(mixed.MASTER_BF16, compiled=True, backend="compiled"),
}
FP8: dict[str, Make] = {
    "MASTER_BF16": ours(mixed.MASTER_BF16),
    "FP8": ours(mixed.FP8),
    "MASTER_BF16, compiled model": ours(mixed.MASTER_BF16, compiled=True),
    "FP8, compiled model": ours(mixed.FP8, compiled=True),
}


class Bench:
    """Times rows on one device until the minutes are over."""

    def __init__(self, device: torch.device, *, smoke: bool, minutes: float) -> None:
        self.device, self.cuda, self.smoke = device, device.type == "cuda", smoke
        self.end = time.monotonic() + 60 * minutes

    def measure(self, step: Step) -> dict[str, float | str]:
        """Milliseconds of a step, their spread, peak memory, and how often the host waited for the device in one step."""
        for _ in range(1 if self.smoke else 20):
            step()
            if self.cuda and time.monotonic() > self.end:
                break
        if not self.cuda:
            begin = time.perf_counter()
            step()
            return {"ms": (time.perf_counter() - begin) * 1000, "spread_ms": 0.0, "MiB": 0.0, "syncs": "-"}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        syncs = sum("synchron" in str(warning.message) for warning in caught)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        # 100 steps, fewer of a slow row: about five seconds.
        count = min(100, max(10, int(5 / (time.perf_counter() - begin))))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]  # noqa: RUF007
        spread = statistics.quantiles(times, n=10)
        peak = torch.cuda.max_memory_allocated() / 2**20
        return {"ms": statistics.median(times), "spread_ms": spread[-1] - spread[0], "MiB": peak, "syncs": str(syncs)}

    def rows(self, table: dict[str, Make], make: Callable[[Make], Step], items: int) -> list[dict[str, Any]]:
        """One row for every entry of the table; `items` are what a step processes."""
        done: list[dict[str, Any]] = []
        for name, row in table.items():
            empty = {"row": name, "ms": "-", "spread_ms": "-", "MiB": "-", "syncs": "-", "items_s": "-"}
            if time.monotonic() > self.end:
                done.append(empty | {"note": "left out: out of time"})
                continue
            # Rows must not inherit this from one another: only those named TF32 use it.
            backends: Any = torch.backends
            for place in (backends.cuda.matmul, backends.cudnn.conv):
                place.fp32_precision = "tf32" if name == "fp32, TF32" else "ieee"
            try:
                got = self.measure(make(row))
                done.append({"row": name, **got, "items_s": items / float(got["ms"]) * 1000, "note": ""})
            except Exception as error:  # a benchmark reports what fails and measures the rest
                done.append(empty | {"note": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}"})
            if self.cuda:
                torch.cuda.empty_cache()
        return done

    def network(
        self, table: dict[str, Make], build: Callable[[], nn.Module], x: Tensor, y: Tensor, items: int
    ) -> list[dict[str, Any]]:
        """Training steps of a classifier."""

        def make(row: Make) -> Step:
            torch.manual_seed(0)
            model = build().to(self.device)
            if x.ndim == 4:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            return row(model, optimizer, lambda m: nn.functional.cross_entropy(m(x).float(), y))

        return self.rows(table, make, items)

    def step_alone(self, count: int) -> list[dict[str, Any]]:
        """The optimizer's step on gradients that cost one element-wise backward."""
        width = 32 if self.smoke else 1024

        def make(row: Make) -> Step:
            model = Stack(width, max(1, count // width**2)).to(self.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            # Every row pays the same backward: gradients of the sum of all weights.
            return row(model, optimizer, lambda _: torch.stack([p.sum().float() for p in model.parameters()]).sum())

        names = ["fp32, IEEE", "torch autocast fp16 + GradScaler", "MASTER_BF16", "MASTER_BF16, compiled step", "MASTER_FP16"]
        return self.rows({name: ROWS[name] for name in names}, make, count)


class Bert(nn.Module):
    """A BERT-base shape (Devlin et al., 1810.04805): an encoder over embeddings, and a classifier."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(30528, width)  # a multiple of 64, for tensor cores
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(tokens))[:, 0])


def mlp(width: int) -> nn.Module:
    """Four square layers, wide enough for fp8 to pay, and a head."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def fp8(bench: Bench) -> list[dict[str, Any]]:
    """Milliseconds of one square product; fp8 with scales of 1."""
    rows: list[dict[str, Any]] = []
    for size in [32] if bench.smoke else [1024, 2048, 4096, 8192]:
        a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
        one = torch.ones((), device=bench.device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

        def half(a: Tensor = a, b: Tensor = b) -> None:
            a @ b.t()

        def eighth(a: Tensor = a8, b: Tensor = b8, one: Tensor = one) -> None:
            torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        for name, step in (("bf16", half), ("fp8", eighth)):
            row: dict[str, Any] = {"row": f"{name}, {size} x {size}", "ms": "-", "note": ""}
            try:
                row["ms"] = bench.measure(step)["ms"]
            except Exception as error:  # not every device has fp8 products
                row["note"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
            rows.append(row)
    return rows


def accuracy(bench: Bench) -> list[dict[str, Any]]:
    """Test accuracy after the last epoch, mean and range of three seeds."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32, device=bench.device).flatten(1) / 16
    y = torch.tensor(data.target, device=bench.device)
    policies = [mixed.FP32, mixed.AMP_BF16, mixed.MASTER_BF16, mixed.MASTER_FP16, mixed.SPLIT_BF16, mixed.KAHAN_BF16]
    rows = []
    for policy in [*policies, mixed.SR_BF16, mixed.PURE_BF16]:
        found = []
        for seed in range(1 if bench.smoke else 3):
            torch.manual_seed(seed)
            order = torch.randperm(len(x)).to(bench.device)
            train, test = order[:1400], order[1400:]
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(bench.device)
            run = mixed.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True), policy)
            for _ in range(1 if bench.smoke else 30):
                for batch in train[torch.randperm(len(train)).to(bench.device)].split(64):
                    run.backward(nn.functional.cross_entropy(run(x[batch]), y[batch]))
                    run.step()
            found.append((run.finish()(x[test]).argmax(1) == y[test]).float().mean().item())
        rows.append({"row": policy.name, "accuracy": f"{statistics.mean(found):.4f}", "range": f"{max(found) - min(found):.4f}"})
    return rows


def all_of(bench: Bench) -> dict[str, list[dict[str, Any]]]:
    """Tables by name."""
    device, smoke = bench.device, bench.smoke

    def images(batch: int, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(8, (batch,), device=device)

    def resnet50() -> nn.Module:
        from torchvision.models import resnet50 as build

        return build()

    layers, width = (1, 64) if smoke else (12, 768)
    tables: dict[str, list[dict[str, Any]]] = {}
    # The short ones first, as rows that would start after the last minute are left out.
    for count in [2048] if smoke else [25_000_000, 110_000_000, 1_000_000_000]:
        tables[f"GPU-3: one AdamW step, {count:,} parameters"] = bench.step_alone(count)
    x, y = images(2 if smoke else 128, 32)
    tables["GPU-4: ResNet-20"] = bench.network(ROWS | GRAPHS, resnet20, x, y, len(x))
    tables["GPU-5: one product, bf16 and fp8"] = fp8(bench)
    wide, rows = (32, 16) if smoke else (4096, 8192)
    x, y = torch.randn(rows, wide, device=device), torch.randint(8, (rows,), device=device)
    tables[f"GPU-5: MLP, {wide} wide, fp8"] = bench.network(FP8, lambda: mlp(wide), x, y, rows)
    tables["GPU-6: digits, accuracy by policy"] = accuracy(bench)
    for batch in [2] if smoke else [64, 256, 512]:
        x, y = images(batch, 32 if smoke else 224)
        table = ROWS | COMPILED if batch in (2, 256) else ROWS
        tables[f"GPU-1: ResNet-50, batch {batch}"] = bench.network(table, resnet20 if smoke else resnet50, x, y, batch)
    for batch, length in [(2, 8)] if smoke else [(128, 128), (32, 512)]:
        tokens, y = torch.randint(30000, (batch, length), device=device), torch.randint(8, (batch,), device=device)
        build = lambda: Bert(layers, width)  # noqa: E731 - a name for one line
        tables[f"GPU-2: BERT-base shape, {batch} x {length}"] = bench.network(ROWS | COMPILED, build, tokens, y, batch * length)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU; writes nothing")
    parser.add_argument("--minutes", type=float, default=7.5, help="no row is started after this")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("mixed_gpu: no CUDA device here; --smoke tries the script on a CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    tables = all_of(Bench(device, smoke=args.smoke, minutes=args.minutes))
    about = {"torch": torch.__version__, "device": "CPU, smoke" if args.smoke else torch.cuda.get_device_name()}
    lines = [line for title, rows in tables.items() for line in table(title, rows)] + [str(about)]
    print("\n".join(lines))
    if not args.smoke:
        (HERE / "mixed_gpu.json").write_text(json.dumps({"about": about, **tables}, indent=1) + "\n")
        (HERE / "mixed_gpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
