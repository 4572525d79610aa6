"""`Train(compile=True)`: torch.compile runs the model in a training, and leaves nothing behind."""

import copy
import logging

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.mixed import compiled_model
from compresskit.mixed.step.compiled import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="no C++ compiler here")


def task() -> ck.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draw)
    batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16), strict=True))  # the last batch is smaller
    return ck.Task(train=batches, val=batches)


class Counted(nn.Module):
    """Counts in which form its code runs: the count is Python, which compiled code skips after the first call of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            eager.append(self.training)
        return self.net(x)


eager: list[bool] = []


def trained(model: nn.Module, stage: ck.Stage) -> nn.Module:
    eager.clear()
    torch.manual_seed(0)
    return stage(copy.deepcopy(model), task())


@needs_compiler
@pytest.mark.slow
def test_the_model_runs_compiled_in_steps_and_as_written_elsewhere() -> None:
    torch.manual_seed(1)
    model, sgd = Counted(), dict(epochs=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    plain = trained(model, ck.Train(**sgd))
    assert eager.count(True) == 9
    compiled = trained(model, ck.Train(**sgd, compile=True))
    assert True not in eager
    assert False in eager  # the metric is measured as written
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    eager.clear()
    compiled.train()(torch.zeros(2, 6))
    assert eager == [True]
    assert type(copy.deepcopy(compiled)) is Counted


def test_a_quantized_model_runs_as_written_and_a_line_says_so(caplog) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    plain = trained(model, ck.QAT(epochs=1))
    with caplog.at_level(logging.WARNING):
        other = trained(model, ck.QAT(epochs=1, compile=True))
    assert "QAT: compile=True: a quantized layer looks at values before it rounds" in caplog.text
    assert all(torch.equal(other.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_without_a_compiler_the_model_runs_as_written_and_a_line_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr(compiled_model, "has_compiler", lambda device: False)
    torch.manual_seed(1)
    model = Counted()
    plain = trained(model, ck.Train(epochs=1))
    with caplog.at_level(logging.WARNING):
        other = trained(model, ck.Train(epochs=1, compile=True))
    assert (
        "train: compile=True needs a C++ compiler, which is not here: the model runs as written, which is slower" in caplog.text
    )
    assert all(torch.equal(other.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(SettingError, match=r"Train\(compile=True, exact=True\): messages in every layer cannot be compiled"):
        ck.Train(epochs=1, compile=True, exact=True)
