"""Every loss: its formula in float64, and the contract that all of them keep."""

from __future__ import annotations

import math
from functools import partial

import oracles
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses
from compresskit.distill.losses import FEATURE_LOSSES, LOSSES, RELATION_LOSSES, TARGET_LOSSES

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
def test_formula(name, settings) -> None:
    student, teacher = pair(getattr(losses, name))
    got = getattr(losses, name)(student * 2, teacher * 2, **settings).item()
    assert got == pytest.approx(getattr(oracles, name)(student * 2, teacher * 2, **settings), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract(loss, dtype) -> None:
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
def test_finite_where_peers_are_not(loss, dtype) -> None:
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
def test_contract_with_targets(loss, dtype) -> None:
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


@pytest.mark.parametrize("settings", [(1.0, 8.0, 4.0), (0.5, 2.0, 1.0)])
def test_dkd_equals_its_formula_and_decomposes_kd(settings) -> None:
    student, teacher = torch.randn(2, 6, 10) * 2
    target = torch.randint(0, 10, (6,))
    alpha, beta, temperature = settings
    got = losses.dkd(student, teacher, target, alpha=alpha, beta=beta, temperature=temperature).item()
    assert got == pytest.approx(oracles.dkd(student, teacher, target, *settings), rel=1e-5)
    assert losses.dkd(student, student, target).item() == pytest.approx(0, abs=1e-6)
    # KL = TCKD + (1 - p_t,y) NCKD, one sample at a time.
    for i in range(6):
        s, t, y = student[i : i + 1], teacher[i : i + 1], target[i : i + 1]
        rest = 1 - (t / 2).softmax(1)[0, y].item()
        parts = losses.dkd(s, t, y, alpha=1, beta=rest, temperature=2.0)
        torch.testing.assert_close(parts, losses.soft_targets(s, t, temperature=2.0), rtol=1e-4, atol=1e-6)


def test_sums_with_labels_equal_their_formulas() -> None:
    student, teacher = torch.randn(2, 6, 10) * 2
    target = torch.randint(0, 10, (6,))
    kl, ce = oracles.soft_targets(student, teacher, 2.0), oracles.smoothed_ce(student, target, 0.0)
    for beta in (0.0, 0.3, 2.0):
        got = losses.kl_plus_ce(student, teacher, target, beta=beta, temperature=2.0).item()
        assert got == pytest.approx(kl + beta * ce, rel=1e-5)
    for smoothing in (0.0, 0.1, 0.9):
        got = losses.label_smoothing(student, target, smoothing=smoothing).item()
        assert got == pytest.approx(oracles.smoothed_ce(student, target, smoothing), rel=1e-5)
    plain = torch.nn.functional.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(losses.hard_targets(student, teacher), plain)


def test_ignored_labels_are_left_out() -> None:
    student, teacher = torch.randn(2, 4, 5)
    target = torch.tensor([1, -100, 2, -100])
    torch.testing.assert_close(losses.dkd(student, teacher, target), losses.dkd(student[::2], teacher[::2], target[::2]))
    torch.testing.assert_close(
        losses.label_smoothing(student, target, smoothing=0.0), torch.nn.functional.cross_entropy(student, target)
    )


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


def test_masks_of_features() -> None:
    student, teacher = torch.randn(2, 3, 4, 7)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    for loss in (losses.hint, losses.cosine_distance):
        torch.testing.assert_close(loss(student, teacher, weight=mask), loss(student[mask.bool()], teacher[mask.bool()]))
        torch.testing.assert_close(loss(student, teacher, weight=mask.any(1)), loss(student[:2], teacher[:2]))
    scores = torch.randn(2, 3, 2, 4, 4)
    got = losses.attention_kl(*scores, mask=mask).item()
    assert got == pytest.approx(oracles.attention_kl(*scores, mask=mask), rel=1e-5)
    student, teacher = torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4, 9)  # heads of another width
    assert losses.relation_kl(student, teacher).item() == pytest.approx(oracles.relation_kl(student, teacher), rel=1e-5)


def test_masked_attention_scores_count_as_zero() -> None:
    student, teacher = torch.randn(2, 2, 3, 4, 4)
    student[..., 3], teacher[..., 3] = -1e4, float("-inf")
    seen = oracles.hint(student[..., :3], teacher[..., :3]) * 3 / 4
    assert losses.attention_scores(student, teacher).item() == pytest.approx(seen, rel=1e-5)


def test_widths_and_sizes_may_differ() -> None:
    student, teacher = torch.randn(6, 5), torch.randn(6, 4, 3, 3)
    for loss in (f for f in RELATION_LOSSES if f is not losses.info_nce):
        got = loss(student, teacher).item()
        settings = FORMULAS[loss.__name__][0]
        assert got == pytest.approx(getattr(oracles, loss.__name__)(student, teacher, **settings), rel=1e-4)
    wide, narrow = torch.randn(2, 6, 8, 8), torch.randn(2, 3, 4, 4)
    pooled = torch.nn.functional.avg_pool2d(wide.square().mean(1, keepdim=True), 2).sqrt()
    torch.testing.assert_close(losses.attention_transfer(narrow, wide), losses.attention_transfer(narrow, pooled))


