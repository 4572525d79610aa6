"""What is masked, and what is left dense: named, counted, and masked too where the user includes it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune import Masks, masks_of, plan_mask
from compresskit.prune.patterns import NM, Block


class Experts(nn.Module):
    """Matrices that are no weights of torch's layers: stacked experts, a linear layer of one's own, a list; and a norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.parts = nn.ParameterList([torch.randn(8, 8)])
        self.norm, self.head, self.token = nn.LayerNorm((8, 8)), nn.Linear(8, 4), nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x):
        return self.head(torch.einsum("bi,kio->bo", x, self.experts) @ self.parts[0])


LEFT = "experts is left dense .and 1 more.: Experts has it, no layer of torch; name it in include= to mask it"


def zeros(model):
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim >= 2)


def test_matrices_that_are_left_dense_are_named_and_counted() -> None:
    with pytest.warns(UserWarning, match=LEFT):
        masks = plan_mask(Experts(), ck.remove(weights=0.5))
    assert set(masks.masks) == {"head.weight"}
    assert set(masks.unmasked) == {"experts", "parts.0"}
    assert masks.unmasked_weights == 4 * 64 + 64
    assert "16 of 32 weights removed (50.0%); with those that have no mask, 4.5% of 352 weights" in str(masks)
    assert "  parts.0 left dense: ParameterList has it" in str(masks)
    with pytest.raises(ModelError, match="its matrices, such as experts, can be named in include="):
        plan_mask(Experts(), ck.remove(weights=0.5), protect=("head",))


@pytest.mark.filterwarnings("ignore:.*left dense")
@pytest.mark.filterwarnings("ignore:.* loses all of its weights")
def test_included_matrices_are_masked() -> None:
    model = Experts()
    masks = plan_mask(model, ck.remove(weights=0.5), include=("experts", "parts"))
    assert (masks.total, masks.removed, masks.unmasked, masks.unmasked_weights) == (352, 176, {}, 0)
    assert plan_mask(model, pattern=NM(), include=("experts",)).ratios() == {"experts": 0.5, "head.weight": 0.5}
    assert plan_mask(model, allocation={"parts.0": 0.25}, include=("parts",)).ratios() == {"parts.0": 0.25}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        protected = plan_mask(model, ck.remove(weights=0.5), protect=("experts", "parts"))
    assert protected.unmasked == {}
    assert protected.unmasked_weights == 320


@pytest.mark.filterwarnings("ignore:.* loses all of its weights")
@pytest.mark.parametrize("schedule", [None, ck.prune.schedules.Linear()])
def test_stages_hold_what_is_included(schedule) -> None:
    x = torch.randn(16, 8)
    batches = [(x, torch.arange(16) % 4)] * 4
    train = ck.Train(epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    stage = ck.Sparsify(budget=ck.remove(weights=0.75), include=("",), finetune=train, schedule=schedule, updates=3)
    model = stage(Experts(), ck.Task(train=batches, val=batches))
    assert zeros(model) - 64 - 8 == 264  # of 352; the bias of the norm and the token, which nothing reads, are zeros
    assert masks_of(model).violations(model) == {}


def test_ratios_for_a_matrix_that_is_not_included_are_refused() -> None:
    with pytest.raises(SettingError, match="no layer 'experts' with maskable weights; name it in include="):
        plan_mask(Experts(), allocation={"experts": 0.5})
    with pytest.raises(SettingError, match="include: Experts has no module or parameter 'expert'"):
        plan_mask(Experts(), ck.remove(weights=0.5), include=("expert",))
    with pytest.raises(SettingError, match="include: 'token' has no matrix of floating-point weights"):
        plan_mask(Experts(), ck.remove(weights=0.5), include=("token",))


def test_a_tied_weight_is_known_by_the_layer_that_has_it() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Parameter(torch.randn(20, 8))
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.words

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks = plan_mask(Tied(), ck.remove(weights=0.5))
    assert masks.ratios() == {"words": 0.5}
    assert masks.unmasked_weights == 0


def test_masks_of_torch_are_taken_over() -> None:
    """One on top of another, on a bias, on a recurrent layer and on the model itself; a training keeps the zeros."""
    torch.manual_seed(0)

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.rnn, self.first = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 6)

        def forward(self, x):
            return super().forward(self.first(self.rnn(x)[0][:, -1]))

    model = Net()
    torch.nn.utils.prune.l1_unstructured(model.rnn, "weight_hh_l0", amount=0.5)
    torch.nn.utils.prune.random_unstructured(model.first, "bias", amount=2)
    torch.nn.utils.prune.ln_structured(model.first, "weight", amount=0.5, n=2, dim=0)
    torch.nn.utils.prune.l1_unstructured(model.first, "weight", amount=0.5)
    torch.nn.utils.prune.l1_unstructured(model, "weight", amount=4)
    x = torch.randn(7, 3, 4)
    wanted = model(x)
    masks = Masks.from_torch_prune_(model)
    assert {name: int((~mask).sum()) for name, mask in masks.masks.items()} == {
        "first.bias": 2, "first.weight": 23, "rnn.weight_hh_l0": 38, "weight": 4}  # fmt: skip
    assert not [name for name, _ in model.named_buffers() if name.endswith("_mask")]
    assert {name for name, _ in model.named_parameters()} >= {"weight", "first.weight", "rnn.weight_hh_l0"}
    torch.testing.assert_close(model(x), wanted)
    task = ck.Task(train=[(x, torch.zeros(7, dtype=torch.long))] * 3)
    trained = ck.Train(epochs=1)(model, task)
    assert masks.violations(trained) == {}
    with pytest.raises(ModelError, match="from_torch_prune_: Net has no masks of torch.nn.utils.prune"):
        Masks.from_torch_prune_(model)


@pytest.mark.parametrize("pattern", [NM(n=2, m=4), Block(inputs=4)])
def test_patterns_along_inputs_leave_transposed_convolutions_dense(pattern) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 8, 1))
    budget = None if isinstance(pattern, NM) else ck.remove(weights=0.5)
    with pytest.warns(UserWarning, match=r"0.weight is left dense: the weight of a ConvTranspose2d is \(inputs, outputs, ...\)"):
        masks = plan_mask(model, budget, pattern=pattern)
    assert list(masks.masks) == ["1.weight"]


@pytest.mark.parametrize("turned", [False, True])
def test_the_ratio_of_the_longest_name_counts_in_any_order(turned) -> None:
    ratios = {"": 0.5, "0": 0.25, "0.1.weight": 0.75}
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    plan = plan_mask(model, allocation=dict(reversed(ratios.items())) if turned else ratios)
    assert plan.ratios() == {"0.0.weight": 0.25, "0.1.weight": 0.75, "1.weight": 0.5}


@pytest.mark.parametrize("setting", ["protect", "include"])
@pytest.mark.parametrize("names", ["12", "1.weight", 3, (1, 2)])
def test_a_text_is_no_tuple_of_names(setting, names) -> None:
    """Its letters were taken for names: "12" protected the modules 1 and 2."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    wanted = rf"\('{names}',\)" if isinstance(names, str) else r'\("layer1", "head"\)'
    with pytest.raises(
        SettingError, match=rf"{setting}=\.\.\.: wanted dotted names of tensors or modules, such as {wanted}, got "
    ):
        plan_mask(model, ck.remove(weights=0.5), **{setting: names})
    assert plan_mask(model, ck.remove(weights=0.5), **{setting: ["1"]}).masks
