"""The contract that every distillation loss keeps, and its formula in float64."""

from __future__ import annotations

import oracles
import pytest
import torch

from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses
from compresskit.distill.losses import LOSSES, TARGET_LOSSES

SHAPES = {
    "attention_transfer": (8, 6, 8, 8),
    "hcl": (8, 6, 8, 8),
    "cosine_distance": (8, 5, 12),
    "attention_scores": (8, 3, 5, 5),
    "attention_kl": (8, 3, 5, 5),
    "relation_kl": (8, 3, 5, 4),
}


NOT_ZERO = {"info_nce", "hard_targets"}  # an entropy is left where both networks agree


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


FORMULAS = {
    "soft_targets": [dict(temperature=t) for t in (1.0, 4.0)],
    "reverse_kl": [dict(temperature=t) for t in (1.0, 3.0)],
    "jsd": [dict(beta=b, temperature=t) for b, t in ((0.5, 1.0), (0.1, 2.0))],
    "standardized_soft_targets": [dict(temperature=2.0)],
    "dist": [dict(beta=b, gamma=g, temperature=t) for b, g, t in ((1.0, 1.0, 1.0), (0.3, 2.0, 4.0))],
    "hint": [{}],
    "attention_transfer": [{}],
    "hcl": [dict(levels=(4, 2, 1)), dict(levels=(8, 2))],
    "cosine_distance": [{}],
    "attention_kl": [{}],
    "relation_kl": [{}],
    "similarity_preserving": [{}],
    "rkd_distance": [{}],
    "rkd_angle": [{}],
    "pkt": [{}],
    "correlation_congruence": [dict(gamma=0.4, order=2), dict(gamma=0.2, order=3)],
    "info_nce": [dict(temperature=0.07), dict(temperature=0.5)],
}


def name_of(loss) -> str:
    return loss.__name__


def pair(loss, dtype=torch.float32, seed=3):
    g = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(SHAPES.get(loss.__name__, (8, 10)), generator=g).to(dtype) for _ in range(2))
    return student.requires_grad_(), teacher.requires_grad_()


@pytest.mark.parametrize(("name", "settings"), [(n, s) for n, cases in FORMULAS.items() for s in cases], ids=str)
def test_losses_equal_their_formula_in_float64(name, settings) -> None:
    student, teacher = pair(getattr(losses, name))
    got = getattr(losses, name)(student * 2, teacher * 2, **settings).item()
    assert got == pytest.approx(getattr(oracles, name)(student * 2, teacher * 2, **settings), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_keep_the_contract(loss, dtype) -> None:
    student, teacher = pair(loss, dtype)
    value = loss(student, teacher)
    assert value.dtype == torch.float32
    assert value.ndim == 0
    assert value > 0
    value.backward()
    assert teacher.grad is None
    assert student.grad.dtype == dtype
    assert student.grad.any()
    assert torch.isfinite(student.grad).all()
    order = torch.randperm(8)
    assert loss(student[order], teacher[order]).item() == pytest.approx(value.item(), rel=1e-3)
    if loss.__name__ not in NOT_ZERO:
        again = student.detach().clone().requires_grad_()
        same = loss(again, student)
        same.backward()
        assert same.item() == pytest.approx(0, abs=1e-6)
        assert again.grad.float().abs().max() < 1e-5


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_are_finite_for_extreme_inputs(loss, dtype) -> None:
    shape = SHAPES.get(loss.__name__, (8, 10))
    hard = []
    for size in (30.0, 150.0, 1e4):  # sure of one class, and wrong
        sure = torch.zeros(shape)
        sure[:, 0] = size
        hard.append((sure.roll(1, 1), sure))
    twice = torch.randn(shape)
    twice[1], twice[3] = twice[0], 0.0
    hard += [(twice, torch.randn(shape)), (torch.randn(shape), twice), (torch.zeros(shape), twice), (twice * 0 + 1, twice)]
    hard += [(twice * 1e-6, twice), (twice * 1e4, twice * 1e-3)]
    for student, teacher in hard:
        leaf = student.to(dtype).requires_grad_()
        value = loss(leaf, teacher.to(dtype))
        value.backward()
        assert torch.isfinite(value)
        if dtype != torch.float16 or student.abs().max() > 1e-3:  # the true gradient of tiny features does not fit in fp16
            assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("loss", [*TARGET_LOSSES, losses.label_smoothing], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_with_labels_keep_the_contract(loss, dtype) -> None:
    if loss is losses.label_smoothing:
        loss = lambda s, _, y, **k: losses.label_smoothing(s, y, **k)  # noqa: E731
    g = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(8, 10, generator=g).to(dtype).requires_grad_() for _ in range(2))
    target = torch.arange(8)
    value = loss(student, teacher, target)
    value.backward()
    assert value > 0
    assert value.dtype == torch.float32
    assert teacher.grad is None
    order = torch.randperm(8)
    assert loss(student[order], teacher[order], target[order]).item() == pytest.approx(value.item(), rel=1e-4)
    for size in (30.0, 150.0, 1e4):
        for own in (0, 1, 2):
            sure = torch.zeros(4, 10, dtype=dtype)
            sure[:, 0] = size
            wrong = sure.roll(1, 1).requires_grad_()
            out = loss(wrong, sure, torch.full((4,), own))
            out.backward()
            assert torch.isfinite(out)
            assert torch.isfinite(wrong.grad).all()
    keep = torch.tensor([1.0] * 5 + [0.0] * 3)
    some = loss(student, teacher, target, weight=keep)
    torch.testing.assert_close(some, loss(student[:5], teacher[:5], target[:5]))


WITH_WEIGHT = ["soft_targets", "reverse_kl", "jsd", "standardized_soft_targets", "hard_targets", "chunked_soft_targets"]


@pytest.mark.parametrize("name", WITH_WEIGHT)
def test_a_weight_leaves_out_masked_tokens(name) -> None:
    loss = getattr(losses, name)
    student, teacher = torch.randn(2, 3, 4, 7)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    left = [v[mask.bool()] for v in (student, teacher)]
    torch.testing.assert_close(loss(student, teacher, weight=mask, dim=-1), loss(*left))
    torch.testing.assert_close(loss(student.mT, teacher.mT, weight=mask), loss(*left))
    assert loss(student, teacher, weight=mask * 0, dim=-1).item() == 0
    with pytest.raises(
        DataError, match=rf"{'soft_targets' if name == 'standardized_soft_targets' else name}\(weight=\.\.\.\): wanted shape"
    ):
        loss(student, teacher, weight=torch.ones(2, 4), dim=-1)


def test_every_loss_is_public() -> None:
    for loss in (*LOSSES, *TARGET_LOSSES):
        assert getattr(losses, loss.__name__) is loss
        assert loss.__name__ in losses.__all__


@pytest.mark.parametrize("temperature", ["4", None, torch.ones(2), float("nan")])
def test_a_temperature_that_is_no_number_is_refused(temperature) -> None:
    s, t = torch.randn(2, 4, 3)
    with pytest.raises(SettingError, match=r"soft_targets\(temperature=...\): wanted a positive number, got"):
        losses.soft_targets(s, t, temperature=temperature)
    assert losses.soft_targets(s, t, temperature=torch.tensor(4.0)) == losses.soft_targets(s, t, temperature=4.0)


def test_arrays_are_refused() -> None:
    logits, maps = torch.randn(4, 3), torch.randn(2, 3, 4, 4)
    pairs = [(losses.soft_targets, logits), (losses.hint, logits), (losses.pkt, logits), (losses.match_predictions, logits)]
    for loss, values in (*pairs, (losses.attention_transfer, maps), (losses.relation_kl, maps)):
        for given in ((values.numpy(), values), (values, values.numpy())):
            with pytest.raises(DataError, match=f"{loss.__name__}: wanted tensors, got ndarray of the (student|teacher)"):
                loss(*given)


def test_no_rows_cost_nothing() -> None:
    none = torch.randn(0, 4, requires_grad=True)
    for loss in (losses.soft_targets, losses.chunked_soft_targets, losses.hint):
        assert loss(none, none.detach()).item() == 0


@pytest.mark.parametrize("name", ["soft_targets", "reverse_kl", "jsd"])
def test_losses_of_classes_are_compiled_whole_and_mapped(name: str) -> None:
    """With weights of any sign, too, such as advantages."""
    loss, (a, b) = getattr(losses, name), torch.randn(2, 4, 3)
    weight = torch.tensor([1.0, -0.5, 2.0, 1.0])
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b, weight=weight), loss(a, b, weight=weight))
    rows = torch.func.vmap(lambda a, b, w: loss(a[None], b[None], weight=w[None]))(a, b, weight.abs())
    torch.testing.assert_close((rows * weight).sum() / weight.sum(), loss(a, b, weight=weight))


