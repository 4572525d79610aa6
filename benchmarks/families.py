"""Families: every timm module and about a hundred Hugging Face architectures, small, through export, int8 and pruning.

    python benchmarks/families.py                     every family without a row, each in a process of its own
    python benchmarks/families.py --only hf/bert      these, measured again
    python benchmarks/families.py --stale             also those whose row is of another commit
    python benchmarks/families.py --shard 0/4         every fourth
    python benchmarks/families.py --parts prune       only that part; the others of a row stay

Each row: `export`: torch exports the float model and ONNX Runtime agrees with it; `static`: int8 with calibration, the share of
MACs in integers, verified on other batch sizes; `dynamic`: int8 without calibration, verified on other batches and, for text,
lengths; `prune`: to half of the MACs, or as far as the locks allow (widths are not rounded, since they are small), equal in
float64 to the network whose removed values are zero (that reference is in this file and shares no code with the planner's proof),
exported and verified. Where something fails, the first line of the message. Weights are random (seed 0), BatchNorm statistics
those of random batches.

Writes `families.json` and `families.md` beside this file after every family.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import logging
import multiprocessing
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from family_models import Family, build, call, hugging_face_names, timm_names
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import compresskit as ck

HERE = Path(__file__).parent
PARTS = ("export", "static", "dynamic", "prune")
LENGTH, OTHER_LENGTH = 16, 23


def first_line(error: BaseException) -> str:
    """The class, and the first line of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = "" if isinstance(error, ck.CompressError) else f"raw {type(error).__name__}: "
    return f"{name}{lines[0] if lines else ''}"[:500]


# -- the reference of pruning


class WithoutZeros(TorchFunctionMode):
    """Norms and means leave out channels that are 0 in every sample and at every position: those that were set to zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.layer_norm, F.rms_norm):
            return self._norm(func, *args, **kwargs)
        if func is F.group_norm:
            return self._group_norm(*args, **kwargs)
        if func is F.batch_norm and args[0].ndim == 3 and len(args[0]) == 1 and (kept := self._kept(args[0], -1)) is not None:
            small = func(args[0][..., kept], *args[1:], **kwargs)  # a weight that is standardized over its inputs
            return torch.zeros_like(args[0]).index_copy(-1, kept, small)
        if func in (torch.mean, Tensor.mean, torch.var, Tensor.var, torch.var_mean, torch.std, Tensor.std):
            return self._moment(func, args, kwargs)
        if func in (torch.sub, Tensor.sub, Tensor.__sub__) and self._takes_off_a_mean(args):
            return self._centred(*args[:2])
        return func(*args, **kwargs)

    def _takes_off_a_mean(self, args: Any) -> bool:
        tensors = all(isinstance(v, Tensor) for v in args[:2])
        return tensors and args[0].is_floating_point() and args[1].shape[-1:] == (1,)

    def _centred(self, x: Tensor, mean: Tensor) -> Tensor:
        """A norm that is written out takes the mean off first, which must not give the channels a value."""
        kept = self._kept(x, -1)
        return x - mean if kept is None else torch.zeros_like(x - mean).index_copy(-1, kept, x[..., kept] - mean)

    def _norm(self, func: Any, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: Any = None) -> Tensor:
        kept = self._kept(x, -1)
        extra = {} if eps is None else {"eps": eps}
        if kept is None or len(shape) != 1:
            return func(x, shape, weight, *([bias] if func is F.layer_norm else []), **extra)
        parts = [None if p is None else p[kept] for p in (weight, bias)]
        small = func(x[..., kept], [len(kept)], *(parts if func is F.layer_norm else parts[:1]), **extra)
        return torch.zeros_like(x).index_copy(-1, kept, small)

    def _group_norm(self, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        kept = self._kept(x, 1)
        if kept is None or len(kept) % groups:
            return F.group_norm(x, groups, weight, bias, eps)
        scale, offset = (None if p is None else p[kept] for p in (weight, bias))
        return torch.zeros_like(x).index_copy(1, kept, F.group_norm(x[:, kept], groups, scale, offset, eps))

    def _moment(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, rest = args[0], args[1:]
        dim = kwargs.get("dim", rest[0] if rest else None)
        dims = [dim] if isinstance(dim, int) else list(dim or [])
        of_channels = len(dims) == 1 and dims[0] % x.ndim in ((1, 3) if x.ndim == 4 else (x.ndim - 1,))  # not of time steps
        if of_channels and (kept := self._kept(x, dims[0])) is not None:
            x = x.index_select(dims[0], kept)
        return func(x, *rest, **kwargs)

    def _kept(self, x: Tensor, dim: int) -> Tensor | None:
        """Indices along `dim` that are not zero throughout; None where all are, or none is."""
        with torch._C.DisableTorchFunction():
            rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
            kept = (rows != 0).any(1).nonzero().flatten()
        return kept if 0 < len(kept) < x.shape[dim] else None


class Plain(nn.Module):
    """In the place of a parametrization: the weight that it made."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self) -> Tensor:
        return self.weight


