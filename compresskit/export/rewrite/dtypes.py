"""Half-precision models in ONNX files.

fp16 is written as it is: every runtime executes it (on a CPU, ONNX Runtime converts). bf16 has no kernels there, and a file that
does not run cannot be verified: a bf16 model is written with its weights stored in bf16, half the bytes, and computes in fp32.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ExportError
from compresskit.base.task import Inputs
from compresskit.export.files import LIMIT
from compresskit.graph.surgery import copy_model, not_fp32


def least_precise_dtype(model: nn.Module) -> torch.dtype:
    """The floating point dtype with the fewest significant bits among parameters and buffers."""
    dtypes = {v.dtype for v in (*model.parameters(), *model.buffers()) if v.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def widen_to_fp32(model: nn.Module, example: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of a bf16 model, and its inputs, in fp32; any other model and its inputs as they are.

    What is deployed of a quantized bf16 model, a graph, has integers and fp32 scales in the place of its weights.
    """
    given = pytree.tree_leaves(example) if isinstance(model, fx.GraphModule) else []
    narrow = any(isinstance(value, Tensor) and value.dtype is torch.bfloat16 for value in given)
    if not narrow and least_precise_dtype(model) is not torch.bfloat16:
        return model, example

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value

    wider: Inputs = pytree.tree_map(wide, example)
    return copy_model(model).float(), wider


def check_kernels(file: Any, model: nn.Module) -> None:
    """Raise ExportError where an onnx-ir model computes in float64 or bf16, for which ONNX Runtime has few kernels.

    model: that the file was made of, for the message.
    """
    import onnx_ir as ir  # heavy, and only exporting needs it

    rare = (ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
    values = [value for node in file.graph.all_nodes() for value in node.outputs if value.dtype in rare]
    stored = sum(value.const_value.nbytes for value in file.graph.initializers.values() if value.const_value is not None)
    if not values or stored > LIMIT:  # larger than what can be loaded from memory
        return
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(ir.to_proto(file).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        found = re.search(r"implementation for (\w+)|operator \((\w+)\)", str(error))
        lacks = f"ONNX Runtime has no {next(filter(None, found.groups()))} in {values[0].dtype}" if found else str(error)
        other = not_fp32(model)
        wanted = f"wanted fp32 weights, but {other}" if other else "wanted fp32 in forward, which casts, or uses torch.autocast"
        advice = "export model.float()" if other else "take the cast or the autocast out of forward"
        raise ExportError(f"{type(model).__name__}: {wanted}, and {lacks}; {advice}") from error


def store_bf16_(file: Any) -> None:
    """Store the fp32 matrices and kernels of an onnx-ir model in bf16, each behind a Cast to fp32."""
    import ml_dtypes
    import onnx_ir as ir  # heavy, and only exporting needs it

    for name, value in list(file.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype is not ir.DataType.FLOAT or len(tensor.shape) < 2:
            continue
        narrow = ir.tensor(tensor.numpy().astype(ml_dtypes.bfloat16), name=f"{name}.bf16")
        stored = ir.Value(name=f"{name}.bf16", shape=value.shape, type=ir.TensorType(narrow.dtype), const_value=narrow)
        cast = ir.Node("", "Cast", [stored], {"to": ir.AttrInt64("to", ir.DataType.FLOAT.value)})
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, value.type
        file.graph.insert_before(file.graph[0], cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        file.graph.initializers.pop(name)
        file.graph.initializers[stored.name] = stored


def transpose_in_fp32_(file: Any) -> None:
    """Cast to fp32 before a Transpose, not behind it, where an onnx-ir model multiplies what has its first dimension moved.

    ONNX Runtime takes such a Transpose through the Cast into the product, and ends the process while it loads the file (1.32:
    MatmulTransposeFusion, then NchwcTransformer). On a CPU it puts a Cast before a product in fp16 itself.
    """
    import onnx_ir as ir  # heavy, and only exporting needs it

    for node in [node for node in file.graph.all_nodes() if node.op_type == "MatMul"]:
        for i, value in enumerate(node.inputs):
            cast = _producer(value, "Cast")
            turn = _producer(cast.inputs[0] if cast else value, "Transpose")
            perm = list(turn.attributes.get_ints("perm", ())) if turn else []
            if len(perm) < 3 or perm[0] == 0 or value.dtype is not (ir.DataType.FLOAT if cast else ir.DataType.FLOAT16):
                continue
            steps: list[tuple[str, dict[str, Any]]] = [("Cast", {"to": ir.DataType.FLOAT.value}), ("Transpose", {"perm": perm})]
            steps += [] if cast else [("Cast", {"to": ir.DataType.FLOAT16.value})]
            made: list[Any] = []
            for kind, attributes in steps:
                source = made[-1].outputs[0] if made else turn.inputs[0]
                made.append(ir.node(kind, [source], attributes, name=f"{node.name}.{i}.{len(made)}"))
                made[-1].outputs[0].name = made[-1].name
            made[-1].outputs[0].shape, made[-1].outputs[0].type = value.shape, value.type
            node.graph.insert_before(node, made)
            node.replace_input_with(i, made[-1].outputs[0])
            for unused in filter(None, (cast, turn)):
                if not unused.outputs[0].uses() and not unused.outputs[0].is_graph_output():
                    unused.graph.remove(unused, safe=True)


def _producer(value: Any, kind: str) -> Any:
    """The node that computes a value, where it is of this kind; else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind and node.domain == "" else None
