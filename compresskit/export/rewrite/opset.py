"""Write an ONNX graph (onnx-ir) in the operators of an older opset, for older runtimes.

torch's exporter writes opset 18 or newer. Down to 13 most operators differ in their form only:

    Reduce..., Split, Pad: what became an input is an attribute again, and the reverse
    Shape of some dimensions                  -> Shape -> Slice
    LayerNormalization, HardSwish, Mish       -> the operators that they stand for
    CastLike                                  -> Cast
    an attribute that has its default value   -> left out, where the older operator does not know it

Whether an opset has an operator is read from onnx's schemas: its name, its attributes, the number and the types of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from compresskit.base.errors import ExportError, first_line
from compresskit.export.files import LIMIT
from compresskit.export.rewrite.common import constant, replace

OLDEST, NEWEST = 13, 25  # 13: QuantizeLinear with a scale for each channel; 25: int2
#: IR version of a file -> the newest opset that it may have; runtimes refuse a newer one than they know.
_IR_VERSIONS = {7: 14, 8: 18, 9: 20}
_REDUCTIONS = frozenset(f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split())
_TYPE_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}

#: Rewrites a node in the operators of an opset, in place.
Rewrite = Callable[[], None]


def lower_opset_(model: ir.Model, opset: int) -> None:
    """Write a graph in the operators of an opset, in place.

    Raises ExportError for the first operator that has no form in it; the message names the lowest opset that has one.
    """
    if unknown := first_unknown(model, opset):
        raise ExportError(unknown)
    for node in _nodes(model):
        if (rewrite := _rewrite_for(model, node, opset)) is not None:
            rewrite()
    for name, value in list(model.graph.initializers.items()):
        if not list(value.uses()) and not value.is_graph_output():
            del model.graph.initializers[name]
    model.graph.opset_imports[""] = opset
    set_ir_version_(model)


def lowest_opset(model: ir.Model) -> int:
    """The lowest opset, 13 or newer, in whose operators a graph can be written."""
    return next((opset for opset in range(OLDEST, NEWEST) if not first_unknown(model, opset)), NEWEST)


def set_ir_version_(model: ir.Model) -> None:
    """Set the lowest IR version that the opset of a graph may have; for those after 20, leave it as it is."""
    opset = model.graph.opset_imports[""]
    model.ir_version = next((version for version, newest in _IR_VERSIONS.items() if opset <= newest), model.ir_version)


def first_unknown(model: ir.Model, opset: int) -> str:
    """Name the first operator of a graph that has no form in an opset, and the lowest that has one; "" where all have."""
    for node in _nodes(model):
        if _is_known(node, opset) or _rewrite_for(model, node, opset) is not None:
            continue
        newer = (v for v in range(opset + 1, NEWEST + 1) if _is_known(node, v) or _rewrite_for(model, node, v) is not None)
        lowest = next(newer, None)
        kinds = ", ".join(sorted({v.dtype.name.lower() for v in node.inputs if v is not None and v.dtype is not None}))
        where = f"opset {opset} has no {node.op_type} as the file needs it ({kinds or 'no inputs'}"
        where += "".join(f", {name}" for name in sorted(_unknown_attributes(node, opset))) + ")"
        return f"{where}; the lowest that has it is {lowest}" if lowest else f"{where}, and no other opset has"
    return ""


def check_lowered(model: ir.Model) -> None:
    """Raise ExportError unless onnx's checker accepts a graph and ONNX Runtime loads it; past 2 GB, `verify_onnx` alone can."""
    import onnx
    import onnxruntime

    stored = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if stored > LIMIT:
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
        onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        what = first_line(error)
        raise ExportError(f"in opset {model.graph.opset_imports['']} the file is not valid ({what}); take a newer one") from error


def _nodes(model: ir.Model) -> list[ir.Node]:
    """The standard operators of a graph and of those inside its operators."""
    return [node for node in model.graph.all_nodes() if node.domain == ""]


def _operator_schema(node: ir.Node, opset: int) -> Any:
    from onnx import defs

    try:
        return defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return None