def zeroed(model: nn.Module, plan: ck.prune.Plan) -> nn.Module:
    """A float64 copy with the removed values at zero; weights under a parametrization are made plain first."""
    model = copy.deepcopy(model).double().eval()
    remove = {name: dict(dims) for name, dims in plan.remove.items()}
    for path, module in list(model.named_modules()):
        if nn.utils.parametrize.is_parametrized(module):
            for leaf in list(module.parametrizations):
                prefix = f"{path}.parametrizations.{leaf}.original"
                module.parametrizations[leaf] = Plain(getattr(module, leaf))
                remove[f"{path}.parametrizations.{leaf}.weight"] = remove.pop(f"{prefix}1", remove.pop(prefix, {}))
                remove.pop(f"{prefix}0", None)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, dims in remove.items():
            for dim, gone in dims.items():
                tensors[name].index_fill_(dim, torch.tensor(gone, dtype=torch.long), 0)
    return model


def doubled(inputs: Any) -> Any:
    return pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)


def leaves(outputs: Any) -> list[Tensor]:
    outputs = dict(outputs) if hasattr(outputs, "keys") else outputs
    return [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]


@contextmanager
def in_float64() -> Iterator[None]:
    """What a model makes itself (positions, masks) is float64, too, and what it casts to float32 stays so."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def disagreement(model: nn.Module, plan: ck.prune.Plan, inputs: Any) -> float:
    """Largest difference of the pruned and the zeroed model's outputs, as a share of the largest output."""
    try:
        return _disagreement(copy.deepcopy(model).double(), model, plan, inputs, wide=True)
    except RuntimeError:  # makes float32 values of its own
        return _disagreement(copy.deepcopy(model), model, plan, inputs, wide=False)


def _disagreement(smaller: nn.Module, model: nn.Module, plan: ck.prune.Plan, inputs: Any, *, wide: bool) -> float:
    reference = zeroed(model, plan)
    reference, inputs = (reference, doubled(inputs)) if wide else (reference.float(), inputs)
    smaller = ck.prune.apply_(smaller.eval(), plan)
    with torch.no_grad():
        torch.manual_seed(5)
        got = leaves(call(smaller, inputs))
        torch.manual_seed(5)
        with WithoutZeros():
            wanted = leaves(call(reference, inputs))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True) if b.numel())


# -- the parts of a row


def exported(model: nn.Module, family: Family, path: Path, dynamic: Any, row: dict[str, Any]) -> None:
    """Export, and verify on other batch sizes and, where it may vary, another length."""
    ck.export_onnx(model, path, family.inputs(4, 0, LENGTH), dynamic=dynamic)
    lengths = (LENGTH, OTHER_LENGTH) if 1 in (dynamic or ()) else (LENGTH,)
    batches = [family.inputs(4, 10, LENGTH)]
    if dynamic:
        batches = [family.inputs(samples, 10 + i, lengths[i % len(lengths)]) for i, samples in enumerate((16, 3))]
    row["exported"] = True
    proof = ck.verify_onnx(path, model, batches)
    row["verified"] = proof.passed
    if not proof.passed:
        row["cause"] = f"verify: {proof.reason}"[:500]


