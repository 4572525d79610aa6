"""Products by a stored matrix: every way of writing them runs in integers, and the matrix keeps its mask and its tie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.masks import Masks, enforce_masks_, masks_of
from compresskit.graph.rewrites.stored_products import rewrite_stored_products_
from compresskit.quant import BlockScheme, diagnose, prepare_qat, quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.numerics.targets import X86_NO_VNNI
from compresskit.recipe.store import load, save


class Product(nn.Module):
    """A product by `w` (8, 12), and the vectors `b` (12,) and `c` (8,)."""

    def __init__(self, compute: Callable[[Product, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(0.3 * torch.randn(8, 12))
        self.b, self.c = nn.Parameter(0.1 * torch.randn(12)), nn.Parameter(torch.zeros(8))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


ROWS, TOKENS, TURNED = (6, 8), (6, 5, 8), (6, 12)
WAYS = {
    "matmul": (lambda m, x: x @ m.w, ROWS),
    "matmul of tokens": (lambda m, x: x @ m.w, TOKENS),
    "with a bias": (lambda m, x: m.b + x @ m.w, TOKENS),
    "mm": (lambda m, x: torch.mm(x, m.w), ROWS),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), ROWS),
    "t": (lambda m, x: x @ m.w.t(), TURNED),
    "mT": (lambda m, x: x @ m.w.mT, TURNED),
    "permute": (lambda m, x: x @ m.w.permute(1, 0), TURNED),
    "transpose": (lambda m, x: x @ m.w.transpose(-1, 0), TURNED),
    "addmm, transposed": (lambda m, x: torch.addmm(m.c, x, m.w.t()), TURNED),
    "einsum": (lambda m, x: torch.einsum("bi,io->bo", x, m.w), ROWS),
    "einsum of tokens": (lambda m, x: torch.einsum("bti,io->bto", x, m.w), TOKENS),
    "einsum, transposed": (lambda m, x: torch.einsum("bi,oi->bo", x, m.w), TURNED),
    "einsum, matrix first": (lambda m, x: torch.einsum("io, bti -> tbo", m.w, x).transpose(0, 1), TOKENS),
    "einsum over channels": (lambda m, x: torch.einsum("bct,co->bot", x.mT, m.w), TOKENS),
    "einsum with an ellipsis": (lambda m, x: torch.einsum("...i,io->...o", x, m.w), TOKENS),
    "einsum without an arrow": (lambda m, x: torch.einsum("ai,io", x, m.w), ROWS),
}


class Every(nn.Module):
    """Several ways at once: one output for each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.shapes = [WAYS[name][1] for name in names]
        self.products = nn.ModuleList(Product(WAYS[name][0]) for name in names)

    def forward(self, rows: Tensor, tokens: Tensor, turned: Tensor) -> tuple[Tensor, ...]:
        inputs = {ROWS: rows, TOKENS: tokens, TURNED: turned}
        return tuple(product(inputs[shape]) for product, shape in zip(self.products, self.shapes, strict=True))


EXAMPLE = (torch.randn(ROWS), torch.randn(TOKENS), torch.randn(TURNED))


FEW = ("matmul", "with a bias", "t", "einsum over channels")


def test_static_quantization_runs_it_in_integers() -> None:
    model = Every(*WAYS).eval()
    quantized = quantize_static(model, [EXAMPLE])
    assert list(quantized.placement.integer.values()) == ["linear"] * len(WAYS)
    assert not quantized.placement.coverage.reasons
    quantized.enable_(False)
    torch.testing.assert_close(quantized(*EXAMPLE), model(*EXAMPLE))
    assert all(product.w.shape == (8, 12) for product in model.products)


def test_its_file_runs_in_integers(tmp_path: Path) -> None:
    quantized = quantize_static(Every(*FEW).eval(), [EXAMPLE], target=X86_NO_VNNI)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", EXAMPLE)
    assert ck.verify_onnx(path, quantized, [tuple(x[:4] for x in EXAMPLE)]).passed
    assert ck.audit(path).integer_fraction == 1.0


def test_dynamic_quantization_runs_it_in_integers(tmp_path: Path) -> None:
    every = quantize_dynamic(Every(*WAYS).eval(), EXAMPLE)
    assert every.placement.coverage.layers == (len(WAYS), len(WAYS))
    quantized = quantize_dynamic(Every("mT", "einsum of tokens").eval(), EXAMPLE, target=X86_NO_VNNI)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", EXAMPLE), quantized, [EXAMPLE]).passed


