"""torchvision's deformable convolution as ONNX's DeformConv (opset 19), which torch's exporter has no form of."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch

from compresskit.base.errors import ExportError


def deformable_translations() -> dict[Any, Any]:
    """Operator -> function that writes it with onnxscript; empty where torchvision is not imported."""
    from onnxscript import opset20 as op  # heavy, and only exporting needs it

    def deform_conv2d(  # type: ignore[no-untyped-def]
        x,
        weight,
        offset,
        mask,
        bias,
        stride_h: int,
        stride_w: int,
        pad_h: int,
        pad_w: int,
        dilation_h: int,
        dilation_w: int,
        groups: int,
        offset_groups: int,
        use_mask: bool,
    ):
        if not _has_kernel():
            import onnxruntime

            raise ExportError(
                f"ONNX Runtime {onnxruntime.__version__} has no kernel for DeformConv, which deform_conv2d is in ONNX: install a"
                " newer one, of which 1.32 has it, or leave it out of the file"
            )
        return op.DeformConv(
            x,
            weight,
            offset,
            bias,
            mask if use_mask else None,
            strides=[stride_h, stride_w],
            pads=[pad_h, pad_w, pad_h, pad_w],
            dilations=[dilation_h, dilation_w],
            group=groups,
            offset_group=offset_groups,
        )

    with suppress(AttributeError):
        return {torch.ops.torchvision.deform_conv2d.default: deform_conv2d}
    return {}


@functools.cache
def _has_kernel() -> bool:
    """Whether the installed ONNX Runtime executes DeformConv on a CPU."""
    import onnxruntime
    from onnx import TensorProto, helper

    x, weight, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1] * 4) for name in ("x", "weight", "y"))
    offset = helper.make_tensor_value_info("offset", TensorProto.FLOAT, [1, 2, 1, 1])
    node = helper.make_node("DeformConv", ["x", "weight", "offset"], ["y"])
    graph = helper.make_graph([node], "probe", [x, weight, offset], [y])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's classes of errors have no common base
        return False
    return True
