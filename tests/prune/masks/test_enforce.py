"""`enforce_masks_`: of a model without masks, of weights that have several names, and of weights that are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.prune import Masks, enforce_masks_, masks_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_zeros_without_masks_are_warned_of() -> None:
    sparse = net()
    Masks({"0.weight": torch.rand(16, 8) > 0.6}).apply_(sparse)
    loaded = net()
    loaded.load_state_dict(sparse.state_dict())
    wanted = r"enforce_masks_: Sequential has no masks, though \d+% of 0.weight are zero .*\. If these were pruned, training will"
    with pytest.warns(UserWarning, match=wanted):
        enforce_masks_(loaded, sgd(loaded))()
    Masks({"0.weight": loaded[0].weight != 0}).apply_(loaded)  # as the warning says
    enforce_masks_(loaded, sgd(loaded))()


def test_dense_models_and_zero_initialized_layers_are_not() -> None:
    model = net()
    enforce_masks_(model, sgd(model))()
    nn.init.zeros_(model[2].weight)
    with torch.no_grad():
        model[0].weight[0] = 0
    enforce_masks_(model, sgd(model))()


def test_a_training_that_is_meant_to_be_dense_is_quiet() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[:8] = 0
    enforce_masks_(model, sgd(model), quiet=True)()
    batches = [(torch.randn(8, 8), torch.arange(8) % 4)]
    ck.Train(epochs=1)(model, ck.Task(train=batches, val=batches))


# tied weights


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding: `words.weight`, and `head.weight` by its second name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


TOKENS = torch.arange(8)


def in_a_run(model: nn.Module, policy: ck.mixed.Policy) -> None:
    run = ck.mixed.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), policy)
    release = enforce_masks_(model, run)
    for _ in range(2):
        run.backward(nn.functional.cross_entropy(run(TOKENS), TOKENS.flip(0)))
        run.step()
    release()
    run.finish()


@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.MASTER_BF16, ck.mixed.SPLIT_BF16], ids=lambda policy: policy.name)
def test_a_mask_at_the_second_name_of_a_tied_weight_is_kept(policy: ck.mixed.Policy) -> None:
    model = Tied()
    masks = Masks({"head.weight": torch.rand(8, 4) > 0.5})
    masks.apply_(model)
    in_a_run(model, policy)
    assert masks.violations(model) == {}
    assert list(masks_of(model).masks) == ["words.weight"]  # type: ignore[union-attr]
    assert bool((model.words.weight[masks.masks["head.weight"]] != 0).all())


def test_masks_at_both_names_of_a_tied_weight_both_hold(tmp_path) -> None:
    model = Tied()
    masks = Masks({"words.weight": torch.rand(8, 4) > 0.3, "head.weight": torch.rand(8, 4) > 0.3})
    masks.apply_(model)
    attached = masks_of(model)
    assert attached is not None
    assert (attached.total, attached.removed) == (32, int((model.head.weight == 0).sum()))
    assert torch.equal(attached.masks["words.weight"], masks.masks["words.weight"] & masks.masks["head.weight"])
    ck.save(model, tmp_path)
    loaded = ck.load(Tied(), tmp_path)
    in_a_run(loaded, ck.mixed.FP32)
    assert masks.violations(loaded) == {}


def test_masks_of_weights_that_are_tied_later_both_hold() -> None:
    model = net()
    model[2] = nn.Linear(8, 16)
    masks = Masks({"0.weight": torch.rand(16, 8) > 0.3, "2.weight": torch.rand(16, 8) > 0.3})
    masks.apply_(model)
    model[2].weight = model[0].weight
    masks.zero_(model)
    optimizer = sgd(model)
    enforce_masks_(model, optimizer)
    (model[0](x := torch.randn(4, 8)) + model[2](x)).square().sum().backward()
    optimizer.step()
    assert masks.violations(model) == {}


# weights that are computed


def by_parametrization(layer: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(layer)


def by_torch_masks(layer: nn.Module) -> None:
    nn.utils.prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    ("compute", "parts", "remedy"),
    [
        (
            by_parametrization,
            "0.parametrizations.weight.original0, 0.param",
            "torch.nn.utils.parametrize.remove_parametrizations",
        ),
        (nn.utils.weight_norm, "0.weight_g, 0.weight_v", "torch.nn.utils.remove_weight_norm"),
        (nn.utils.spectral_norm, "0.weight_orig", "remove_spectral_norm"),
        (by_torch_masks, "0.weight_orig", "ck.prune.Masks.from_torch_prune_"),
    ],
)
def test_a_mask_of_a_weight_that_is_computed_is_refused(compute, parts: str, remedy: str) -> None:
    masks = Masks({"0.weight": torch.rand(16, 8) > 0.5})
    model, later = net(), net()
    compute(model[0])
    with pytest.raises(ModelError, match=rf"0.weight: a mask needs .*Linear computes this in every run from {parts}.*{remedy}"):
        masks.apply_(model)
    assert masks_of(model) is None
    masks.apply_(later)
    compute(later[0])
    with pytest.raises(ModelError, match="0.weight: a mask needs a parameter or buffer, and .* computes this in every run"):
        enforce_masks_(later, sgd(later))
