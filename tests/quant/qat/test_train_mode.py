"""What QAT leaves out since its graph is that of eval mode: random numbers, and gradients that flow in train mode alone."""

from __future__ import annotations

import copy
import random
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from compresskit.quant import prepare_qat
from compresskit.quant.qat.train_mode import train_mode_alone

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """A function of the module and the values, between two layers."""

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self, self.a(x).relu()))


class Autoencoder(nn.Module):
    """Variational: it samples in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mean, self.width, self.leave = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.enter(x).relu()
        mean, width = self.mean(h), self.width(h)
        z = mean + torch.randn_like(mean) * width.exp() if self.training else mean
        return self.leave(z), mean, width


class TwoHeads(nn.Module):
    """What it returns is a function of the outputs of its heads, and of the mode."""

    def __init__(self, function, width: int = 2) -> None:
        super().__init__()
        self.enter, self.classes, self.boxes, self.function = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, width), function

    def forward(self, x: torch.Tensor):
        h = self.enter(x).relu()
        return self.function(self.classes(h), self.boxes(h), self.training)


class Noisy(nn.Module):
    """The noise on its weights is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.sigma = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.sigma * torch.randn_like(self.weight) if self.training else self.weight
        return F.linear(x, weight)


class Attends(nn.Module):
    def __init__(self, rate: float, **attributes: float) -> None:
        super().__init__()
        self.enter, self.leave, self.rate = nn.Linear(8, 24), nn.Linear(8, 8), rate
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.enter(x).chunk(3, -1))
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.leave(y[:, 0])


class KeepsBiases(nn.Module):
    """Attention whose position biases are computed in train mode, and kept for eval mode, as in timm's LeViT.

    how: "called" keeps them from the first call on, "told" from the last `train(False)`, and "always" never makes them anew.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.leave, self.biases, self.how = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.randn(5)), how
        self.register_buffer("places", (torch.arange(5)[:, None] - torch.arange(5)).abs(), persistent=False)
        self.kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def train(self, mode: bool = True):
        super().train(mode)
        if mode and self.how != "always":
            self.kept = {}
        elif self.how == "told":
            self.kept = {"cpu": self.biases[self.places]}
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.enter(x).chunk(3, -1)
        if not self.training and "cpu" not in self.kept:
            self.kept["cpu"] = self.biases[self.places]
        biases = self.biases[self.places] if self.training else self.kept["cpu"]
        return self.leave((q @ k.mT / 3 + biases).softmax(-1) @ v)


class Counts(nn.Module):
    """Writes buffers, parameters and attributes in train mode, and draws numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.runs = nn.Linear(8, 8), nn.BatchNorm1d(8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.runs += 1
            self.a.weight.data.mul_(0.9)
            x = x + torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
        return self.norm(self.a(x))


def said(caplog) -> str:
    """What the log says that the training is without."""
    lines = [line for line in caplog.messages if "the training is without" in line]
    caplog.clear()
    assert len(lines) <= 1
    return lines[0].partition("the training is without ")[2].rpartition(", since the graph is")[0] if lines else ""


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Between(lambda m, x: F.dropout(x, 0.3, m.training)), r"test_train_mode\.py:\d+ \(.*x: F\.dropout\(x, 0\.3"),
        (
            Between(lambda m, x: x + torch.randn_like(x) if m.training else x),
            r"_train_mode\.py:\d+ \(.* x \+ torch\.randn_like",
        ),
        (
            Between(lambda m, x: x + m.drop(x), drop=StochasticDepth(0.5, "row")),
            r"_depth\.py:\d+ \(noise = .*\) of 'drop'$",
        ),
        (Attends(0.2), r"test_train_mode\.py:\d+ \(y = F\.scaled_dot_product_attention.*\) of 'Attends'$"),
        (Autoencoder(), r"test_train_mode\.py:\d+ \(z = mean \+ torch\.randn_like.*\) of 'Autoencoder'$"),
        (Noisy(), r"test_train_mode\.py:\d+ \(weight = self\.weight \+ self\.sigma"),
        (nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)), "at '1'$"),
        (Between(lambda m, x: -x if m.training and random.random() < 2 else x), "at some line that draws from Python's random"),
    ],
    ids=["dropout", "noise", "depth", "attention", "autoencoder", "noisy", "rrelu", "python"],
)
@pytest.mark.filterwarnings("ignore:prepare_qat. the gradient of the output reaches")
def test_what_is_random_in_train_mode_alone_is_named_by_its_line(model, wanted, caplog) -> None:
    prepare_qat(model.eval(), [TOKENS if isinstance(model, Attends) else X])
    text = said(caplog)
    assert text.startswith("what is random in train mode alone, at ")
    assert re.search(wanted, text), text


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Between(lambda m, x: F.dropout(x, m.dropout, m.training), dropout=0.2), "the dropout of 'Between'"),
        (Between(lambda m, x: m.drop(x), drop=nn.Dropout(0.5)), "the dropout of 'drop'"),
        (Attends(0.2, dropout=0.2), "the dropout of 'Attends'"),
        (Between(lambda m, x: F.dropout(x, 0.0, m.training)), ""),
        (Between(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8)), ""),
        (Attends(0.0), ""),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), ""),
    ],
    ids=["attribute", "module", "attention", "none", "batchnorm", "no attention", "transformer"],
)
def test_known_dropout_is_said_once_and_what_drops_nothing_is_not_said(model, wanted, caplog) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat(model.eval(), [TOKENS if isinstance(model, Attends | nn.TransformerEncoderLayer) else X])
    assert said(caplog) == wanted


