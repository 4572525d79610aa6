"""Packed sequences as padded batches: the same outputs for every row, wherever it ends."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import compresskit as ck
from compresskit.graph.capture import capture

VARYING = {"ids": {0: "batch", 1: "steps"}, "lengths": {0: "batch"}}


class Reader(nn.Module):
    """A classifier of padded sentences, by the last states or the mean of all outputs."""

    def __init__(self, kind: type[nn.RNNBase], *, mean: bool = False, in_order: bool = False, **settings: Any) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(50, 8), kind(8, 24, **settings)
        self.mean, self.in_order = mean, in_order
        width = settings.get("proj_size", 24) * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x, rows_first = self.words(ids), self.cells.batch_first
        x = x if rows_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=rows_first, enforce_sorted=self.in_order)
        outputs, states = self.cells(packed)
        if self.mean:
            padded, _ = pad_packed_sequence(outputs, batch_first=rows_first)
            return self.head(padded.sum(1 if rows_first else 0) / lengths[:, None])
        last = states[0] if isinstance(states, tuple) else states
        return self.head(torch.cat([last[-2], last[-1]], 1) if self.cells.bidirectional else last[-1])


def batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50, (len(lengths), max(lengths)), generator=generator), torch.tensor(lengths)


UNORDERED = [batch([4, 9, 1]), batch([2, 7]), batch([5]), batch([1, 1, 6, 3])]
KINDS = {
    "lstm": {"kind": nn.LSTM, "batch_first": True},
    "both ways, steps first": {"kind": nn.LSTM, "bidirectional": True, "mean": True},
    "two layers both ways": {"kind": nn.GRU, "num_layers": 2, "bidirectional": True, "batch_first": True},
    "in order": {"kind": nn.RNN, "in_order": True, "batch_first": True},
    "projected": {"kind": nn.LSTM, "proj_size": 8, "num_layers": 2, "batch_first": True},
    "relu": {"kind": nn.RNN, "nonlinearity": "relu", "mean": True, "batch_first": True, "bias": False},
}


def reader(name: str) -> tuple[Reader, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Reader(**KINDS[name]).eval()
    return model, [batch(sorted(b[1].tolist(), reverse=True)) for b in UNORDERED] if model.in_order else UNORDERED


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", KINDS)
def test_files_of_packed_sequences_take_other_batches_and_lengths(name, tmp_path) -> None:
    model, batches = reader(name)
    file = ck.export_onnx(model, tmp_path / "model.onnx", batches[0], dynamic=VARYING)
    proof = ck.verify_onnx(file, model, batches)
    assert proof.passed, proof


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_read_packed_sequences_get_narrower_and_are_quantized(name, tmp_path) -> None:
    model, batches = reader(name)
    before, width = ck.count_macs(model, batches[0]), model.cells.hidden_size
    ck.prune.apply_(model, ck.prune.plan_channels(model, batches[0], ck.keep(macs=0.5)))
    assert ck.count_macs(model, batches[0]) < 0.6 * before
    assert model.cells.hidden_size < width
    quantized = ck.quant.quantize_dynamic(model, batches[0], dynamic=VARYING)
    file = ck.export_onnx(quantized, tmp_path / "int8.onnx", batches[0], dynamic=VARYING)
    stored = [np.prod(i.dims) for i in onnx.load(file).graph.initializer if i.data_type in (2, 3) and len(i.dims) == 3]
    if name != "projected":  # whose product of two matrices is float
        assert sum(stored) == sum(p.numel() for n, p in model.cells.named_parameters() if "weight" in n)
    proof = ck.verify_onnx(file, quantized, batches)
    assert proof.passed, proof


@pytest.mark.parametrize("name", ["lstm", "both ways, steps first", "two layers both ways"])
def test_rows_are_not_sorted(name, tmp_path) -> None:
    model, batches = reader(name)
    file = ck.export_onnx(model, tmp_path / "model.onnx", batches[0], dynamic=VARYING)
    assert not {"TopK", "ScatterElements"} & {node.op_type for node in onnx.load(file).graph.node}


def test_a_packed_sequence_of_other_making_is_refused() -> None:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(PackedSequence(x, torch.tensor([2, 1])))[1]

    with pytest.raises(ck.ModelError, match="that the model does not make by pack_padded_sequence"):
        capture(Made().eval(), (torch.randn(3, 5),), dynamic=())


def test_functions_that_a_model_calls_by_the_name_of_their_arguments(tmp_path) -> None:
    """As tracing sees what orders rows."""

    class Named(Reader):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            scores = super().forward(ids, lengths)
            longest = lengths.argsort(descending=True)
            return scores.index_select(dim=0, index=longest) + torch.zeros_like(scores).scatter_(0, longest[:, None], 1.0)

    torch.manual_seed(0)
    model = Named(**KINDS["lstm"]).eval()
    file = ck.export_onnx(model, tmp_path / "model.onnx", UNORDERED[0], dynamic=VARYING)
    assert ck.verify_onnx(file, model, UNORDERED[:3]).passed


def test_a_graph_of_a_packed_sequence_trains_as_its_model() -> None:
    model, (x, *_) = reader("two layers both ways")
    model(*x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    captured = capture(model, x).module.train()
    captured.zero_grad()
    captured(*x).square().sum().backward()
    for name, parameter in captured.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


class Steps(nn.Module):
    """Each step of a packed sequence, padded with -1 to twelve steps, from states that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        packed = PackedSequence(packed.data * 2, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        outputs, _ = self.cells(packed, (state, state + 1))
        return pad_packed_sequence(outputs, padding_value=-1.0, total_length=12)


def test_padding_values_lengths_and_given_states(tmp_path) -> None:
    torch.manual_seed(0)
    model = Steps().eval()
    x = (torch.randn(9, 3, 5), torch.tensor([4, 9, 1]), torch.randn(2, 3, 6))
    wanted, got = model(*x), capture(model, x, dynamic=()).module(*x)
    torch.testing.assert_close(got, wanted)
    assert (wanted[0][1:, 2] == -1).all()
    shorter = (torch.randn(9, 3, 5), torch.tensor([2, 3, 9]), torch.randn(2, 3, 6))
    file = ck.export_onnx(model, tmp_path / "model.onnx", x, dynamic=())
    assert ck.verify_onnx(file, model, [x, shorter]).passed


class Counting(Reader):
    """The same, which finds the lengths itself: 0 is padding."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids, (ids != 0).sum(1))


@pytest.mark.parametrize("kind", [Reader, Counting])
def test_a_quantized_model_of_packed_sequences_is_read_back(kind, tmp_path) -> None:
    """Its record makes an example, in which no length may be 0."""
    torch.manual_seed(0)
    model, (ids, lengths) = kind(**KINDS["lstm"]).eval(), batch([4, 9, 1])
    ids[torch.arange(9) >= lengths[:, None]] = 0
    inputs = (ids, lengths) if kind is Reader else (ids,)
    task = ck.Task(val=[(*inputs, torch.zeros(3, dtype=torch.long))])
    recipe = ck.Recipe(ck.DynamicQuant(), seed=0)
    first = recipe.run(model, task, out=tmp_path)
    again = recipe.run(model, task, out=tmp_path)
    torch.testing.assert_close(again.model(*inputs), first.model(*inputs))


class Whole(nn.Module):
    """An encoder, of whose packed sequence something is read that only packing knows."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.cells, self.read = nn.LSTM(5, 6, batch_first=True), read

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        outputs, (last, cells) = self.cells(packed)
        if self.read == "cells":
            return cells[-1]
        if self.read == "sum of sizes":
            return last[-1] * torch.sum(packed.batch_sizes)
        if self.read == "each size":
            return last[-1] * sum(size for size in packed.batch_sizes)
        mixed = last[-1] * outputs.data.mean()
        if self.read == "mean beside a mask":
            return torch.cat([mixed, torch.full_like(mixed, -torch.inf)], 1)
        if self.read == "mean beside a fill":
            return torch.cat([mixed, torch.full_like(mixed, -1e9)], 1)
        return mixed


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("cells", "last cell states of an LSTM"),
        ("sum of sizes", r"batch_sizes are read \(sum\)"),
        ("each size", r"batch_sizes are read \(\[1\]\)"),
        (
            "mean of data",
            r"gives other outputs than the model, by .*; .* compute nothing over several steps of PackedSequence\.data",
        ),
        ("mean beside a mask", r"gives other outputs than the model, by 0\.\d+;"),
        ("mean beside a fill", r"gives other outputs than the model, by 0\.\d+;"),
    ],
)
@pytest.mark.parametrize("way", ["capture", "export"])
def test_what_no_graph_knows_of_a_packed_sequence_is_refused(way, read, message, tmp_path) -> None:
    torch.manual_seed(0)
    model, example = Whole(read).eval(), (torch.randn(3, 4, 5), torch.tensor([4, 2, 1]))
    with pytest.raises(ck.ModelError, match=message):
        capture(model, example) if way == "capture" else ck.export_onnx(model, tmp_path / "model.onnx", example)


