"""Losses of attention heads from queries, keys and values: against plain loops, and against the attention that BERT computes."""

from __future__ import annotations

import math
from functools import partial

import oracles
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses


def scores_by_loops(query, key, heads):
    """(N, heads, T, T), one number at a time."""
    n, t, width = query.shape
    d = width // heads
    found = torch.zeros(n, heads, t, t, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            for a in range(t):
                for b in range(t):
                    q, k = (v[i, j, h * d : (h + 1) * d].double() for v, j in ((query, a), (key, b)))
                    found[i, h, a, b] = (q * k).sum() / math.sqrt(d)
    return found


@pytest.mark.parametrize("size", [1, 7])
def test_scores_and_relations_equal_plain_loops(size) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, size, 4, 6)
    wide_query, wide_key, wide_value = torch.randn(3, size, 4, 10)
    wanted = oracles.hint(scores_by_loops(query, key, 2), scores_by_loops(wide_query, wide_key, 2))
    got = losses.query_key_scores((query, key), (wide_query, wide_key), heads=2)
    assert got.item() == pytest.approx(wanted, rel=1e-5)
    got = losses.query_key_scores((query, key), (wide_query, wide_key), heads=2, loss=losses.attention_kl)
    wanted = oracles.attention_kl(scores_by_loops(query, key, 2), scores_by_loops(wide_query, wide_key, 2))
    assert got.item() == pytest.approx(wanted, rel=1e-4)
    got = losses.head_relations(value, wide_value, heads=2)
    wanted = oracles.attention_kl(scores_by_loops(value, value, 2), scores_by_loops(wide_value, wide_value, 2))
    assert got.item() == pytest.approx(wanted, rel=1e-4)


