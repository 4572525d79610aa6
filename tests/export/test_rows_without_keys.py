"""Attention of queries that a mask leaves no key is 0 in files as in torch, and costs nothing where every query has one."""

from __future__ import annotations

import math
from collections import Counter

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session
from compresskit.quant import quantize_dynamic, quantize_static, quantize_weights

LOWEST = torch.finfo(torch.float32).min
STEPS = 6
#: Name -> a mask made of flags of (rows, queries, keys), where True is open.
MASKS = {
    "flags": lambda keep: keep[:, None],
    "of_a_head": lambda keep: keep[:, None].repeat(1, 4, 1, 1),
    "of_all_rows": lambda keep: keep[0],
    "of_three_dimensions": lambda keep: keep[:1],
    "of_all_queries": lambda keep: keep[:, None, :1],
    "infinite": lambda keep: torch.where(keep[:, None], 0.0, -math.inf),
    "logarithms": lambda keep: keep[:, None].float().log(),
    "lowest": lambda keep: torch.where(keep[:, None], 0.0, LOWEST),
    "lowest_and_infinite": lambda keep: torch.where(keep[:, None], 0.0, torch.tensor([-math.inf, *[LOWEST] * (STEPS - 1)])),
    "product": lambda keep: (1 - keep[:, None].float()) * LOWEST,
}
HAVE_MEANS = ("lowest", "lowest_and_infinite", "product")


class Attention(nn.Module):
    """Attention of four heads; `make_mask` is called with the input, the flags and the module."""

    def __init__(self, make_mask, key_heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 4 * key_heads), nn.Linear(16, 4 * key_heads)
        self.out, self.make_mask, self.key_heads = nn.Linear(16, 16), make_mask, key_heads
        self.register_buffer("triangle", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())

    def forward(self, x, keep=None):
        q, k, v = (layer(x).unflatten(2, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = self.make_mask(self, x) if keep is None else self.make_mask(keep)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.key_heads != 4)
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))


def flags(*, padded: bool) -> torch.Tensor:
    """A causal mask; padded, the second row has no key at all, the first and the third have queries without one."""
    keep = torch.ones(4, STEPS, STEPS, dtype=torch.bool).tril()
    if padded:
        keep[0, :, :2], keep[1], keep[2, 3] = False, False, False
    return keep


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, STEPS, 16, generator=torch.Generator().manual_seed(1)), flags(padded=True)


def kinds(path) -> Counter:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def check_file(path, model, given) -> None:
    proof = ck.verify_onnx(path, model, [given])
    assert proof.passed, proof


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [13, 20, 23, 24])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_files_agree_where_queries_have_no_key(name, key_heads, opset, tmp_path) -> None:
    model, given = Attention(MASKS[name], key_heads).eval(), inputs()
    alone = (model(*given) == model.out.bias).all(-1)
    assert alone[0, :2].all().item() is (name not in HAVE_MEANS)  # torch gives 0, and of the lowest number the mean
    check_file(ck.export_onnx(model, tmp_path / "f.onnx", (given[0], flags(padded=False)), opset=opset), model, given)


@pytest.mark.parametrize("name", ["flags", "infinite", "lowest"])
def test_quantized_models_and_files_agree(name, tmp_path) -> None:
    model, given = Attention(MASKS[name]).eval(), inputs()
    seen = (given[0], flags(padded=False))
    for quantize in (quantize_static, quantize_dynamic, quantize_weights):
        quantized = quantize(model, [seen])
        alone = (quantized(*given)[1] - quantized(*given)[1, :1]).abs().amax()
        assert alone < 1e-6, quantize  # 0, or one mean, for all queries
        check_file(ck.export_onnx(quantized, tmp_path / "q.onnx", seen), quantized, given)


def test_half_precision(tmp_path) -> None:
    model, (x, keep) = Attention(MASKS["flags"]).eval().half(), inputs()
    for opset in (20, 23):
        path = ck.export_onnx(model, tmp_path / f"{opset}.onnx", (x.half(), flags(padded=False)), opset=opset)
        runtime = session(path)
        got = torch.from_numpy(runtime.run(None, numpy_inputs(runtime, (x.half(), keep)))[0])
        torch.testing.assert_close(got[1], model.out.bias.detach().expand(STEPS, 16), rtol=0, atol=0)


@pytest.mark.parametrize("opset", [20, 23])
def test_padded_encoders(opset, tmp_path) -> None:
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.cross = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x, padding):
            encoded = self.layer(x, src_key_padding_mask=padding)
            return self.cross(x, encoded, encoded, key_padding_mask=padding, need_weights=False)[0]

    model, x = Padded().eval(), inputs()[0]
    padding = torch.zeros(4, STEPS, dtype=torch.bool)
    path = ck.export_onnx(model, tmp_path / "p.onnx", (x, padding), opset=opset)
    padding = padding.clone()
    padding[0, :2], padding[1] = True, True
    check_file(path, model, (x, padding))


