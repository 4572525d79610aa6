"""How candidates are made and measured without training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import compresskit as ck
from compresskit.search.proxy import Workshop, held_out


def batches(rows: int, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)) for _ in range(count)]


def test_the_example_of_held_out_data_has_few_rows_and_the_data_all() -> None:
    task = ck.Task(val=batches(100), target="y")
    held = held_out(task, 150, (0,))
    assert torch.equal(held.example()[0], task.example()[0][:8])
    assert [len(x) for x, _ in held.batches("val")] == [100, 100]
    assert held.target == "y"
    assert len(replace(held, reference=torch.nn.Linear(4, 2)).example()[0]) == 8  # as a stage gets it


@pytest.mark.parametrize("dynamic", [(), (1,), {"x": {0: "batch"}}], ids=repr)
def test_the_example_is_whole_where_the_file_may_take_that_many_rows_alone(dynamic) -> None:
    assert len(held_out(ck.Task(val=batches(100)), 150, dynamic).example()[0]) == 100


def test_the_example_is_whole_where_not_all_inputs_have_a_row_a_sample() -> None:
    nodes = [(torch.randn(20, 4), torch.zeros(2, 30, dtype=torch.long), torch.zeros(20, dtype=torch.long))]
    found = held_out(ck.Task(val=nodes), 10, (0,)).example()
    assert [tuple(value.shape) for value in found] == [(20, 4), (2, 30)]


def test_a_task_with_methods_of_its_own_keeps_them() -> None:
    class Mine(ck.Task):
        def example(self):
            return (torch.ones(3, 4),)

    held = held_out(Mine(val=batches(100)), 150, (0,))
    assert torch.equal(held.example()[0], torch.ones(3, 4))
    assert [len(x) for x, _ in held.batches("val")] == [100, 100]


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
