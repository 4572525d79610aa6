"""Taps: reading inputs and outputs of modules."""

from __future__ import annotations

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, hooked_modules
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.taps import find_taps, tapped, watched
from compresskit.quant import prepare_qat


class Odd(nn.Module):
    """Outputs that are no tensors, keyword inputs, a module called twice and one that never is."""

    def __init__(self):
        super().__init__()
        self.rnn, self.act, self.name, self.unused = nn.GRU(4, 4, batch_first=True), nn.ReLU(inplace=True), Name(), nn.ReLU()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.name(x)
        y, _ = self.rnn(x)
        return self.act(self.linear(input=self.act(y - 0.1)) - 0.5)


class Name(nn.Module):
    def forward(self, x):
        return "no tensor"


def test_taps_read_outputs_inputs_and_the_first_of_a_tuple() -> None:
    model, x = Odd(), torch.randn(2, 3, 4)
    with tapped(model, ["rnn", "rnn:in", "linear", "linear:in", "act", "act"]) as seen:
        output = model(x)
    y = model.rnn(x)[0]
    torch.testing.assert_close(seen["rnn"], y)
    torch.testing.assert_close(seen["rnn:in"], x)
    torch.testing.assert_close(seen["linear:in"], F.relu(y - 0.1))
    torch.testing.assert_close(seen["linear"], model.linear(F.relu(y - 0.1)))  # before the ReLU in place behind it
    torch.testing.assert_close(seen["act"], output)  # the last of two calls
    assert not hooked_modules(model)
    with pytest.raises(ModelError, match="tap 'name': no tensor there, only str"), tapped(model, ["name"]):
        model(x)
    assert not hooked_modules(model)


def test_globs_match_within_a_part_of_the_name() -> None:
    model = build(networks.Chain)
    assert find_taps(model, "?") == ["a", "b"]
    assert find_taps(model, "*.0:in") == ["a.0:in", "b.0:in"]
    assert find_taps(model, "b.1") == ["b.1"]
    with pytest.raises(ModelError, match=r"tap 'heat': Chain has no such module; the nearest are \['head'"):
        find_taps(model, "heat")
    with pytest.raises(SettingError, match="tap 3: wanted the name of a module, a text, got int"):
        find_taps(model, 3)


def test_watched_sees_every_call_with_all_arguments() -> None:
    model, x, values = Odd(), torch.randn(2, 3, 4), []
    with watched(model, ["linear:in", "act"], lambda tap, value: values.append((tap, value))):
        model(x)
    assert [tap for tap, _ in values] == ["act", "linear:in", "act"]
    assert isinstance(values[1][1], tuple)
    assert len(values[1][1]) == 1
    assert not hooked_modules(model)


class Merging(nn.Module):
    """A sum of two branches, and a scale that is learned behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.scale, self.last = nn.Parameter(torch.rand(8, 1, 1)), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = x * 0.5
        x = (self.three(x) + self.one(x)).relu()
        return x + self.scale * self.last(x)


def test_values_of_a_quantized_graph_are_those_of_the_float_model_or_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Merging(), nn.Sequential(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8),
        nn.Flatten(), nn.Linear(8 * 36, 4),
    )  # fmt: skip
    x = torch.randn(8, 3, 10, 10)
    for _ in range(5):
        model(x)
    quantized = prepare_qat(model.eval(), [x]).eval()
    quantized.enable_(False)
    refused = {}
    for tap in [each for name, _ in model.named_modules() if name for each in (name, name + ":in")]:
        try:
            assert find_taps(quantized, tap) == [tap]
        except ModelError as error:
            refused[tap] = str(error)
            continue
        with torch.no_grad(), tapped(quantized, [tap]) as here:
            quantized(x)
        with torch.no_grad(), tapped(model, [tap]) as there:
            model(x)
        torch.testing.assert_close(here[tap], there[tap], rtol=1e-4, atol=1e-5)
    assert refused.keys() == {"0", "1:in", "3.three:in", "3.three", "3.one", "3.one:in", "3.last", "4", "4.0", "5:in"}
    assert refused["0"].endswith(
        "merged with '1' behind it here, and is no value of its own; tap '1', which the float model has, too"
    )
    assert refused["5:in"].endswith("merged with '4.0' before it here, so that its input is no value; tap its output, '5'")
