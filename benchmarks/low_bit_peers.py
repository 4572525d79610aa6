"""Other quantizers at few bits, for `low_bit.py`: weights per channel, activations of 8 bits, each with its defaults otherwise.

onnxruntime       quantize_static after its pre-processing, executed; it has no weights of 3 and 2 bits
AIMET             aimet-onnx: ranges of least and largest value, simulated
AIMET, AdaRound   the same, with rounding learned in 300 iterations a layer
ModelOpt          nvidia-modelopt on the PyTorch model: ranges of the largest value, simulated, not executed
MCT               model-compression-toolkit on the PyTorch model, simulated: 8, 4 and 2 bits, ranges of the least squared error,
                  biases corrected; activations of powers of two, as its default platform has them

`pip install aimet-onnx nvidia-modelopt huggingface_hub` gives those before MCT, whose `pip install model-compression-toolkit`
wants older packages than the others; they are left out where they are not installed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from onnxruntime.quantization import QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from quantize_cifar import Reader
from real_networks import Network, Run, executed, float_file, float_run
from torch import Tensor, nn

from compresskit.measure import session

ITERATIONS = 300
WEIGHT_TYPES = {8: QuantType.QInt8, 4: QuantType.QInt4}
PACKAGES = {
    "onnxruntime": "onnxruntime",
    "AIMET": "aimet_onnx",
    "AIMET, AdaRound": "aimet_onnx",
    "ModelOpt": "modelopt",
    "MCT": "model_compression_toolkit",
}
WIDTHS = {"onnxruntime": tuple(WEIGHT_TYPES), "MCT": (8, 4, 2)}  # of weights; others have all

#: (network, calibration batches, bits of the weights, path without its file) -> what runs it
Peer = Callable[[Network, list[Tensor], int, Path], Run]


def by_onnxruntime(network: Network, batches: list[Tensor], bits: int, path: Path) -> Run:
    float_file(network, batches, path)
    start, prepared = path.with_suffix(".fp32.onnx"), path.with_suffix(".pre.onnx")
    quant_pre_process(str(start), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared), str(path), Reader(session(start).get_inputs()[0].name, batches), per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=WEIGHT_TYPES[bits],
    )  # fmt: skip
    return executed(path)


def by_aimet(network: Network, batches: list[Tensor], bits: int, path: Path, *, adaround: bool = False) -> Run:
    aimet: Any = importlib.import_module("aimet_onnx")
    source, feeds = float_file(network, batches, path)
    simulation = aimet.QuantizationSimModel(source, param_type=aimet.qtype.int(bits), activation_type=aimet.int8)
    if adaround:
        aimet.apply_adaround(simulation, feeds, num_iterations=ITERATIONS)
    simulation.compute_encodings(feeds)
    name = next(iter(feeds[0]))
    return lambda x: [torch.from_numpy(v) for v in simulation.session.run(None, {name: x.numpy()})]


def by_aimet_adaround(network: Network, batches: list[Tensor], bits: int, path: Path) -> Run:
    return by_aimet(network, batches, bits, path, adaround=True)


def by_modelopt(network: Network, batches: list[Tensor], bits: int, path: Path) -> Run:
    mtq: Any = importlib.import_module("modelopt.torch.quantization")
    settings = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    for rule in settings["quant_cfg"]:
        if rule["quantizer_name"] == "*weight_quantizer":
            rule["cfg"]["num_bits"] = bits

    def calibrate(model: Any) -> None:
        for x in batches:
            model(x)

    return float_run(mtq.quantize(copy.deepcopy(network.model), settings, calibrate))


def by_mct(network: Network, batches: list[Tensor], bits: int, path: Path) -> Run:
    mct: Any = importlib.import_module("model_compression_toolkit")
    settings, layers = mct.core.CoreConfig(), mct.core.common.network_editors.NodeTypeFilter
    kinds = [layers(nn.Conv2d), layers(nn.Linear)]
    if bits != 8:  # its default
        settings.bit_width_config.set_manual_weights_bit_width(kinds, [bits] * 2, ["weight"] * 2)
    platform = mct.get_target_platform_capabilities()
    quantized, _ = mct.ptq.pytorch_post_training_quantization(
        network.model, lambda: ([x] for x in batches), core_config=settings, target_platform_capabilities=platform
    )
    return float_run(quantized.eval())


BY_PEER: dict[str, Peer] = {
    "onnxruntime": by_onnxruntime,
    "AIMET": by_aimet,
    "AIMET, AdaRound": by_aimet_adaround,
    "ModelOpt": by_modelopt,
    "MCT": by_mct,
}


def covers(way: str, bits: int) -> bool:
    """Whether a peer is installed and has weights of so many bits."""
    return importlib.util.find_spec(PACKAGES[way]) is not None and bits in WIDTHS.get(way, (bits,))
