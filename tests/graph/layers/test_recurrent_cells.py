"""Steps of recurrent layers in a loop: linear layers of the graph, with the same outputs and gradients."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.normalize import aten


class Loop(nn.Module):
    """Five steps of a cell, and the last state classified."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = cells = x.new_zeros(x.shape[0], 32)
        for step in range(5):
            if isinstance(self.cell, nn.LSTMCell):
                state, cells = self.cell(x[:, step], (state, cells))
            else:
                state = self.cell(x[:, step], state)
        return self.head(state)


CELLS = {
    "lstm": lambda: nn.LSTMCell(6, 32),
    "lstm without biases": lambda: nn.LSTMCell(6, 32, bias=False),
    "gru": lambda: nn.GRUCell(6, 32),
    "gru without biases": lambda: nn.GRUCell(6, 32, bias=False),
    "tanh": lambda: nn.RNNCell(6, 32),
    "relu": lambda: nn.RNNCell(6, 32, nonlinearity="relu"),
}
X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))


def loop(name: str) -> Loop:
    torch.manual_seed(0)
    return Loop(CELLS[name]()).eval()


@pytest.mark.parametrize("name", CELLS)
def test_a_graph_of_cells_computes_and_trains_as_its_model(name) -> None:
    model = loop(name)
    captured = capture(model, (X,)).module
    assert sum(node.target is aten.linear.default for node in captured.graph.nodes) == 11
    wanted, got = model(X), captured(X)
    torch.testing.assert_close(got, wanted)
    wanted.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    captured.zero_grad()
    captured(X).square().sum().backward()
    for parameter, values in captured.named_parameters():
        torch.testing.assert_close(values.grad, expected[parameter])


@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_weights_of_cells_are_rounded_once_for_all_steps(name, way, tmp_path) -> None:
    model = loop(name)
    quantized = ck.quant.quantize_static(model, [(X,)]) if way == "static" else ck.quant.quantize_dynamic(model, (X,))
    file = ck.export_onnx(quantized, tmp_path / "int8.onnx", (X,))
    assert ck.verify_onnx(file, quantized, [(X,)]).passed
    stored = [i.dims[0] * i.dims[1] for i in onnx.load(file).graph.initializer if i.data_type in (2, 3) and len(i.dims) == 2]
    assert sorted(stored) == sorted(p.numel() for p in model.parameters() if p.ndim == 2)
    torch.testing.assert_close(quantized(X), model(X), atol=0.05, rtol=0)


def test_a_cell_that_gives_both_states(tmp_path) -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(6, 8).eval()
    x = (torch.randn(3, 6), (torch.randn(3, 8), torch.randn(3, 8)))

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor, state: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
            return self.cell(x, (state, cells))

    inputs = (x[0], *x[1])
    file = ck.export_onnx(Step(), tmp_path / "step.onnx", inputs)
    assert ck.verify_onnx(file, Step().eval(), [inputs]).passed
