"""Real models and real data. `COMPRESSKIT_DATA` names a folder with `MNIST/raw`, `cifar10_resnet/` and an unpacked `cifar10/`."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import checkout
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import latency

pytestmark = [pytest.mark.slow]
DATA = Path(os.environ.get("COMPRESSKIT_DATA", "data"))
sys.path.insert(0, str(checkout.ROOT / "recipes"))


def proof_of(recipe, tmp_path, *args):
    out = tmp_path / "run"
    checkout.python(checkout.ROOT / "recipes" / recipe, "--out", out, *args)
    rows = json.loads((out / "report.json").read_text())["rows"]
    return rows, json.loads((out / rows[-1]["stage"] / "verify.json").read_text())


def agrees(proof) -> None:
    for level in ("plain", "optimized"):
        assert proof[level]["agreement"] >= 0.995
    assert proof["plain"]["largest"] <= 2


def test_digits(tmp_path) -> None:
    rows, proof = proof_of("digits.py", tmp_path)
    agrees(proof)
    assert rows[0]["bytes"] / rows[-1]["bytes"] >= 10
    assert rows[-1]["latency_ms"] < rows[0]["latency_ms"]
    assert rows[-1]["metric"] >= rows[0]["metric"] - 0.01
    assert all(row["verified"] for row in rows)


@pytest.mark.skipif(not (DATA / "MNIST").is_dir(), reason="no MNIST")
def test_mnist(tmp_path) -> None:
    rows, proof = proof_of("mnist.py", tmp_path, "--data", str(DATA), "--epochs", "1")
    agrees(proof)
    assert rows[-1]["metric"] > 0.98


def settled(model: nn.Module, size: int) -> nn.Module:
    """BatchNorm statistics of random images, so that an untrained network's activations have a sane size."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for _ in range(4):
            model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def test_resnet18_runs_in_integers(tmp_path) -> None:
    import torchvision

    model = settled(torchvision.models.resnet18(), 224)
    x = (torch.randn(8, 3, 224, 224),)
    quantized = ck.quant.quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    audit = ck.audit(path)
    assert audit.operators["Conv"] == (20, 20)
    assert audit.operators["Add"] == (8, 8)
    assert audit.operators["Gemm"] == (1, 1)
    fast, slow = latency([path, ck.export_onnx(model, tmp_path / "f.onnx", x)], (x[0][:1],), seconds=3)
    assert fast < 0.5 * slow


@pytest.mark.skipif(not (DATA / "cifar10_resnet").is_dir(), reason="no trained CIFAR networks")
def test_resnet20_runs_in_integers(tmp_path) -> None:
    from safetensors.torch import load_file
    from vision import CifarResNet

    model = CifarResNet(20)
    model.load_state_dict(load_file(next((DATA / "cifar10_resnet").glob("resnet20-jpeg*.safetensors"))))
    x = (torch.randn(64, 3, 32, 32),)
    path = ck.export_onnx(ck.quant.quantize_static(model.eval(), [x]), tmp_path / "q.onnx", x)
    audit = ck.audit(path)
    assert audit.operators["Conv"] == (19, 19)
    assert audit.operators["Add"] == (9, 9)
    assert audit.operators["Gemm"] == (1, 1)
    assert audit.conversions == 1


@pytest.mark.skipif(not (DATA / "cifar10_resnet").is_dir() or not (DATA / "cifar10").is_dir(), reason="no CIFAR-10")
@pytest.mark.parametrize("depth", [20, 56])
def test_simulated_is_executed(tmp_path, depth) -> None:
    """On real images: 99.9 % of the outputs of the file as written within a step, 99.8 % of the classes as optimized."""
    from safetensors.torch import load_file
    from vision import CifarResNet, Images, cifar10

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    data = cifar10(str(DATA / "cifar10"), 2000)
    model = CifarResNet(depth)
    model.load_state_dict(load_file(next((DATA / "cifar10_resnet").glob(f"resnet{depth}-jpeg*.safetensors"))))
    calibration = [(x,) for x, _ in Images(*(v[:512] for v in data["train"]), 128, mean, std)]
    quantized = ck.quant.quantize_static(model.eval(), calibration)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", calibration[0])
    runs = [ck.measure.session(path, optimize=optimize) for optimize in (False, True)]
    x = torch.cat([x for x, _ in Images(*data["test"], 500, mean, std)])
    with torch.no_grad():
        simulated = quantized(x)
    written, optimized = (torch.from_numpy(run.run(None, {run.get_inputs()[0].name: x.numpy()})[0]) for run in runs)
    step = (simulated.amax() - simulated.amin()) / 255
    assert ((written - simulated).abs() <= step).double().mean() >= 0.999
    assert (optimized.argmax(1) == simulated.argmax(1)).double().mean() >= 0.998