def test_rkd_equals_its_formula_with_duplicates() -> None:
    student, teacher = torch.randn(2, 6, 9)
    student[2], teacher[4] = student[0], teacher[1]
    for name in ("rkd_distance", "rkd_angle"):
        got = getattr(losses, name)(student, teacher).item()
        assert got == pytest.approx(getattr(oracles, name)(student, teacher), rel=1e-4)


def test_crd() -> None:
    anchor, own = (torch.nn.functional.normalize(torch.randn(5, 8)) for _ in range(2))
    others = torch.nn.functional.normalize(torch.randn(5, 12, 8), dim=2)
    got = losses.crd(anchor, own, others, samples=100, log_z=math.log(40.0), temperature=0.1).item()
    assert got == pytest.approx(oracles.crd(anchor, own, others, 100, 40.0, 0.1), rel=1e-5)
    bank = losses.MemoryBank(samples=20, width=8, negatives=16, seed=1)
    before = bank.student.clone()
    student = (torch.randn(4, 8) * 30).requires_grad_()
    teacher = torch.randn(4, 8).requires_grad_()
    index = torch.tensor([3, 7, 1, 19])
    value = bank(student, teacher, index)
    value.backward()
    assert torch.isfinite(value)
    assert student.grad.any()
    assert teacher.grad is None
    changed = (bank.student != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 3, 7, 19]
    torch.testing.assert_close(bank.student.norm(dim=1), torch.ones(20))
    assert not bank.student.requires_grad
    again = losses.MemoryBank(samples=20, width=8, negatives=16, seed=1)
    assert again(student, teacher, index).item() == value.item()