def test_weight_only_quantization_rounds_it() -> None:
    model = Every(*WAYS).eval()
    quantized = quantize_weights(model, EXAMPLE, scheme=BlockScheme(bits=8))
    assert [row.name for row in quantized.plan.rows if row.runs.startswith("float")] == []
    torch.testing.assert_close(quantized(*EXAMPLE), model(*EXAMPLE), atol=0.05, rtol=0)


KEPT = {
    "a diagonal": lambda m, x: torch.einsum("bii,io->bo", x[:, :, None] * x[:, None], m.w),
    "a sum": lambda m, x: torch.einsum("bi,io->b", x, m.w),
    "a repeated dimension": lambda m, x: torch.einsum("bi,io->bo", x[:, :1], m.w),
    "the identity": lambda m, x: x @ m.w.permute(0, 1),
}


@pytest.mark.parametrize("way", KEPT)
def test_what_is_no_linear_layer_computes_the_same_afterwards(way: str) -> None:
    model, x = Product(KEPT[way]).eval(), torch.randn(6, 8)
    captured = capture(model, x)
    rewrite_stored_products_(captured.module, transpose=True)
    torch.testing.assert_close(captured.module(x), model(x))


def test_a_matrix_that_is_read_both_ways_is_transposed_for_none() -> None:
    model, x = Product(lambda m, x: torch.relu(x @ m.w) @ m.w.t()).eval(), torch.randn(6, 8)
    quantized = quantize_static(model, [x])
    assert quantized.placement.integer == {"matmul_1": "linear"}
    assert quantized.placement.floating["matmul"] == "other operators read its matrix, too, and take it as it is stored"
    assert dict(quantized.body.named_parameters())["w"].shape == (8, 12)
    scaled = Product(lambda m, x: torch.addmm(m.c, torch.addmm(m.b, x, m.w, beta=2), m.w.t())).eval()
    floating = quantize_static(scaled, [x]).placement.floating
    assert floating["addmm"] == "it scales an operand (alpha, beta), or adds more than a stored vector"


@pytest.mark.parametrize("write", [lambda m, x: x @ m.w, lambda m, x: F.linear(x, m.w.t())])
def test_masks_and_gradients_follow_the_matrix(write: Callable[[Product, Tensor], Tensor], tmp_path: Path) -> None:
    model, x = Product(write), torch.randn(16, 8)
    keep = torch.rand(8, 12) > 0.5
    Masks({"w": keep}).apply_(model)
    trained = prepare_qat(model.eval(), [x], target=X86_NO_VNNI).train()
    attached = masks_of(trained)
    assert attached is not None
    ((name, mask),) = attached.masks.items()
    assert torch.equal(mask, keep.t())
    weight = dict(trained.named_parameters())[name]
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    release = enforce_masks_(trained, optimizer)
    before = weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        trained(x).square().sum().backward()
        optimizer.step()
    release()
    assert not weight[~keep.t()].any()
    assert (weight != before)[keep.t()].all()
    trained.eval().convert_()
    save(trained, tmp_path)
    again = load(Product(write), tmp_path)
    assert torch.equal(again(x), trained(x))
    assert torch.equal(masks_of(again).masks[name], keep.t())


def test_a_tied_matrix_stays_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Product(WAYS["matmul"][0]), Product(WAYS["matmul"][0])
            self.b.w = self.a.w

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    model, x = Tied().eval(), torch.randn(6, 8)
    quantized = quantize_static(model, [x])
    assert list(quantized.placement.integer.values())[:2] == ["linear", "linear"]
    assert [tuple(p.shape) for p in quantized.body.parameters()] == [(12, 8)]
    quantized.enable_(False)
    torch.testing.assert_close(quantized(x), model(x))


def test_diagnose_compares_a_dynamic_model_with_the_matrix_as_it_is_stored() -> None:
    model, x = nn.Sequential(Product(WAYS["matmul"][0]), nn.Linear(12, 4)).eval(), torch.randn(32, 8)
    found = diagnose(quantize_dynamic(model, x, target=X86_NO_VNNI), [x], model=model)
    assert [row.sqnr > 30 for row in found.rows] == [True, True]