LOGITS, FEATURES, TOKENS = torch.zeros(4, 3), torch.zeros(2, 3, 4, 4), torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.soft_targets(LOGITS, LOGITS, weight=[1.0] * 4), r"soft_targets\(weight=...\): wanted a tensor, got list"),
        (lambda: losses.chunked_soft_targets(LOGITS, LOGITS, weight=[1.0]), r"\(weight=...\): wanted a tensor, got list"),
        (lambda: losses.soft_targets(LOGITS, LOGITS, dim="1"), r"soft_targets\(dim=...\): wanted the dimension of the classes"),
        (lambda: losses.standardized_soft_targets(LOGITS, LOGITS, dim="1"), r"standardized_soft_targets\(dim=...\): wanted"),
        (lambda: losses.chunked_soft_targets(LOGITS, LOGITS, dim="1"), r"chunked_soft_targets\(dim=...\): wanted the dimension"),
        (lambda: losses.chunked_soft_targets(LOGITS, LOGITS, chunk="8"), r"\(chunk=...\): wanted a whole number >= 1, got '8'"),
        (lambda: losses.chunked_soft_targets(LOGITS, LOGITS, chunk=2.5), r"\(chunk=...\): wanted a whole number >= 1, got 2.5"),
        (lambda: losses.soft_targets(LOGITS, LOGITS, temperature=float("inf")), r"\(temperature=...\): wanted a positive number"),
        (lambda: losses.hard_targets(LOGITS, LOGITS, threshold="a"), r"\(threshold=...\): wanted a number in \[0, 1\), got a"),
        (lambda: losses.hcl(FEATURES, FEATURES, levels=4), r"hcl\(levels=...\): wanted sizes >= 1, got 4"),
        (lambda: losses.head_relations(TOKENS, TOKENS, heads="2"), r"head_relations\(heads=...\): wanted a whole number >= 1"),
        (lambda: losses.CRDLoss(samples="3"), r"CRDLoss\(samples=...\): wanted a whole number, got '3'"),
        (lambda: losses.projection_heads(LOGITS, LOGITS, width=0), r"projection_heads\(width=...\): wanted a whole number >= 1"),
    ],
)
def test_settings_of_another_kind_are_one_sentence(call, message) -> None:
    with pytest.raises((DataError, SettingError), match=message):
        call()