def test_the_memory_bank_pulls_the_student_to_the_teacher() -> None:
    teacher = torch.nn.functional.normalize(torch.randn(32, 16))
    student = torch.randn(32, 16, requires_grad=True)
    bank, index = losses.MemoryBank(samples=32, width=16, negatives=24), torch.arange(32)
    optimizer = torch.optim.Adam([student], lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        bank(student, teacher, index).backward()
        optimizer.step()
    assert ((torch.nn.functional.normalize(student) @ teacher.T).argmax(1) == index).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_is_the_same_loss_and_gradient(dtype, chunk) -> None:
    student, teacher = (torch.randn(2, 20, 300) * 3).to(dtype)
    weight = torch.rand(20)
    values, grads = [], []
    for loss in (losses.soft_targets, partial(losses.chunked_soft_targets, chunk=chunk)):
        leaf = student.clone().requires_grad_()
        value = loss(leaf, teacher, weight=weight, temperature=2.0)
        (value * 1024).backward()
        values.append(value.detach())
        grads.append(leaf.grad)
    torch.testing.assert_close(values[1], values[0])
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(grads[1], grads[0], rtol=bound, atol=1e-6)


def test_chunked_refuses_a_second_backward_and_needs_no_gradient() -> None:
    student, teacher = torch.randn(2, 4, 9)
    value = losses.chunked_soft_targets(student.requires_grad_(), teacher)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    with torch.no_grad():
        torch.testing.assert_close(losses.chunked_soft_targets(student, teacher), value.detach())


def peak(loss, student, teacher) -> int:
    """Largest number of bytes that a forward and a backward hold at once, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss(student, teacher).backward()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_memory() -> None:
    student, teacher = torch.randn(2, 256, 2000)
    plain, chunked = (
        peak(loss, student.clone().requires_grad_(), teacher) for loss in (losses.soft_targets, losses.chunked_soft_targets)
    )
    assert chunked <= 1.3 * student.numel() * 4  # one gradient, and a few rows at a time
    assert chunked * 3 <= plain
    features = torch.randn(2, 64, 2048)
    assert peak(losses.rkd_angle, features[0].clone().requires_grad_(), features[1]) * 4 < 64 * 64 * 2048 * 4


def test_bad_input() -> None:
    a, b, y = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    image = torch.zeros(2, 3, 4, 4)
    for loss in (
        losses.soft_targets,
        losses.reverse_kl,
        losses.jsd,
        losses.dist,
        losses.hard_targets,
        losses.chunked_soft_targets,
        *FEATURE_LOSSES[:1],
    ):
        with pytest.raises(DataError, match=rf"{loss.__name__}: student and teacher must have one shape, got \(2, 3\)"):
            loss(a, b)
    for loss in (losses.soft_targets, losses.reverse_kl, losses.jsd, losses.dist, losses.chunked_soft_targets):
        with pytest.raises(SettingError, match=rf"{loss.__name__}\(temperature=\.\.\.\): wanted a positive number, got 0"):
            loss(a, a, temperature=0)
    with pytest.raises(DataError, match=r"soft_targets: wanted logits of at least 2 dimensions"):
        losses.soft_targets(a[0], a[0])
    with pytest.raises(DataError, match=r"chunked_soft_targets: wanted logits with classes in dim 3, got \(2, 3\)"):
        losses.chunked_soft_targets(a, a, dim=3)
    with pytest.raises(SettingError, match=r"chunk=\.\.\.\): wanted a whole number >= 1, got 0"):
        losses.chunked_soft_targets(a, a, chunk=0)
    with pytest.raises(SettingError, match=r"jsd\(beta=\.\.\.\): wanted a number between 0 and 1, got 1"):
        losses.jsd(a, a, beta=1)
    with pytest.raises(SettingError, match=r"dkd\(alpha=\.\.\.\): wanted a number >= 0, got -1"):
        losses.dkd(a, a, y, alpha=-1)
    with pytest.raises(DataError, match=r"dkd: wanted class indices of shape \(2,\), got torch.float32 \(2,\)"):
        losses.dkd(a, a, y.float())
    with pytest.raises(DataError, match="dkd: the model has 3 classes, so labels must be 0..2, got 7"):
        losses.dkd(a, a, y + 7)
    with pytest.raises(DataError, match="dkd: wanted at least 2 classes"):
        losses.dkd(a[:, :1], a[:, :1], y)
    with pytest.raises(DataError, match=r"dkd\(weight=\.\.\.\): wanted shape \(2,\)"):
        losses.dkd(a, a, y, weight=torch.ones(3))
    with pytest.raises(SettingError, match=r"kl_plus_ce\(beta=\.\.\.\): wanted a number >= 0, got -1"):
        losses.kl_plus_ce(a, a, y, beta=-1)
    with pytest.raises(SettingError, match=r"smoothing=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        losses.label_smoothing(a, y, smoothing=1)
    with pytest.raises(DataError, match=r"attention_transfer: wanted features \(N, C, H, W\), got \(2, 3\)"):
        losses.attention_transfer(a, a)
    with pytest.raises(DataError, match=r"hcl: wanted features \(N, C, H, W\), got \(2, 3\)"):
        losses.hcl(a, a)
    with pytest.raises(SettingError, match=r"levels=\.\.\.\): wanted sizes >= 1, got \(0,\)"):
        losses.hcl(image, image, levels=(0,))
    with pytest.raises(DataError, match=r"attention_kl: wanted scores \(N, heads, T, T\), got \(2, 3\)"):
        losses.attention_kl(a, a)
    with pytest.raises(DataError, match=r"attention_kl\(mask=\.\.\.\): wanted shape \(2, 4\), got \(2, 3\)"):
        losses.attention_kl(image, image, mask=a)
    with pytest.raises(DataError, match=r"relation_kl: wanted values \(N, heads, T, d\), got \(2, 3\)"):
        losses.relation_kl(a, a)
    for loss in RELATION_LOSSES:
        with pytest.raises(
            DataError, match=rf"{loss.__name__}: wanted features \(N, \.\.\.\) of one batch, got \(2, 3\) and \(1, 3\)"
        ):
            loss(a, a[:1])
    with pytest.raises(DataError, match="info_nce: wanted features of one width, got 3 and 4; use an adapter"):
        losses.info_nce(a, b)
    with pytest.raises(SettingError, match=r"order=\.\.\.\): wanted a whole number >= 1, got 0"):
        losses.correlation_congruence(a, a, order=0)
    with pytest.raises(DataError, match=r"crd: wanted \(N, D\), \(N, D\) and \(N, M, D\)"):
        losses.crd(a, a, a, samples=9, log_z=0.0)
    with pytest.raises(SettingError, match="MemoryBank: wanted samples >= 2, width >= 1, negatives >= 1, got 1, 3, 4096"):
        losses.MemoryBank(samples=1, width=3)
    with pytest.raises(SettingError, match=r"momentum=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        losses.MemoryBank(samples=4, width=3, momentum=1)
    bank = losses.MemoryBank(samples=4, width=3, negatives=2)
    with pytest.raises(DataError, match=r"MemoryBank: wanted features \(2, 3\), got \(2, 4\)"):
        bank(b, b, y)
    with pytest.raises(DataError, match=r"MemoryBank: indices must be 0..3, got 4..4"):
        bank(a, a, y + 4)


def test_every_loss_is_public() -> None:
    for loss in (*LOSSES, *TARGET_LOSSES):
        assert getattr(losses, loss.__name__) is loss
        assert loss.__name__ in losses.__all__
    assert len(losses.__all__) <= 30


def test_match_predictions_is_soft_targets_for_classes_and_a_relative_error_otherwise() -> None:
    student, teacher = torch.randn(2, 16, 5)
    for temperature in (1.0, 4.0):
        got = losses.logits.match_predictions(student, teacher, temperature=temperature)
        assert got.item() == pytest.approx(oracles.soft_targets(student, teacher, temperature), rel=1e-5)
    assert losses.logits.match_predictions(student, student).item() == pytest.approx(0, abs=1e-6)
    for shape in ((16, 1), (16,)):
        value = torch.randn(shape)
        assert losses.logits.match_predictions(value * 1.1, value).item() == pytest.approx(0.01, rel=1e-4)
