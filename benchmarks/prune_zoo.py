"""Channel pruning of every torchvision model: half of the MACs, without any hint.

One process per model, on small inputs, with the random weights of seed 0 (what may be pruned does not depend on weights). Each
row: seconds to plan (whatever else the machine does), MACs, the proof (the pruned model equals the one with zeroed channels, as
the planner checks; `masked` where LayerNorm or GroupNorm take their statistics over the channels that stay), forward in eval
mode, a training step, and a verified ONNX export, where `--export` is given and the unpruned model exports too. Where half cannot
be reached, as much is pruned as the locks allow, and the locks are listed. A model whose copy is over `--memory` GiB is left out.

Writes `prune_zoo.json` and `prune_zoo.md` beside this file after every model; rows that are in the file are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import compresskit as ck

HERE = Path(__file__).parent
KINDS = {
    "classification": torchvision.models,
    "segmentation": torchvision.models.segmentation,
    "video": torchvision.models.video,
    "optical flow": torchvision.models.optical_flow,
    "detection": torchvision.models.detection,
}


def kind_of(name: str) -> str:
    return next(kind for kind, module in KINDS.items() if name in torchvision.models.list_models(module=module))


def network(name: str) -> tuple[nn.Module, Any]:
    """The model and an example."""
    torch.manual_seed(0)
    kind = kind_of(name)
    settings: dict[str, Any] = {"weights": None}
    if kind in ("detection", "segmentation"):
        settings["weights_backbone"] = None
    if kind == "segmentation" and "lraspp" not in name:
        settings["aux_loss"] = True
    if kind == "detection" and "ssd" not in name:
        settings |= {"min_size": 128, "max_size": 256}
    if name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False
    model = torchvision.models.get_model(name, **settings)
    if isinstance(model, torchvision.models.VisionTransformer):
        nn.init.normal_(model.heads[-1].weight, 0, 0.02)  # with zeros the body would not affect the output
    for module in model.modules():
        if type(module).__name__ == "CNBlock":
            nn.init.constant_(module.layer_scale, 0.3)  # the same with 1e-6
    size = 224 if re.match("vit|maxvit|mvit", name) else 128 if re.match("swin|raft", name) else 64
    size = 299 if name == "inception_v3" else size  # which its auxiliary head needs
    if kind == "video":
        frames, size = (16, 224) if name.startswith(("mvit", "s3d")) else (8, 64)
        return model.eval(), (torch.randn(2, 3, frames, size, size),)
    if kind == "optical flow":
        return model.eval(), (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128))
    if kind == "detection":
        size = 300 if name.startswith("ssd300") else 320 if name.startswith("ssd") else 160
        return model.eval(), ([torch.rand(3, size, size), torch.rand(3, size, size)],)
    return model.eval(), (torch.randn(2, 3, size, size),)


def plan_of(model: nn.Module, example: Any) -> Any:
    """Half of the MACs, or the most that the locks allow."""
    try:
        return ck.prune.plan_channels(model, example, budget=ck.keep(macs=0.5))
    except ck.ModelError as error:
        if (least := re.search(r"only ([\d.]+)% can be reached", str(error))) is None:
            raise
    return ck.prune.plan_channels(model, example, budget=ck.keep(macs=min(1.0, float(least.group(1)) / 100 + 0.005)))


def trains(model: nn.Module, name: str, example: Any) -> bool:
    """One training step: a loss on every output, or the model's own with targets."""
    model.train()
    if kind_of(name) == "detection":
        box = torch.tensor([[10.0, 10.0, 60.0, 60.0]])
        target = {"boxes": box, "labels": torch.tensor([1]), "masks": torch.ones(1, 160, 160, dtype=torch.uint8)}
        target["keypoints"] = torch.tensor([[[20.0, 20.0, 1.0]] * 17])
        outputs = model(*example, [target, target])
    else:
        outputs = model(*(torch.cat([v, v]) for v in example))
    values = [v for v in torch.utils._pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]
    sum(v.float().mean() for v in values).backward()  # type: ignore[union-attr]
    return all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad and "relative_position" not in n)


