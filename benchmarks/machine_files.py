"""The files of `machines.py`: networks, their inputs and how each is quantized and exported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torchvision
from quantize_cifar import MEAN, STD, trained
from quantize_dynamic import Encoder, Lstm
from quantize_zoo import network
from torch import Tensor, nn
from vision import cifar10

import compresskit as ck
from compresskit.quant import ARM, OPENVINO, X86, Target

#: As X86 was before its weights were made such that no pair overflows: a file that this page must find fault with.
UNGUARDED = replace(X86, name="X86, saturates=False", saturates=False)
STATIC = (X86, ARM, OPENVINO)
IMAGES = {"mobilenet_v2": 128, "mobilenet_v3_large": 128, "efficientnet_b0": 128, "vit_b_16": 64}  # pixels
#: Types of tensors: of a session, of a file.
ELEMENTS = {
    "tensor(uint8)": onnx.TensorProto.UINT8,
    "tensor(int8)": onnx.TensorProto.INT8,
    "tensor(int32)": onnx.TensorProto.INT32,
    "tensor(float)": onnx.TensorProto.FLOAT,
}
#: Operators of ONNX Runtime whose first output is an integer tensor.
INTEGER_OPERATORS = frozenset(
    """QuantizeLinear DynamicQuantizeLinear QLinearConv QLinearAdd QLinearMul QLinearConcat QLinearAveragePool QLinearReduceMean
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearSigmoid QLinearMatMul MatMulInteger ConvInteger""".split()
)

#: Operators that round a float tensor.
ROUNDINGS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
#: Operators with products -> places of their weights and of the zero points of those.
WEIGHTS = {
    "QLinearConv": ((3, 5),),
    "QGemm": ((3, 5),),
    "QLinearMatMul": ((3, 5),),
    "MatMulInteger": ((1, 3),),
    "ConvInteger": ((1, 3),),
    "MatMulIntegerToFloat": ((1, 5),),
    "DynamicQuantizeMatMul": ((1, 3),),
    "DynamicQuantizeLSTM": ((1, 9), (2, 11)),
}


@dataclass(frozen=True)
class Cut:
    """A file whose every operator reads integers that are given: what one rounds otherwise, the next does not see.

    wanted: the exact file, whose outputs are `given`, then for each of `rounded` its float input and its scale.
    file: the fused file, whose inputs are its own and each of `given` with ".given", and whose outputs are `integers`.
    rounded: those of `integers` that are rounded from float tensors; the others come from integer kernels.
    """

    wanted: Path
    file: Path
    given: tuple[str, ...]
    integers: tuple[str, ...]
    rounded: tuple[str, ...]


@dataclass(frozen=True)
class File:
    """An exported file and what it is run on.

    inputs: (samples, ...), of its only input. batch: samples in one run. exact: the same file after ONNX Runtime's fusions, with
    exact sums. watched: the fused file and the exact one with their integer tensors as outputs; none where they have none. cut:
    one operator at a time, likewise.
    verified, machines: what `verify_onnx(machines="all")` says.
    """

    name: str
    target: str
    path: Path
    inputs: Tensor
    batch: int
    exact: Path
    watched: tuple[Path, ...]
    cut: Cut | None
    verified: bool
    machines: dict[str, str]
    opset: int
    oldest: str


class Minilm(nn.Module):
    """Word ids (N, L) to the mean of the states of a BERT with the shape of MiniLM, (N, 384)."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")  # an extra
        how = {"hidden_size": 384, "num_hidden_layers": layers, "num_attention_heads": 12, "intermediate_size": 1536}
        self.body = Encoder(transformers.BertModel(transformers.BertConfig(vocab_size=30522, **how), add_pooling_layer=False))
        for parameter in self.body.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids, torch.ones_like(ids))


def transformer(size: int) -> nn.Module:
    """ViT-B/16 for images of `size` pixels."""
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(image_size=size)
    nn.init.normal_(model.heads[-1].weight, 0, 0.02)  # zeros otherwise
    return model.eval()


Build = Callable[[], tuple[nn.Module, Tensor, Tensor, int]]  # the model, calibration, inputs to compare on, batch


def sources(data: Path, checkpoints: Path, samples: int) -> dict[str, tuple[tuple[Target, ...], bool, Build]]:
    """Name -> (targets, whether it is quantized dynamically, what makes it)."""

    def cifar(name: str) -> Build:
        def build() -> tuple[nn.Module, Tensor, Tensor, int]:
            parts = cifar10(str(data), max(samples, 512))
            train, test = (
                (parts[part][0].float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1) for part in ("train", "test")
            )
            return trained(name, checkpoints), train[:512], test[:samples], 50

        return build

    def images(name: str) -> Build:
        def build() -> tuple[nn.Module, Tensor, Tensor, int]:
            size, count = IMAGES[name], min(samples, 64)
            x = torch.randn(count + 16, 3, size, size, generator=torch.Generator().manual_seed(1))
            return (transformer(size) if name == "vit_b_16" else network(name, x[:16])), x[:16], x[16:], 8

        return build

    def text(make: Callable[[], nn.Module], words: int, length: int) -> Build:
        def build() -> tuple[nn.Module, Tensor, Tensor, int]:
            torch.manual_seed(0)
            ids = torch.randint(0, words, (min(samples, 64) + 8, length))
            return make().eval(), ids[:8], ids[8:], 8

        return build

    found: dict[str, tuple[tuple[Target, ...], bool, Build]] = {"resnet20": ((*STATIC, UNGUARDED), False, cifar("resnet20"))}
    found["resnet56"] = (STATIC, False, cifar("resnet56"))
    found |= {name: (STATIC, False, images(name)) for name in IMAGES}
    found["minilm"] = ((X86,), True, text(Minilm, 30522, 32))
    found["lstm"] = ((X86,), True, text(Lstm, 10000, 32))
    found["lstm_one_word"] = ((X86,), True, text(Lstm, 10000, 1))  # no state is rounded
    return found