def _is_known(node: ir.Node, opset: int) -> bool:
    """Whether an opset has an operator with the attributes and inputs of a node."""
    schema = _operator_schema(node, opset)
    if schema is None or schema.deprecated or len(node.inputs) > schema.max_input or len(node.outputs) > schema.max_output:
        return False
    if node.op_type == "RoiAlign" and opset < 16:
        return False  # it placed its samples differently
    return not _unknown_attributes(node, opset) and _types_allowed(node, schema)


def _types_allowed(node: ir.Node, schema: Any) -> bool:
    kinds = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    pairs = [(node.inputs, schema.inputs), (node.outputs, schema.outputs)]
    for values, parameters in pairs:
        for i, value in enumerate(values):
            if value is None or value.dtype is None or not parameters:
                continue
            kind = parameters[min(i, len(parameters) - 1)].type_str
            name = f"tensor({_TYPE_NAMES.get(value.dtype, value.dtype.name.lower())})"
            if name not in kinds.get(kind, {kind}) and not kind.startswith("seq"):
                return False
    return True


def _unknown_attributes(node: ir.Node, opset: int) -> set[str]:
    """The attributes of a node that its operator has not in an opset."""
    schema = _operator_schema(node, opset)
    return set() if schema is None else set(node.attributes) - set(schema.attributes)


def _rewrite_for(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    """What writes a node in the operators of an opset; None where it is there already, or has no form in it."""
    if _is_known(node, opset):
        return None
    rule = _RULES.get(node.op_type)
    if node.op_type in _REDUCTIONS:
        rule = _axes_to_attribute
    rewrite = rule(model, node, opset) if rule is not None else None
    return rewrite if rewrite is not None else _drop_defaults(node, opset)


def _drop_defaults(node: ir.Node, opset: int) -> Rewrite | None:
    """Leave out attributes that an opset does not know yet, where they have their default value."""
    from onnx import helper

    newest, schema = _operator_schema(node, NEWEST), _operator_schema(node, opset)
    if newest is None or schema is None or len(node.inputs) > schema.max_input or not _types_allowed(node, schema):
        return None
    unknown = _unknown_attributes(node, opset)
    for name in unknown:
        attribute = newest.attributes.get(name)
        if attribute is None or not attribute.default_value.name:
            return None
        default = helper.get_attribute_value(attribute.default_value)
        default = default.decode() if isinstance(default, bytes) else default
        if node.attributes[name].value != default:
            return None
    if not unknown or node.op_type == "RoiAlign":
        return None

    def rewrite() -> None:
        for name in unknown:
            del node.attributes[name]

    return rewrite


def _axes_to_attribute(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if len(node.inputs) > 1 and node.inputs[1] is not None and (axes is None or axes.size == 0):
        return None
    if axes is None and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        return None

    def rewrite() -> None:
        node.attributes.pop("noop_with_empty_axes", None)
        if len(node.inputs) > 1:
            node.resize_inputs(1)
        if axes is not None:
            node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in axes])

    return rewrite