def measure_export(family: Family, path: Path, row: dict[str, Any], dims: dict[str, Any]) -> None:
    """The float model with all dimensions that may vary, or fewer, if that is all that torch exports."""
    choices = [d for d in ((0, 1), (0,), ()) if set(d) <= set(family.dynamic)]
    for dynamic in choices:
        row.pop("cause", None)
        row["dynamic"] = dims["dynamic"] = list(dynamic)
        try:
            exported(family.model, family, path, dynamic, row)
            row["torch"] = True
            return
        except ck.CompressError as error:
            row["cause"] = first_line(error)
            row.setdefault("causes", []).append(first_line(error))
            if row.get("exported"):
                row["torch"] = True
                return
    dims["dynamic"] = list(family.dynamic)
    row["torch"] = torch_exports(family)


def torch_exports(family: Family) -> bool:
    """Whether torch's own exporter writes the float model."""
    inputs = family.inputs(4, 0, LENGTH)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
    try:
        torch.onnx.export(copy.deepcopy(family.model), args, kwargs=kwargs, dynamo=True, verbose=False)
    except Exception:
        return False
    return True


def quantized(family: Family, dims: dict[str, Any], make: Callable[[Any], nn.Module]) -> tuple[nn.Module, Any]:
    """What `make` gives for the dimensions that the float model was exported with; where it was not, for the most it takes."""
    choices = [tuple(dims["dynamic"])] if "dynamic" in dims else [d for d in ((0, 1), (0,), ()) if set(d) <= set(family.dynamic)]
    for dynamic in choices:
        try:
            return make(dynamic), dynamic
        except ck.ModelError:
            if dynamic == choices[-1]:
                raise
    raise AssertionError("no choice")


def measure_static(family: Family, path: Path, row: dict[str, Any], dims: dict[str, Any]) -> None:
    batches, target = [family.inputs(4, seed, LENGTH) for seed in (1, 2)], getattr(ck.quant, dims["target"])
    model, dynamic = quantized(family, dims, lambda d: ck.quant.quantize_static(family.model, batches, dynamic=d, target=target))
    row["dynamic"] = list(dynamic)
    exported(model, family, path, dynamic, row)
    row["integer_macs"] = round(ck.audit(path).integer_fraction, 4)


def measure_dynamic(family: Family, path: Path, row: dict[str, Any], dims: dict[str, Any]) -> None:
    batches, target = [family.inputs(4, 1, LENGTH)], getattr(ck.quant, dims["target"])
    model, dynamic = quantized(family, dims, lambda d: ck.quant.quantize_dynamic(family.model, batches, dynamic=d, target=target))
    row["dynamic"] = list(dynamic)
    exported(model, family, path, dynamic, row)


def measure_prune(family: Family, path: Path, row: dict[str, Any], dims: dict[str, Any]) -> None:
    model, example = family.model, family.inputs(2, 0, LENGTH)
    begin = time.perf_counter()
    plan, row["cause"] = plan_of(model, example)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    row["left"] = round(plan.macs / plan.macs_before, 4)
    row["locked"] = dict(sorted(plan.locked.items(), key=lambda item: -item[1])[:8])
    found = [disagreement(model, plan, family.inputs(samples, 20, LENGTH)) for samples in (2, 3)]
    row["difference"] = max(found)
    row["proved"] = max(found) < 1e-4
    if not row["proved"]:
        row["cause"] = f"differs from the network with zeros by {max(found):.2g} of its largest output; {row['cause'] or ''}"
    if not dims.get("export_pruned", True):
        return
    smaller = ck.prune.apply_(copy.deepcopy(model), plan)
    row["counted"] = round(ck.count_macs(smaller, example) / ck.count_macs(model, example), 4)
    exporting: dict[str, Any] = {}
    try:
        exported(smaller, family, path, tuple(dims.get("dynamic", family.dynamic)), exporting)
    except ck.CompressError as error:
        exporting["cause"] = first_line(error)
    row["export"] = exporting