def files(source: tuple[tuple[Target, ...], bool, Build], name: str, folder: Path) -> list[File]:
    """Quantize a network for each of its targets, write the files and prove them."""
    targets, dynamic, build = source
    model, calibration, inputs, batch = build()
    made = []
    for target in targets:
        quantized: nn.Module
        if dynamic:
            varying = tuple(d for d in (0, 1) if calibration.shape[d] > 1)
            quantized = ck.quant.quantize_dynamic(model, (calibration,), target=target, dynamic=varying)
        else:
            quantized = ck.quant.quantize_static(model, [(x,) for x in calibration.split(64)], target=target)
        path = folder / f"{name}.{target.name.split(',')[0]}{'.unguarded' * (target is UNGUARDED)}.onnx"
        ck.export_onnx(quantized, path, (calibration[:2],), opset="lowest")
        proof = ck.verify_onnx(path, quantized, [(x,) for x in inputs[:200].split(batch)], machines="all")
        said, proofs = ck.audit(path), {each.machine: str(each) for each in proof.machines}
        exact, pair, cut = variants(path, dynamic)
        label, oldest = f"{target.name}{', dynamic' * dynamic}", str(said.oldest_runtime)
        made.append(File(name, label, path, inputs, batch, exact, pair, cut, proof.passed, proofs, said.opset, oldest))
        print(name, label, proof, flush=True)
    return made


def variants(path: Path, dynamic: bool) -> tuple[Path, tuple[Path, ...], Cut | None]:
    """Write the file as ONNX Runtime fuses it, with exact sums; both forms with their integer tensors as outputs; and cut."""
    options, fused = quiet(), path.with_suffix(".fused.onnx")
    levels = onnxruntime.GraphOptimizationLevel  # further fusions of a dynamic file hide its integers
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if dynamic else levels.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(fused)
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    proto = onnx.load(fused)
    names = [
        n.output[0] for n in proto.graph.node if n.op_type in INTEGER_OPERATORS or (n.op_type == "QGemm" and len(n.input) > 7)
    ]
    outputs, watched = list(proto.graph.output), (path.with_suffix(".watched.onnx"), path.with_suffix(".exact_watched.onnx"))
    _save(proto, _values(names), watched[0])
    _make_exact_(proto.graph)
    _save(proto, _values(names), watched[1])
    exact = _save(proto, outputs, path.with_suffix(".exact.onnx"))
    return (exact, watched, _cut(fused, exact, names)) if names else (exact, (), None)


def quiet() -> Any:
    """Options of a session that says nothing of constants that it removes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def _values(names: list[str]) -> list[Any]:
    return [onnx.ValueInfoProto(name=name) for name in names]


def _cut(fused: Path, exact: Path, integers: list[str]) -> Cut:
    """Write both files of a `Cut`."""
    proto = onnx.load(exact)
    nodes = [node for node in proto.graph.node if node.output[0] in integers]
    given = [name for node in nodes for name in node.output if name]
    rounded = [node for node in nodes if node.op_type in ROUNDINGS]
    scales = [node.output[1] if node.op_type == "DynamicQuantizeLinear" else node.input[1] for node in rounded]
    sources = [name for node, scale in zip(rounded, scales, strict=True) for name in (node.input[0], scale)]
    made = {name for node in proto.graph.node for name in node.output}
    for k, name in enumerate(sources):  # a constant, an input or a tensor that is an output already cannot be one again
        if name not in made or name in given or name in sources[:k]:
            sources[k] = f"{name}.output.{k}"
            proto.graph.node.append(onnx.helper.make_node("Identity", [name], [sources[k]]))
    wanted = _save(proto, _values([*given, *sources]), exact.with_suffix(".wanted.onnx"))
    session = onnxruntime.InferenceSession(str(wanted), quiet(), providers=["CPUExecutionProvider"])
    proto = onnx.load(fused)
    for output in session.get_outputs()[: len(given)]:
        kind = ELEMENTS[output.type]
        proto.graph.input.append(onnx.helper.make_tensor_value_info(f"{output.name}.given", kind, None))
    for node in proto.graph.node:
        node.input[:] = [f"{name}.given" if name in given else name for name in node.input]
    file = _save(proto, _values(integers), fused.with_suffix(".cut.onnx"))
    return Cut(wanted, file, tuple(given), tuple(integers), tuple(node.output[0] for node in rounded))


def _save(proto: Any, outputs: list[Any], path: Path) -> Path:
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)
    used = {node.domain for node in proto.graph.node}
    kept = [entry for entry in proto.opset_import if entry.domain in used]  # older releases refuse the others
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    onnx.save(proto, path)
    return path


def _make_exact_(graph: Any) -> None:
    """Move int8 weights of products to uint8, whose kernels widen before they add."""
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for k, node in enumerate(graph.node):
        for place, zero in WEIGHTS.get(node.op_type, ()):
            weight = constants.get(node.input[place])
            if weight is None or weight.dtype != np.int8:
                continue
            while len(node.input) <= zero:
                node.input.append("")
            old = constants[node.input[zero]] if node.input[zero] else np.zeros((), np.int8)
            for at, values in ((place, weight), (zero, old)):
                name = f"{node.input[at]}.moved.{k}.{at}"
                graph.initializer.append(onnx.numpy_helper.from_array((values.astype(np.int32) + 128).astype(np.uint8), name))
                node.input[at] = name