def exports(model: nn.Module, dense: nn.Module, example: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            ck.export_onnx(model.eval(), path, example)
            return "yes" if ck.verify_onnx(path, model, [example]).passed else "differs"
        except ck.CompressError as error:
            try:
                ck.export_onnx(dense, path, example)
            except ck.CompressError:
                return "as unpruned: no"
            return f"NO: {str(error).splitlines()[0][:120]}"


def measure(name: str, export: bool) -> dict[str, Any]:
    model, example = network(name)
    begin = time.perf_counter()
    plan = plan_of(model, example)
    seconds = time.perf_counter() - begin
    norms = (nn.LayerNorm, nn.GroupNorm)
    masked = any(isinstance(model.get_submodule(n.rpartition(".")[0]), norms) for n in plan.remove)
    dense = network(name)[0] if export else model
    before = ck.count_parameters(model)
    row: dict[str, Any] = {"kind": kind_of(name), "seconds": seconds, "macs": plan.macs_before, "left": plan.macs}
    ck.prune.apply_(model, plan)
    row |= {"parameters": [before, ck.count_parameters(model)], "locked": plan.locked, "proof": "masked" if masked else "zeroed"}
    row["attributes"] = {k: list(v) for k, v in plan.attributes.items()}
    row["counted"] = ck.count_macs(model, example)
    with torch.no_grad():
        model.eval()(*example)
    row["eval"], row["train"] = True, trains(model, name, example)
    if export and kind_of(name) != "detection":
        row["export"] = exports(model, dense, example)
    row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return row


def write(rows: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    (HERE / "prune_zoo.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    head = "model, kind, MACs, share left, parameters left, seconds, proof, eval, training step, export"
    head += ", channels locked besides outputs"
    lines = [f"| {head.replace(', ', ' | ')} |", f"|{'---|' * len(head.split(', '))}"]
    order = list(KINDS)
    for name, row in sorted(rows.items(), key=lambda item: (order.index(item[1]["kind"]), item[0])):
        if "error" in row:
            lines.append(f"| {name} | {row['kind']} | {row['error']} |" + " |" * 8)
            continue
        locks = {k: v for k, v in row["locked"].items() if k != "an output of the model" and "one for each head" not in k}
        text = f"{sum(locks.values())}: {next(iter(locks))}" if locks else ""
        lines.append(
            f"| {name} | {row['kind']} | {row['macs'] / 1e6:.0f} M | {row['left'] / row['macs']:.1%}"
            f" | {row['parameters'][1] / row['parameters'][0]:.1%} | {row['seconds']:.1f} | {row['proof']}"
            f" | {'yes' if row['eval'] else 'no'} | {'yes' if row['train'] else 'NO'} | {row.get('export', '-')} | {text[:160]} |"
        )
    good = [r for r in rows.values() if "error" not in r]
    half = sum(r["left"] / r["macs"] < 0.51 for r in good)
    lines += ["", f"{len(good)} of {len(rows)} models pruned, {half} of them to half of their MACs. {versions}"]
    (HERE / "prune_zoo.md").write_text("\n".join(lines) + "\n")


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", name, "--memory", str(args.memory), *(["--export"] if args.export else [])]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"kind": kind_of(name), "error": f"not done in {args.timeout} s"}
    for line in run.stdout.splitlines():
        if line.startswith("ROW "):
            return dict(json.loads(line.removeprefix("ROW ")))
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return {"kind": kind_of(name), "error": lines[-1][:400]}


def names_by_size() -> list[str]:
    """Every model, the smallest first; quantized ones are copies of others."""
    quantized = torchvision.models.list_models(module=torchvision.models.quantization)
    wanted = [n for n in torchvision.models.list_models() if n not in quantized]
    sizes = {n: torchvision.models.get_model_weights(n).DEFAULT.meta["num_params"] for n in wanted}
    return sorted(wanted, key=lambda n: (kind_of(n) == "detection", sizes[n]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="torchvision names; all of them where none is given")
    parser.add_argument("--export", action="store_true", help="also export and verify")
    parser.add_argument("--again", action="store_true", help="measure models that are in the table already")
    parser.add_argument("--memory", type=float, default=8, help="GiB; a model that would need more is left out")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one model")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        resource.setrlimit(resource.RLIMIT_DATA, (int(args.memory * 2**30), int(args.memory * 2**30)))
        print("ROW " + json.dumps(measure(args.row, args.export)))
        return
    path = HERE / "prune_zoo.json"

    def known() -> dict[str, Any]:
        return json.loads(path.read_text())["rows"] if path.exists() else {}

    for name in args.models or names_by_size():
        if args.again or "error" in known().get(name, {"error": ""}):
            row = in_a_process(name, args)
            write(known() | {name: row})  # another sweep may have added rows meanwhile


if __name__ == "__main__":
    main()