ZOO = """resnet18 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 densenet121 squeezenet1_1 efficientnet_b0
 regnet_y_400mf mnasnet0_5 vgg11_bn""".split()


@pytest.mark.parametrize("name", ZOO)
def test_torchvision_prunes(name) -> None:
    import torchvision

    model = settled(torchvision.models.get_model(name), 64)
    x = (torch.randn(2, 3, 64, 64),)
    before = ck.count_macs(model, x)
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.6))
    ck.prune.apply_(model, plan)
    assert ck.count_macs(model, x) <= 0.6 * before
    model.train()(x[0].repeat(2, 1, 1, 1)).sum().backward()


@pytest.mark.filterwarnings("ignore:fp16 on a CPU is for numerics only")
@pytest.mark.parametrize("precision", [ck.mixed.FP32, ck.mixed.MASTER_FP16, ck.mixed.SPLIT_BF16], ids=lambda p: p.name)
def test_resnet20_keeps_its_zeros_to_int8(tmp_path, precision) -> None:
    """Sparsify(0.9), Distill, QAT, ONNX: the zeros of the int8 weights are those of the mask, also after a kill."""
    import numpy as np
    import onnx
    from vision import CifarResNet

    torch.manual_seed(0)
    y = torch.arange(128) % 10
    x = torch.randn(128, 3, 32, 32) + y.view(-1, 1, 1, 1) / 3
    batches = list(zip(x.split(32), y.split(32), strict=True))
    task = ck.Task(train=batches, val=batches)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    recipe = ck.Recipe(
        ck.Sparsify(
            budget=ck.remove(weights=0.9),
            schedule=ck.prune.schedules.Cubic(),
            finetune=ck.Train(epochs=2, optimizer=sgd, precision=precision),
        ),
        ck.Distill(epochs=1, optimizer=sgd, precision=precision),
        ck.QAT(epochs=1),
        export="last",
    )
    model = settled(CifarResNet(20), 32)
    result = recipe.run(model, task, tmp_path / "run")

    def zeros(path) -> int:
        file = onnx.load(str(path))
        stored = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
        read = {node.input[0] for node in file.graph.node if node.op_type == "DequantizeLinear"}
        weights = [stored[n] for n in read if n in stored and stored[n].dtype == np.int8]
        # The three input channels of the first layer are padded to four for the runtime; those zeros are no weights.
        return sum(int(((w[:, :3] if w.shape == (16, 4, 3, 3) else w) == 0).sum()) for w in weights)

    assert result.rows[-1].removed == round(0.9 * 268336) == zeros(result.onnx)
    before = result.onnx.read_bytes()
    (tmp_path / "run" / "2-distill" / "row.json").unlink()
    again = recipe.run(model, task, tmp_path / "run")
    assert again.onnx.read_bytes() == before


@pytest.mark.skipif(not (DATA / "cifar10_resnet").is_dir() or not (DATA / "cifar10").is_dir(), reason="no CIFAR-10")
def test_resnet20_at_half_the_macs() -> None:
    """Right after the cut, without labels or training, far above the 57.3 % of the best other tool."""
    from safetensors.torch import load_file
    from vision import CifarResNet, Images, cifar10

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    data = cifar10(str(DATA / "cifar10"), 4000)
    train = Images(*data["train"], 128, mean, std, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, mean, std))
    model = CifarResNet(20)
    model.load_state_dict(load_file(next((DATA / "cifar10_resnet").glob("resnet20-jpeg*.safetensors"))))
    before = ck.count_macs(model, task.example())
    pruned = ck.Prune(budget=ck.keep(macs=0.5))(model.eval(), task)
    assert ck.count_macs(pruned, task.example()) <= 0.5 * before
    assert ck.evaluate(pruned, task) > 0.66
