"""What tracing needs of the whole process: threads take turns, and loggers, standard error and torch are left as they were."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.export import exporter_tables
from compresskit.graph.capture import capture
from compresskit.graph.tracing import SIZES_LOG, first_time, one_thread_traces

LOGS = (SIZES_LOG, "torch.onnx", "onnxscript", "onnx_ir")


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def test_a_capture_and_an_export_leave_the_levels_of_loggers_as_they_were(tmp_path) -> None:
    before = {name: logging.getLogger(name).level for name in LOGS}
    try:
        for name in LOGS:
            logging.getLogger(name).setLevel(logging.INFO)
        capture(network(), torch.randn(2, 4))
        ck.export_onnx(network(), tmp_path / "f.onnx", torch.randn(2, 4))
        with pytest.raises(ck.ModelError, match="takes it for the constant"):
            capture(Loop(), torch.randn(2, 4, 3), dynamic=(0, 1))
        assert {name: logging.getLogger(name).level for name in LOGS} == dict.fromkeys(LOGS, logging.INFO)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class Loop(nn.Module):
    """Goes over a dimension, which becomes a constant."""

    def forward(self, x):
        return torch.stack([row.cumsum(-1) for row in x.unbind(1)], 1)


def test_a_class_is_told_once_of_each_thing_and_not_held() -> None:
    class Short(nn.Module):
        """Lives as long as this test."""

    assert [first_time(Short, what) for what in ("a", "a", ("b",), "a", ("b",))] == [True, False, True, False, False]
    held = weakref.ref(Short)
    del Short
    gc.collect()
    assert held() is None


def test_threads_that_export_take_turns(tmp_path) -> None:
    holder = exporter_tables.importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    before = vars(holder)["from_torchlib"], sys.stderr
    entered, go, failed = threading.Event(), threading.Event(), []

    class Slow(nn.Module):
        """Waits in its forward, and so in the middle of a trace."""

        def forward(self, x):
            entered.set()
            go.wait(60)
            return 2 * x

    def export(model, name) -> None:
        try:
            ck.export_onnx(model, tmp_path / name, torch.randn(2, 4))
        except Exception as error:
            failed.append(error)

    first = threading.Thread(target=export, args=(Slow(), "slow.onnx"))
    first.start()
    assert entered.wait(60)
    second = threading.Thread(target=export, args=(network(), "other.onnx"))
    second.start()
    second.join(3)
    assert second.is_alive()
    assert not (tmp_path / "other.onnx").exists()
    go.set()
    first.join(120)
    second.join(120)
    assert not failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.onnx", "slow.onnx"]
    assert (vars(holder)["from_torchlib"], sys.stderr) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_process_that_traces_does_not_wait_for_it() -> None:
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with one_thread_traces():
            holding.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    child = os.fork()
    if child == 0:
        entered = threading.Event()

        def enter() -> None:
            with one_thread_traces():
                entered.set()

        threading.Thread(target=enter, daemon=True).start()
        os._exit(0 if entered.wait(20) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


class Gaussian(nn.Module):
    """A head that makes a distribution, which checks its arguments: their values, which a trace has not."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        found = torch.distributions.Normal(self.mean(x), nn.functional.softplus(self.spread(x)) + 1e-4)
        return found.mean, found.stddev, torch.distributions.Categorical(logits=self.mean(x)).probs


def test_distributions_are_traced_and_check_their_arguments_afterwards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch's own compiler sets it, and leaves it
    model, x = Gaussian().eval(), torch.randn(5, 4)
    assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", x), model, [x]).passed
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(0.0, -1.0)
