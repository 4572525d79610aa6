"""Spectral layers, whose weights are complex numbers: trained, resumed, saved and loaded."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import Interrupted
from compresskit.base.progress import Every, Progress

BATCHES = [(torch.randn(8, 8), torch.arange(8) % 3) for _ in range(4)]


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(9, dtype=torch.complex128))

    def forward(self, x):
        spectrum = torch.fft.rfft(self.start(x).relu()) * self.filter + self.shift.to(torch.complex64)
        return self.head(torch.fft.irfft(spectrum, n=16))


def trained(model, folder, stop_after=None):
    """The weights of a training of two epochs of four steps, or None where it was interrupted after a step."""
    progress = Progress(folder=folder, key="k", every=Every(seconds=None))

    def on_step(report) -> None:
        if report.step == stop_after:
            progress.stop.signal = "SIGTERM"

    torch.manual_seed(1)
    model, settings = copy.deepcopy(model), ck.Train(epochs=2, optimizer=partial(torch.optim.AdamW, lr=0.01), on_step=on_step)
    try:
        ck.fit_(model, ck.Task(train=BATCHES, val=BATCHES, progress=progress), settings)
    except Interrupted:
        return None
    return model.state_dict()


def test_a_resumed_training_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path) -> None:
    model = Spectral()
    plain = trained(model, tmp_path / "plain")
    assert not torch.equal(plain["filter"], model.filter)
    assert trained(model, tmp_path / "stopped", 5) is None
    resumed = trained(model, tmp_path / "stopped")
    for name, value in plain.items():
        assert resumed[name].dtype == value.dtype
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_saved_model_is_loaded_to_the_bit(device, tmp_path) -> None:
    saved, x = Spectral(), BATCHES[0][0]
    ck.save(saved, tmp_path)
    with torch.device(device):
        fresh = Spectral()
    loaded = ck.load(fresh, tmp_path)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(loaded(x), saved(x))