@pytest.mark.parametrize(
    ("model", "inside", "names"),
    [
        (Autoencoder(), None, "'width.weight', 'width.bias'"),
        (nn.Sequential(Autoencoder()), "0", "'width.weight', 'width.bias'"),
        (Noisy(), None, "'sigma'"),
    ],
    ids=["autoencoder", "inside", "noisy"],
)
def test_a_gradient_that_flows_in_train_mode_alone_is_a_warning(model, inside, names) -> None:
    wanted = rf"^prepare_qat: the gradient of the output reaches {names} in train mode alone\. The graph that is trained is"
    with pytest.warns(UserWarning, match=wanted) as found:
        prepare_qat(model.eval(), [X], inside=inside)
    assert found[0].filename == __file__
    assert "what is random at" in str(found[0].message)


@pytest.mark.parametrize("how", ["called", "told"])
@pytest.mark.parametrize("used", [False, True])
def test_parameters_of_values_that_are_kept_for_eval_mode_are_trained(how, used) -> None:
    model = nn.Sequential(KeepsBiases(how)).eval()
    with torch.no_grad():
        wanted = (model if used else copy.deepcopy(model))(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = prepare_qat(model, [TOKENS])
    assert torch.equal(quantized.body.get_parameter("0.biases"), model[0].biases)
    quantized(TOKENS).square().sum().backward()
    assert bool(quantized.body.get_parameter("0.biases").grad.any())
    quantized.convert_()
    with torch.no_grad():
        before = quantized.eval()(TOKENS)
        assert torch.allclose(before, wanted, atol=0.05)
        quantized.body.get_parameter("0.biases").mul_(-3)
        assert not torch.allclose(quantized(TOKENS), before, atol=0.05)


class Forgetting(nn.Module):
    """Its own `train` forgets what modules in it keep for eval mode, whose classes have none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(KeepsBiases("always"), nn.Linear(8, 8))

    def train(self, mode: bool = True) -> Forgetting:
        if mode:
            self.body[0].kept = {}
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_what_an_outer_module_forgets_is_trained() -> None:
    model = Forgetting().eval()
    with torch.no_grad():
        wanted = model(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = prepare_qat(model, [TOKENS])
    quantized(TOKENS).square().sum().backward()
    assert bool(quantized.body.get_parameter("body.0.biases").grad.any())
    quantized.convert_()
    with torch.no_grad():
        assert torch.allclose(quantized.eval()(TOKENS), wanted, atol=0.05)


def test_parameters_of_values_that_are_never_made_anew_are_a_warning() -> None:
    model = KeepsBiases("always").eval()
    wanted = r"^prepare_qat: 'biases' are not trained: in eval mode the model keeps values that it computed of them before"
    with pytest.warns(UserWarning, match=wanted) as found:
        prepare_qat(model, [TOKENS])
    assert found[0].filename == __file__


def test_code_that_takes_no_gradient_in_eval_mode_is_not_lost() -> None:
    """In the graph that is trained the gradient reaches it."""

    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(self.training):
                y = self.a(x).relu()
            return self.b(y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat(Quiet().eval(), [X])


@pytest.mark.parametrize(
    "model",
    [
        TwoHeads(lambda c, b, training: (c, b) if training else (b.exp(), c.softmax(-1))),
        TwoHeads(lambda c, b, training: (c, b) if training else (b.exp(), c.softmax(-1)), width=4),
        TwoHeads(lambda c, b, training: [c, b] if training else [b]),
        TwoHeads(lambda c, b, training: {"loss": c.sum() + b.sum(), "y": b} if training else {"loss": b.sum(), "y": b, "c": c}),
        TwoHeads(lambda c, b, training: {"y": b, "aux": c} if training else {"y": b}),
    ],
    ids=["decoded", "decoded, equal shapes", "auxiliary head", "other keys", "fewer keys"],
)
def test_outputs_that_are_others_in_eval_mode_are_no_warning(model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat(model.eval(), [X])


@pytest.mark.filterwarnings("ignore:prepare_qat. the running statistics of BatchNorm")
def test_the_model_and_the_generators_are_left_as_they_are(caplog) -> None:
    model = Counts().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    wanted = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    quantized = prepare_qat(model, [X[:1]])  # one row is taken twice, since BatchNorm wants two
    assert (torch.rand(1), random.random(), np.random.rand()) == wanted  # noqa: NPY002
    assert model.runs == 0
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert "x = x + torch.rand(1)" in (text := said(caplog))
    assert text.endswith("some line that draws from Python's random or numpy.random")
    assert train_mode_alone(nn.Bilinear(8, 8, 4), (X,), quantized).places == ()  # it does not run on these inputs