def written_behind(self, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    mask[1, :] = False
    return mask


def numbered(self, x):
    steps = torch.arange(x.shape[1])
    return steps[None, :] <= steps[:, None]


def triangle(x, **settings):
    return torch.ones(x.shape[1], x.shape[1], **settings)


#: Masks that leave every query a key, of any number of steps.
WITH_KEYS = {
    "none": lambda self, x: None,
    "tril": lambda self, x: triangle(x, dtype=torch.bool).tril()[None, None],
    "tril_of_floats": lambda self, x: torch.tril(triangle(x)) != 0,
    "not_triu": lambda self, x: ~triangle(x, dtype=torch.bool).triu(1),
    "additive": lambda self, x: nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
    "filled": lambda self, x: torch.zeros_like(triangle(x)).masked_fill(triangle(x).triu(1) > 0, -math.inf),
    "finite": lambda self, x: torch.where(x[:, None, None, :, 0] > 0, 0.0, -1e9),
    "stored": lambda self, x: self.triangle[:, :, : x.shape[1], : x.shape[1]],
}
#: Those of which this is not so, or not known.
WITHOUT_KEYS = {
    "below_the_diagonal": lambda self, x: triangle(x, dtype=torch.bool).tril(-1),
    "written_behind": written_behind,
    "not_from_the_first": lambda self, x: self.triangle[:, :, : x.shape[1], 1 : x.shape[1] + 1],
    "computed": lambda self, x: (x[:, None, :, :1] > 0) & triangle(x, dtype=torch.bool).tril(),
}


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("dynamic", [(0,), (0, 1)], ids=["batch", "steps"])
@pytest.mark.parametrize("name", WITH_KEYS)
def test_no_operator_is_added_where_every_query_has_a_key(name, dynamic, opset, tmp_path, monkeypatch) -> None:
    model, x = Attention(WITH_KEYS[name]).eval(), inputs()[0]
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), opset=opset, dynamic=dynamic)
    check_file(path, model, (x,))
    monkeypatch.setattr("compresskit.export.onnx.keep_rows_without_keys_", lambda program, opset: None)
    plain = ck.export_onnx(model, tmp_path / "plain.onnx", (x,), opset=opset, dynamic=dynamic)
    assert kinds(path) == kinds(plain)


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("dynamic", [(0,), (0, 1)], ids=["batch", "steps"])
@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_computed_masks_that_leave_no_key(name, dynamic, opset, tmp_path) -> None:
    model, x = Attention(WITHOUT_KEYS[name]).eval(), inputs()[0]
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), opset=opset, dynamic=dynamic)
    check_file(path, model, (x,))
    assert kinds(path)["Where"] >= 1


def test_numbers_of_steps_that_are_compared(tmp_path) -> None:
    model, x = Attention(numbered).eval(), inputs()[0]
    check_file(ck.export_onnx(model, tmp_path / "n.onnx", (x,), opset=20, dynamic=(0, 1)), model, (x[:, :5],))


def test_layers_share_what_is_computed_of_their_mask(tmp_path) -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Attention(lambda mask: mask), Attention(lambda mask: mask)

        def forward(self, x, keep):
            mask = MASKS["flags"](keep)
            return self.b(self.a(x, mask), mask)

    model = Two().eval()
    path = ck.export_onnx(model, tmp_path / "two.onnx", inputs(), opset=23)
    check_file(path, model, inputs())
    assert (kinds(path)["Where"], kinds(path)["ReduceMax"]) == (2, 1)


@pytest.mark.parametrize(("name", "transposes"), [("flags", 0), ("of_all_rows", 0), ("of_three_dimensions", 0), ("of_a_head", 4)])
def test_heads_are_merged_in_front_of_it(name, transposes, tmp_path) -> None:
    """On x86, where Attention splits the heads itself: a mask of each head needs them apart."""
    model, given = Attention(MASKS[name]).eval(), inputs()
    quantized = quantize_dynamic(model, [(given[0], flags(padded=False))])
    path = ck.export_onnx(quantized, tmp_path / "h.onnx", given)
    check_file(path, quantized, given)
    found = kinds(path)
    assert (found["Attention"], found["Transpose"], found["Where"]) == (1, transposes, 1)


def test_a_recipe_with_padding_before_the_tokens_runs_to_its_end(tmp_path) -> None:
    model, (x, keep) = Attention(MASKS["flags"]), inputs()
    task = ck.Task(train=[(x, keep, torch.arange(24).view(4, 6) % 16)], val=[(x, keep, torch.arange(24).view(4, 6) % 16)],
                   predict=lambda out: out.transpose(1, 2))  # fmt: skip
    result = ck.Recipe(ck.Train(epochs=1)).run(model, task, out=tmp_path / "run")  # it refuses a file that differs
    check_file(result.onnx, result.model, (x, keep))
