"""Where quantizers are inserted."""

from __future__ import annotations

import networks
from networks import build, image

from compresskit.graph.normalize import aten
from compresskit.quant import quantize_static


def test_relu_is_merged_into_the_quantizer() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    assert not any(n.target is aten.relu.default for n in quantized.body.graph.nodes)
    assert sum(q.clamp == (0.0, None) for q in quantized.activation_quantizers()) == 2
    assert all(q.zero_point == 0 for q in quantized.activation_quantizers() if q.clamp)


def test_inputs_of_a_concat_share_a_quantizer() -> None:
    quantized = quantize_static(build(networks.Concat), [image(16)])
    names = [n.target for n in quantized.body.graph.nodes if n.op == "call_module"]
    concat = next(n for n in quantized.body.graph.nodes if n.target is aten.cat.default)
    assert len({n.target for n in concat.args[0]}) == 1
    assert names.count(concat.args[0][0].target) == 3
