"""Palettes of an ONNX graph (onnx-ir): one `compresskit::Palette` becomes operators that every runtime has.

indices (int8) -> Cast to int32 -> Add the places of the channels -> Gather from the table of centroids -> weight (fp32)

All inputs are constants: ONNX Runtime computes the weight once, when it loads the file.
"""

from __future__ import annotations

import onnx_ir as ir

from compresskit.export.ops.blocks import INDICES, PALETTE_OPERATOR
from compresskit.export.ops.translations import DOMAIN
from compresskit.export.rewrite.common import replace


def write_palettes(model: ir.Model) -> None:
    """Replace every palette of a graph with standard operators, in place."""
    taken: set[str] = set()
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == PALETTE_OPERATOR]:
        indices, table, places = node.inputs
        cast = ir.Node("", "Cast", [indices], {"to": ir.AttrInt64("to", ir.DataType.INT32.value)})
        where = ir.Node("", "Add", [cast.outputs[0], places])
        gather = ir.Node("", "Gather", [table, where.outputs[0]], {"axis": ir.AttrInt64("axis", 0)})
        name = str(node.outputs[0].name)
        for made, ending in ((cast, "_whole"), (where, "_places")):
            made.outputs[0].name = f"{name}{ending}"
            made.outputs[0].shape, made.outputs[0].type = node.outputs[0].shape, ir.TensorType(ir.DataType.INT32)
        for made in (cast, where, gather):
            made.name = f"{node.name}_{made.op_type}"
        replace(model.graph, node, [cast, where, gather], gather.outputs[0])
        weight = str(indices.name).removesuffix(f".{INDICES}") if indices is not None else name
        gather.outputs[0].name = name if weight in taken else weight
        taken.add(weight)
