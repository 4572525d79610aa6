"""How candidates are made and measured without training."""

from __future__ import annotations

from dataclasses import asdict, replace

import networks
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.files import write_json
from compresskit.export.files import DiskError
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.figures import Figures
from compresskit.search.proxy.held_out import held_out
from compresskit.search.proxy.workshop import Workshop


def batches(rows: int, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)) for _ in range(count)]


class Texts(torch.nn.Module):
    """A classifier of texts, (N, T) whole numbers, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = torch.nn.Embedding(20, 16), torch.nn.Conv1d(16, 32, 3, padding=1), torch.nn.Linear(32, 3)

    def forward(self, x):
        return self.b(self.a(self.table(x).mT).relu().mean(2))


def padded(batch: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(x) for x, _ in batch)
    return torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x, _ in batch]), torch.tensor([y for _, y in batch])


def texts(*lengths: int, shuffle: bool = False) -> DataLoader:
    drawn = torch.Generator().manual_seed(0)
    data = [(torch.randint(1, 20, (length,), generator=drawn), i % 3) for i, length in enumerate(lengths)]
    return DataLoader(data, batch_size=8, shuffle=shuffle, collate_fn=padded)


@pytest.mark.parametrize(
    ("lengths", "shuffle"),
    [([4, 5, 60, *[4, 5] * 30], False), ([4 + i // 2 for i in range(63)], True)],
    ids=["one is longer", "shuffled"],
)
def test_macs_of_candidates_and_of_finalists_are_of_the_same_sample(lengths, shuffle, tmp_path, monkeypatch) -> None:
    """Batches of texts are as long as the longest in them, and the first batch held out has others than the first one of all."""
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: [Candidate(bits="int8")])
    task = ck.Task(train=texts(*lengths), val=texts(*lengths, shuffle=shuffle))
    settings = {"out": tmp_path, "trials": 1, "finalists": 1, "seconds": 0.02, "held_out_samples": 16, "dynamic": (0, 1)}
    found = ck.compress(Texts(), task, ck.at_most(bytes="2x", macs="1x"), **settings)
    assert found.figures.macs == found.dense.macs == found.chosen.figures.macs
    if not shuffle:
        assert found.dense.macs == found.result.rows[-1].macs


def test_what_was_measured_in_a_folder_is_found_as_it_would_be_made_now(tmp_path) -> None:
    task = ck.Task(train=batches(4), val=batches(4))
    settings = {"samples": 4, "batch": 1, "threads": 1, "seconds": 0.02, "seed": 0, "target": ck.quant.X86}
    shop = Workshop(model=torch.nn.Linear(4, 2).eval(), task=task, held=task, out=tmp_path, **settings)
    trained = replace(shop, trains=True)
    alike = [Candidate(macs=0.35, rank=0.6), Candidate(merged=2, macs=0.5, bits="weights4"), Candidate(bits="float")]
    placed = [Candidate(effort="balanced"), Candidate(blocks=12, macs=0.05, bits="int4", effort="balanced")]
    failed = Candidate(macs=0.15)
    for each, candidates in ((shop, [*alike, *placed, failed]), (trained, placed[:1])):
        for candidate in candidates:
            found = asdict(Figures(metric=1.0, drop=0.0, latency=1.0, bytes=1, macs=1))
            each.folder(candidate).mkdir(parents=True)
            write_json(each.folder(candidate) / "figures.json", {"failure": "no"} if candidate == failed else found)
    shop.folder(Candidate(macs=0.9)).mkdir()  # it is being made
    (mine := tmp_path / "candidates" / "mine").mkdir()
    write_json(mine / "figures.json", {})
    assert set(shop.measured()) == {*alike, *placed}
    assert set(trained.measured()) == {*alike, placed[0]}
    assert set(replace(shop, saves="bytes").measured()) == {*alike, placed[0]}  # blocks go in another order


def test_a_candidate_is_to_the_bit_what_its_recipe_makes_of_shuffled_data(tmp_path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 3, 16, 16), torch.arange(96) % 4)
    task = ck.Task(train=DataLoader(data, 8, shuffle=True), val=DataLoader(data, 32))
    model = networks.build(networks.WideChain)
    settings = {"samples": 16, "batch": 1, "threads": 1, "seconds": 0.02, "seed": 3, "target": ck.quant.X86}
    shop = Workshop(model=model, task=task, held=held_out(task, 512, (0,), model), out=tmp_path, **settings)
    made, _ = shop.compressed(Candidate(macs=0.5), Removable(), shop.samples)
    run = ck.Recipe(*shop.stages(Candidate(macs=0.5), Removable()), seed=shop.seed).run(model, task, out=tmp_path / "run")
    ran = run.model.state_dict()
    assert made.state_dict().keys() == ran.keys()
    assert all(torch.equal(value, ran[name]) for name, value in made.state_dict().items())


def test_each_process_counts_and_times_the_same_of_shuffled_data() -> None:
    given = []
    for seed in (1, 2):  # of the process
        torch.manual_seed(seed)
        held = held_out(ck.Task(val=texts(*range(4, 67), shuffle=True)), 16, (0,))
        given.append((held.example()[0], held.whole[0]))
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))


@pytest.mark.parametrize(
    ("layer", "gains"),
    [(torch.nn.LSTMCell(6, 32), True), (torch.nn.GRU(6, 32), True), (torch.nn.Conv1d(32, 32, 3), False)],
    ids=["cell", "layer", "convolution"],
)
def test_networks_of_recurrent_layers_and_cells_gain_by_ranges_of_every_call(layer, gains, tmp_path) -> None:
    task = ck.Task(val=batches(8))
    shop = Workshop(
        model=torch.nn.ModuleList([layer, torch.nn.Linear(4, 3)]), task=task, held=task, out=tmp_path, samples=8, batch=1,
        threads=1, seconds=0.02, seed=0, target=ck.quant.X86,
    )  # fmt: skip
    assert shop.gains_by_dynamic is gains


def test_a_drop_is_to_the_uncompressed_model_on_the_same_samples(tmp_path, caplog) -> None:
    def task() -> ck.Task:
        return ck.Task(val=[(torch.randn(8, 4), torch.randint(0, 3, (8,)))])

    model = torch.nn.Linear(4, 3).eval()
    first = Workshop(
        model=model, task=task(), held=task(), out=tmp_path, samples=8, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip
    found = first.dense()
    other = replace(first, held=task())
    for shop in (first, other, other, replace(first)):
        assert shop.dense().metric == pytest.approx(ck.evaluate(model, shop.held))
    assert first.dense() == found
    assert "gives other samples than when" in caplog.text


def test_the_folder_of_the_other_direction_is_refused_by_name(tmp_path) -> None:
    task = ck.Task(val=batches(8), metric=torch.nn.functional.mse_loss, higher_is_better=True)
    wrong = Workshop(
        model=torch.nn.Linear(4, 3), task=task, held=task, out=tmp_path, samples=8, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip
    wrong.prepare()
    wrong.prepare()
    right = replace(wrong, task=replace(task, higher_is_better=False))
    with pytest.raises(ck.CheckpointError, match=r"of another higher_is_better \(there: True, here: False\) for Linear"):
        right.prepare()


def test_a_full_disk_does_not_say_that_no_blocks_can_go(tmp_path, monkeypatch) -> None:
    """Their times are those of files; what is known of them is kept for all later calls."""

    def full(*given: object, **settings: object) -> None:
        raise DiskError("the disk is full")

    monkeypatch.setattr("compresskit.search.proxy.workshop.order_blocks", full)
    task = ck.Task(val=batches(8))
    shop = Workshop(
        model=torch.nn.Linear(4, 3), task=task, held=task, out=tmp_path, samples=8, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip
    with pytest.raises(ck.CheckpointError, match="the disk is full"):
        shop.removable(1.0)
    assert '"latency"' not in (tmp_path / "order.json").read_text()