def plan_of(model: nn.Module, example: Any) -> tuple[ck.prune.Plan, str | None]:
    """Half of the MACs, or the most that the locks allow, and then why."""
    import re

    try:
        return ck.prune.plan_channels(model, example, budget=ck.keep(macs=0.5), round_to=1), None
    except ck.ModelError as error:
        if (least := re.search(r"only ([\d.]+)% can be reached", str(error))) is None:
            raise
        budget = ck.keep(macs=min(1.0, float(least.group(1)) / 100 + 0.005))
        return ck.prune.plan_channels(model, example, budget=budget, round_to=1), " ".join(str(error).split())[:700]


MEASURES: dict[str, Callable[[Family, Path, dict[str, Any], dict[str, Any]], None]] = {
    "export": measure_export,
    "static": measure_static,
    "dynamic": measure_dynamic,
    "prune": measure_prune,
}


def measure(name: str, parts: tuple[str, ...], known: dict[str, Any], out: Path, options: dict[str, Any]) -> None:
    """Write the row of a family to `out`, after every part of it."""
    row: dict[str, Any] = {k: v for k, v in known.items() if k not in ("error", "measuring")}

    def save() -> None:
        out.write_text(json.dumps(row))

    try:
        variant = str(known.get("variant", "")).split(" at ")[0] if name.startswith("timm/") else None
        family = build(name, variant or None)
    except Exception as error:
        logging.exception(name)
        row["error"] = first_line(error)
        save()
        return
    row |= {"variant": family.variant, "parameters": ck.count_parameters(family.model)}
    dims = options | ({"dynamic": row["export"]["dynamic"]} if "dynamic" in row.get("export", {}) else {})
    for part in parts:
        row["measuring"] = part
        result: dict[str, Any] = {}
        row[part] = {"cause": "not done in time"}
        save()
        try:
            with tempfile.TemporaryDirectory() as folder:
                MEASURES[part](family, Path(folder) / "model.onnx", result, dims)
        except Exception as error:
            logging.exception("%s %s", name, part)
            result["cause"] = first_line(error)
        row[part] = {k: v for k, v in result.items() if v is not None}
        save()
    row.pop("measuring")
    save()


# -- the sweep