def test_grouped_queries_are_compared_with_the_keys_that_they_share() -> None:
    """The student has grouped-query attention, 4 heads of queries and 2 of keys, and the teacher has as many of both."""
    torch.manual_seed(0)
    query, key = torch.randn(3, 5, 4 * 6), torch.randn(3, 5, 2 * 6)
    wide_query, wide_key = torch.randn(2, 3, 5, 4 * 7)
    shared = torch.cat([key[..., 6 * (h // 2) :][..., :6] for h in range(4)], -1)
    wanted = oracles.hint(scores_by_loops(query, shared, 4), scores_by_loops(wide_query, wide_key, 4))
    got = losses.query_key_scores((query, key), (wide_query, wide_key), heads=4, key_heads=2)
    assert got.item() == pytest.approx(wanted, rel=1e-5)
    assert losses.query_key_scores((query, key), (query, shared), heads=4, key_heads=2).item() == pytest.approx(0)


@pytest.mark.parametrize("key_heads", [None, 0, 1, 3, 4])
def test_keys_that_do_not_go_with_the_queries_are_one_message(key_heads) -> None:
    message = (
        "query_key_scores: queries of width 24 are 4 heads of 6; wanted keys with heads of as many, got width 12 and"
        rf" key_heads={key_heads}; give the number of heads of the keys, a divisor of 4 \(grouped-query attention"
    )
    grouped = torch.randn(2, 5, 24), torch.randn(2, 5, 12)
    with pytest.raises(DataError, match=message):
        losses.query_key_scores(grouped, grouped, heads=4, key_heads=key_heads)


def test_bad_shapes_are_one_message() -> None:
    x = torch.randn(2, 4, 6)
    with pytest.raises(DataError, match="query_key_scores: wanted queries and keys; tap both"):
        losses.query_key_scores(x, x, heads=2)
    with pytest.raises(
        DataError, match=r"query_key_scores: wanted \(N, T, width\) with a width that 4 heads divide, got \(2, 4, 6\)"
    ):
        losses.query_key_scores((x, x), (x, x), heads=4)
    with pytest.raises(DataError, match=r"head_relations: wanted \(N, T, width\)"):
        losses.head_relations(x[0], x[0], heads=2)
    with pytest.raises(SettingError, match=r"layer_terms\('encoder.0'\): wanted a tap with \{\} for the number of the layer"):
        kd.layer_terms(losses.hint, {0: 1}, "encoder.0")


def test_the_maps_of_distilbert_and_tinybert() -> None:
    assert list(kd.distilbert_layers().values()) == [0, 2, 4, 7, 9, 11]  # of the authors' script
    assert list(kd.distilbert_layers(4, 12).values()) == [0, 4, 7, 11]
    assert kd.distilbert_layers(1, 3) == {0: 0}
    assert list(kd.layer_map(4, 12).values()) == [2, 5, 8, 11]  # g(m) = 3 m
    with pytest.raises(SettingError, match=r"distilbert_layers\(\): wanted 1 <= student's layers <= teacher's, got 4 and 3"):
        kd.distilbert_layers(4, 3)


def bert(layers, width=16):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@pytest.mark.filterwarnings("ignore")  # of transformers and of the libraries it loads
def test_tinybert_and_minilm_on_hugging_face_bert() -> None:
    """The scores of the taps are those whose softmax BERT itself returns; a student learns them in an ordinary training."""
    torch.manual_seed(0)
    teacher, student = bert(4, width=24).eval(), bert(2)
    ids = torch.randint(1, 50, (8, 6))
    taps = [f"bert.encoder.layer.3.attention.self.{name}" for name in ("query", "key")]
    with torch.no_grad(), kd.tapped(teacher, taps) as found:
        wanted = teacher(ids, output_attentions=True).attentions[3]
    torch.testing.assert_close(scores_by_loops(*(found[tap] for tap in taps), 2).softmax(-1).float(), wanted)
    layers = kd.layer_map(2, 4)
    projections = tuple(f"bert.encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key"))
    terms = [
        *kd.layer_terms(partial(losses.query_key_scores, heads=2), layers, projections),
        *kd.layer_terms(losses.hint, layers, "bert.encoder.layer.{}", adapt=kd.project),
        *kd.layer_terms(partial(losses.head_relations, heads=2), {1: 3}, "bert.encoder.layer.{}.attention.self.value"),
        kd.Term(losses.hint, "bert.embeddings", adapt=kd.project),
    ]
    assert [(t.student_tap, t.teacher_tap) for t in terms[2:4]] == [
        ("bert.encoder.layer.0", "bert.encoder.layer.1"),
        ("bert.encoder.layer.1", "bert.encoder.layer.3"),
    ]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (8,))}
    task = ck.Task(train=[batch], val=[batch])
    seen = []
    objective = kd.imitate(teacher, terms=terms, weight=0)
    settings = ck.Train(steps=40, optimizer=partial(torch.optim.Adam, lr=3e-3), objective=objective,
                        on_step=lambda report: seen.append(report.losses))  # fmt: skip
    names = list(dict(student.named_modules()))
    settings(student, task)
    assert list(dict(student.named_modules())) == names  # adapters are gone
    assert len(seen[0]) == len(terms) + 1
    assert sum(seen[-1].values()) < 0.7 * sum(seen[0].values())


def test_layer_terms_compare_layers_of_any_network() -> None:
    student, teacher = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)]).eval() for n in (2, 4))
    terms = kd.layer_terms(losses.hint, kd.layer_map(2, 4), "{}", weight=2.0)
    objective = kd.imitate(teacher, terms=terms, weight=0, task_weight=0)
    x = torch.randn(5, 4)
    task = ck.Task(train=[(x, x)], val=[(x, x)], loss=nn.functional.mse_loss)
    found = objective.bind(student, task)(student, (x, x))
    wanted = [2 * (student[: i + 1](x) - teacher[: j + 1](x)).square().mean() for i, j in ((0, 1), (1, 3))]
    torch.testing.assert_close(list(found.values()), wanted)
