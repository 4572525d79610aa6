"""What a file holds of one weight that is looked up in and multiplied by: the bytes that the plan says, once where it can be."""

from __future__ import annotations

import math

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

import compresskit as ck
from compresskit.export.check.profile.optimized_graph import optimized_model
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.weight_only import DEQUANTIZE_LINEAR, MATMUL_NBITS

WORDS = 600


class Tied(nn.Module):
    """Ids (N, T) to a score of each word, by the table that they are looked up in."""

    def __init__(self, width: int, words: int = WORDS) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


def stored_bytes(file: onnx.ModelProto) -> int:
    """Bytes of all that a file stores."""
    total = 0
    for tensor in file.graph.initializer:
        count, wide = math.prod(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        total += -(-count // 2) if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4) else count * wide
    return total


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("scheme", "storage", "width", "copies"),
    [
        (BlockScheme(), DEQUANTIZE_LINEAR, 32, 1),
        (BlockScheme(block_size=16, symmetric=False), DEQUANTIZE_LINEAR, 36, 1),
        (BlockScheme(bits=8, block_size=None), DEQUANTIZE_LINEAR, 32, 1),
        (BlockScheme(bits=8, block_size=None, symmetric=False), DEQUANTIZE_LINEAR, 32, 1),
        (BlockScheme(), MATMUL_NBITS, 32, 1),
        (BlockScheme(block_size=16, symmetric=False), MATMUL_NBITS, 32, 1),
        (BlockScheme(block_size=16), MATMUL_NBITS, 36, 2),  # whose product has a block that is filled up
        (BlockScheme(block_size=16, symmetric=False), MATMUL_NBITS, 35, 2),  # whose rows end in half a byte
    ],
)
def test_a_tied_weight_takes_the_bytes_of_the_plan(scheme, storage, width, copies, tmp_path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (2, 5))
    quantized = quantize_weights(Tied(width).eval(), ids, scheme=scheme, storage=storage, dynamic=(0, 1))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    file = onnx.load(path)
    assert 0 <= stored_bytes(file) - quantized.plan.bytes < 100  # sizes of a Reshape
    bits = storage.stored_bits(scheme.bits)
    assert sum(math.prod(t.dims) >= WORDS * width * bits // 8 for t in file.graph.initializer) == copies
    assert ck.verify_onnx(path, quantized, [(torch.randint(WORDS, (3, 7)),)]).passed
    whole = bits == 4 and (storage is DEQUANTIZE_LINEAR or width % 2 == 1)
    assert ("all rows are decoded in every call" in quantized.plan.rows[0].note) == whole


@pytest.mark.matrix
@pytest.mark.parametrize(("words", "width"), [(40, 32), (100, 35), (255, 32), (256, 32)])
@pytest.mark.parametrize("storage", [DEQUANTIZE_LINEAR, MATMUL_NBITS], ids=["standard", "nbits"])
@pytest.mark.parametrize("scheme", [BlockScheme(symmetric=False), BlockScheme(bits=8, block_size=None)], ids=["4", "8"])
def test_what_is_too_small_to_be_stored_once_counts_twice(scheme, storage, words, width, tmp_path) -> None:
    ids = torch.randint(words, (2, 5))
    quantized = quantize_weights(Tied(width, words).eval(), ids, scheme=scheme, storage=storage, dynamic=(0, 1))
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", ids))
    assert 0 <= stored_bytes(file) - quantized.plan.bytes < 100  # sizes of a Reshape


@pytest.mark.parametrize("storage", [DEQUANTIZE_LINEAR, MATMUL_NBITS], ids=["standard", "nbits"])
def test_a_product_by_a_table_runs_on_four_bits(storage, tmp_path) -> None:
    """ONNX Runtime transposes the table when it loads the file, and then fuses it with the product."""
    ids = torch.randint(WORDS, (2, 5))
    quantized = quantize_weights(Tied(32).eval(), ids, storage=storage, dynamic=(0, 1))
    kinds = [node.op_type for node in optimized_model(ck.export_onnx(quantized, tmp_path / "q.onnx", ids)).graph.node]
    assert "MatMulNBits" in kinds
    assert not {"MatMul", "Transpose", "Reshape"}.intersection(kinds)