def _split_sizes(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    x, count = node.inputs[0], node.attributes.get_int("num_outputs", 0)
    if not count or x is None or x.shape is None:
        return None
    size = x.shape[node.attributes.get_int("axis", 0)]
    if not isinstance(size, int):
        return None
    each = -(-size // count)

    def rewrite() -> None:
        del node.attributes["num_outputs"]
        sizes = [min(each, size - i * each) for i in range(count)]
        node.resize_inputs(2)
        node.replace_input_with(1, _vector(model, f"{node.outputs[0].name}.sizes", sizes))

    return rewrite


def _pad_all_axes(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    x, pads = node.inputs[0], constant(node.inputs[1])
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    if axes is None or pads is None or x is None or x.shape is None:
        return None
    rank = len(x.shape)

    def rewrite() -> None:
        whole = np.zeros((2, rank), np.int64)
        whole[:, [int(axis) % rank for axis in axes]] = pads.reshape(2, -1)
        node.replace_input_with(1, _vector(model, f"{node.outputs[0].name}.pads", whole.ravel().tolist()))
        node.resize_inputs(3)

    return rewrite


def _slice_shape(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 2**31 - 1)
    x = node.inputs[0]
    if end == 0 or (start == 0 and "end" not in node.attributes):
        return None

    def rewrite() -> None:
        name = node.outputs[0].name
        whole = ir.node("Shape", [x])
        whole.outputs[0].type, whole.outputs[0].name = node.outputs[0].type, f"{name}.whole"
        ends = [_vector(model, f"{name}.{place}", [n]) for place, n in (("start", start), ("end", end))]
        part = ir.node("Slice", [whole.outputs[0], *ends])
        _replace(node, [whole, part])

    return rewrite


def _spell_out_layer_norm(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, in the form that ONNX Runtime makes one kernel of again."""
    x, axis = node.inputs[0], node.attributes.get_int("axis", -1)
    if x is None or x.dtype is not ir.DataType.FLOAT or any(list(v.uses()) for v in node.outputs[1:]):
        return None
    if axis >= 0 and x.shape is None:
        return None
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis, len(x.shape or ())))

    def rewrite() -> None:
        name, nodes = node.outputs[0].name, []

        def add(operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
            nodes.append(ir.node(operator, list(inputs), attributes))
            nodes[-1].outputs[0].type, nodes[-1].outputs[0].name = x.type, f"{name}.{len(nodes)}"
            return nodes[-1].outputs[0]

        centered = add("Sub", x, add("ReduceMean", x, axes=axes, keepdims=1))
        variance = add("ReduceMean", add("Pow", centered, _number(model, f"{name}.two", 2.0)), axes=axes, keepdims=1)
        epsilon = _number(model, f"{name}.epsilon", node.attributes.get_float("epsilon", 1e-5))
        result = add("Div", centered, add("Sqrt", add("Add", variance, epsilon)))
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            result = add("Mul", result, node.inputs[1])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            add("Add", result, node.inputs[2])
        _replace(node, nodes)

    return rewrite


def _spell_out_gate(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    """HardSwish as x * HardSigmoid(x), Mish as x * Tanh(Softplus(x))."""
    x = node.inputs[0]

    def rewrite() -> None:
        if node.op_type == "HardSwish":
            nodes = [ir.node("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})]
        else:
            nodes = [ir.node("Softplus", [x])]
            nodes.append(ir.node("Tanh", [nodes[0].outputs[0]]))
        for i, new in enumerate(nodes):
            new.outputs[0].type, new.outputs[0].name = node.outputs[0].type, f"{node.outputs[0].name}.{i}"
        nodes.append(ir.node("Mul", [x, nodes[-1].outputs[0]]))
        _replace(node, nodes)

    return rewrite


def _without_empty_shapes(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    """Reshape that takes 0 for a size: older ones take it for the size in the input, which differs without elements only."""
    shape = constant(node.inputs[1])
    if shape is not None and (shape == 0).any():
        return None

    def rewrite() -> None:
        del node.attributes["allowzero"]

    return rewrite


def _cast_like(model: ir.Model, node: ir.Node, opset: int) -> Rewrite | None:
    like = node.inputs[1]
    kind = None if like is None else like.dtype
    return None if kind is None else lambda: _replace(node, [ir.node("Cast", [node.inputs[0]], {"to": int(kind)})])


#: Operator -> what finds the rewrite of a node that an opset does not have as it is.
_RULES: dict[str, Callable[[ir.Model, ir.Node, int], Rewrite | None]] = {
    "Reshape": _without_empty_shapes,
    "Split": _split_sizes,
    "Pad": _pad_all_axes,
    "Shape": _slice_shape,
    "LayerNormalization": _spell_out_layer_norm,
    "HardSwish": _spell_out_gate,
    "Mish": _spell_out_gate,
    "CastLike": _cast_like,
}


def _replace(node: ir.Node, nodes: list[ir.Node]) -> None:
    assert node.graph is not None
    replace(node.graph, node, nodes, nodes[-1].outputs[0])  # type: ignore[arg-type]


def _vector(model: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    return _stored(model, name, np.array(numbers, np.int64))


def _number(model: ir.Model, name: str, number: float) -> ir.Value:
    return _stored(model, name, np.array(number, np.float32))


def _stored(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value