def separately(name: str, parts: tuple[str, ...], known: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of its own, which is ended after so many seconds."""
    timeout = options["timeout"]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        process = multiprocessing.get_context("fork").Process(target=_child, args=(name, parts, known, out, options))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        row = json.loads(out.read_text()) if out.exists() else dict(known)
    if process.exitcode != 0:
        why = f"not done in {timeout:.0f} s" if late else f"the process ended with {process.exitcode}"
        part = row.pop("measuring", None)
        row = row | ({part: {"cause": why}} if part else {"error": why})
    return row | {"commit": commit(), "seconds": round(time.perf_counter() - begin, 1)}


def _child(name: str, parts: tuple[str, ...], known: dict[str, Any], out: Path, options: dict[str, Any]) -> None:
    gc.set_threshold(50_000)  # tracing makes millions of objects
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options["log"] is not None:
        logging.basicConfig(filename=options["log"], force=True)
    torch.set_num_threads(1)
    measure(name, parts, known, out, options)


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return run.stdout.strip()


def read() -> dict[str, Any]:
    path = HERE / "families.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def write(rows: dict[str, Any]) -> None:
    import timm
    import transformers

    versions = {"torch": torch.__version__, "timm": timm.__version__, "transformers": transformers.__version__}
    rows = dict(sorted(rows.items()))
    (HERE / "families.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    head = "family, variant, torch exports, float verified, integer MACs, static, dynamic, varying, MACs left, proved"
    head += ", pruned exported"
    lines = [
        "# Families",
        "",
        *summary(rows),
        "",
        f"{versions}; empty: not measured",
        "",
        f"| {head.replace(', ', ' | ')} | reasons |",
    ]
    lines.append("|---" * (len(head.split(", ")) + 1) + "|")
    for name, row in rows.items():
        export, static, dynamic, prune = (row.get(part, {}) for part in PARTS)
        reasons = [f"{part}: {row[part]['cause']}" for part in PARTS if row.get(part, {}).get("cause")]
        reasons += [row["error"]] if "error" in row else []
        cells = [
            name,
            row.get("variant", ""),
            yes(export, "torch"),
            yes(export, "verified"),
            f"{static['integer_macs']:.0%}" if "integer_macs" in static else "",
            yes(static, "verified"),
            yes(dynamic, "verified"),
            {(0, 1): "batch, length", (0,): "batch", (): "none"}[tuple(export["dynamic"])] if "dynamic" in export else "",
            f"{prune['left']:.1%}" if "left" in prune else "",
            yes(prune, "proved"),
            yes(prune.get("export", {}), "verified"),
            "; ".join(reasons).replace("|", "\\|")[:600],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    (HERE / "families.md").write_text("\n".join(lines) + "\n")


def yes(part: dict[str, Any], key: str) -> str:
    """Empty for a part that was not measured."""
    return "" if not part else "yes" if part.get(key) else "no"


def counts(rows: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """What was verified, or pruned to half -> (families, of how many where that was measured and torch can export)."""
    exports = [row["export"] for row in rows.values() if "export" in row]
    able = [row for row in rows.values() if row.get("export", {}).get("torch", True)]
    pruned = [row["prune"] for row in rows.values() if "prune" in row]
    smaller = [part["export"] for part in pruned if "export" in part]
    found = {"exported by torch": (sum(bool(part.get("torch")) for part in exports), len(exports))}
    for part in ("export", "static", "dynamic"):
        found[f"{part} verified"] = (sum(bool(row[part].get("verified")) for row in able if part in row), measured(able, part))
    found["half of the MACs removed"] = (sum(part.get("left", 1) <= 0.505 for part in pruned), len(pruned))
    found["proved"] = (sum(bool(part.get("proved")) for part in pruned), sum("left" in part for part in pruned))
    found["exported pruned"] = (sum(bool(part.get("verified")) for part in smaller), len(smaller))
    return found


def measured(rows: list[dict[str, Any]], part: str) -> int:
    """How many rows have a part."""
    return sum(part in row for row in rows)


def summary(rows: dict[str, Any]) -> list[str]:
    """The counts of all families, and of either library."""
    lines = []
    for label, start in (("all", ""), ("timm", "timm/"), ("Hugging Face", "hf/")):
        chosen = {name: row for name, row in rows.items() if name.startswith(start)}
        found = ", ".join(f"{what} {count} of {total}" for what, (count, total) in counts(chosen).items())
        lines.append(f"* {label}, {len(chosen)} families: {found}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="these families, measured again")
    parser.add_argument("--shard", default="0/1", help="i/n: every nth family, from the ith")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--stale", action="store_true", help="also families whose row is of another commit")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one family")
    parser.add_argument("--target", default="X86", choices=("X86", "X86_NO_VNNI", "ARM"), help="of the int8 files")
    parser.add_argument("--quick", action="store_true", help="do not export pruned models")
    parser.add_argument("--log", type=Path, help="append tracebacks to this file")
    args = parser.parse_args()
    import timm  # noqa: F401  loaded once, before the processes part
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:  # the exporter's tables, too
        ck.export_onnx(nn.Linear(1, 1), Path(folder) / "first.onnx", torch.zeros(2, 1))
    gc.freeze()
    index, _, count = args.shard.partition("/")
    for name in args.only or [*hugging_face_names(), *timm_names()][int(index) :: int(count)]:
        known = read().get(name, {})
        done = all(part in known for part in args.parts) and (known.get("commit") == commit() or not args.stale)
        if done and not args.only:
            continue
        options = {"timeout": args.timeout, "log": args.log, "target": args.target, "export_pruned": not args.quick}
        row = separately(name, tuple(args.parts), known, options)
        print(name, json.dumps(row), flush=True)
        with Path(__file__).open() as lock:  # several sweeps may write
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(read() | {name: row})


if __name__ == "__main__":
    main()