class Drawn(nn.Module):
    """A packed sequence, and dropout that is always on, as in Tacotron 2 and in Monte Carlo dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor, on: bool = True) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        outputs, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return nn.functional.dropout(outputs, 0.5, training=on)


def test_a_packed_sequence_beside_random_numbers_is_captured() -> None:
    model, example = Drawn().eval(), (torch.randn(3, 4, 5), torch.tensor([4, 2, 1]))
    torch.testing.assert_close(capture(model, example).module(*example), model(*example, on=False))


class Highest(nn.Module):
    """The largest outputs of each row, with zeros for padding: more padding counts where all are below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        outputs, _ = self.cells(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(outputs, batch_first=True)[0].amax(1)


def test_padding_behind_the_longest_row_is_refused_where_it_counts(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Highest().eval(), torch.randn(3, 7, 5)
    longest_last = (x, torch.tensor([2, 2, 7]))  # of the two rows that are traced, none has seven steps
    file = ck.export_onnx(model, tmp_path / "model.onnx", longest_last)
    assert ck.verify_onnx(file, model, [longest_last]).passed
    with pytest.raises(
        ck.ModelError, match=r"; pad the example to its longest row alone, or set pad_packed_sequence\(total_length=\)"
    ):
        capture(model, (x, torch.tensor([2, 2, 2])))


class Full(nn.Module):
    """Of sentences whose lengths are found in different ways, the last states beside the mean of all words."""

    def __init__(self, lengths: str, *, mean: bool) -> None:
        super().__init__()
        self.found, self.mean = lengths, mean
        self.words, self.cells = nn.Embedding(50, 8, padding_idx=3), nn.GRU(8, 6, batch_first=True)

    def lengths(self, ids: Tensor, *given: Tensor) -> Tensor:
        match self.found:
            case "given":
                return given[0]
            case "fractions":
                return (given[0] * ids.shape[1]).round().long()
            case "a mask":
                return given[0].sum(1)
            case "a mask of padding":
                return (~given[0]).sum(1)
            case "padding":
                return (ids != 3).sum(1)
            case "seven":
                return (ids != 7).sum(1)
            case _:
                return torch.full((ids.shape[0],), ids.shape[1])

    def forward(self, ids: Tensor, *given: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), self.lengths(ids, *given), batch_first=True, enforce_sorted=False)
        outputs, states = self.cells(packed)
        return torch.cat([states[0], outputs.data.mean(0).expand_as(states[0])], 1) if self.mean else states[0]


FULL = torch.full((4,), 9)
GIVEN = {
    "given": (FULL,),
    "fractions": (torch.ones(4),),
    "a mask": (torch.ones(4, 9, dtype=torch.long),),
    "a mask of padding": (torch.zeros(4, 9, dtype=torch.bool),),
    "padding": (),
}


@pytest.mark.matrix
@pytest.mark.parametrize("lengths", GIVEN)
@pytest.mark.parametrize("dynamic", [(0, 1), ()])
def test_an_example_whose_rows_are_all_full_hides_no_padding_that_counts(lengths, dynamic) -> None:
    torch.manual_seed(0)
    example = (torch.randint(8, 50, (4, 9)), *GIVEN[lengths])
    with pytest.raises(ck.ModelError, match="where padding counts: where rows of the example are shorter the graph of"):
        capture(Full(lengths, mean=True).eval(), example, dynamic=dynamic)
    model = Full(lengths, mean=False).eval()
    torch.testing.assert_close(capture(model, example, dynamic=dynamic).module(*example), model(*example))


def test_sorted_rows_that_are_all_full_are_made_shorter_in_order() -> None:
    torch.manual_seed(0)
    model, x = Whole("mean of data").eval(), torch.randn(3, 4, 5)
    with pytest.raises(ck.ModelError, match="where rows of the example are shorter"):
        capture(model, (x, torch.tensor([4, 4, 4])))
    two = Reader(**KINDS["in order"]).eval()
    example = (torch.randint(1, 50, (3, 4)), torch.tensor([4, 4, 4]))
    torch.testing.assert_close(capture(two, example).module(*example), two(*example))


def test_rows_that_cannot_be_made_shorter_are_told_of() -> None:
    torch.manual_seed(0)
    ids = torch.randint(8, 50, (4, 9))
    with pytest.warns(UserWarning, match="Full packs a batch of which no row has padding in the example: .* different lengths"):
        capture(Full("seven", mean=True).eval(), ids)
    ids[1, 5:] = 7
    with pytest.raises(ck.ModelError, match="where padding counts: on the example"):
        capture(Full("seven", mean=True).eval(), ids)
    model = Full("constant", mean=True).eval()  # no row is ever shorter
    torch.testing.assert_close(capture(model, ids).module(ids), model(ids))


class OneSentence(Full):
    """One of which no other was captured, since a class is warned of once."""


def test_an_example_of_one_row_is_asked_for_padding_behind_it() -> None:
    torch.manual_seed(0)
    model, ids = OneSentence("given", mean=False).eval(), torch.randint(8, 50, (1, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, (ids, torch.tensor([6])), dynamic=())
    with pytest.warns(UserWarning, match="Give an example with padding behind its row, and the row's length$"):
        capture(model, (ids, torch.tensor([9])), dynamic=())


class FirstState(nn.Module):
    """Layers whose first state is zeros into which something is written, before or after they run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cells, self.first = how, nn.GRU(5, 6, 2, batch_first=True), nn.Linear(5, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        state, first = torch.zeros(2, len(x) if self.how == "len" else x.shape[0], 6), self.first(x[:, 0])
        if self.how == "an entry":
            state[0] = first
        elif self.how == "a view":
            state[1].copy_(first)
        elif self.how == "in place":
            state.add_(first)
        _, last = self.cells(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), state)
        if self.how == "afterwards":
            state[0] = first
        return last[-1] + state.sum(0)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("how", ["an entry", "a view", "in place", "afterwards", "len"])
def test_a_first_state_is_what_was_written_into_its_zeros(how) -> None:
    """`len(x)` is a size that varies, as it is for models that pack nothing."""
    torch.manual_seed(0)
    model, x = FirstState(how).eval(), torch.randn(4, 7, 5)
    captured = capture(model, (x, torch.tensor([7, 3, 2, 5])), dynamic=(0, 1)).module
    for example in ((x, torch.tensor([7, 3, 2, 5])), (x[:3, :6], torch.tensor([1, 6, 2]))):
        torch.testing.assert_close(captured(*example), model(*example))
    assert "len" not in globals()
