"""Operations on modules by dotted name."""

from __future__ import annotations

import json
import threading

import networks
import pytest
import torch
import torch.nn.utils.prune
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph import surgery
from compresskit.graph.capture import capture


def test_structure_rebuilds_a_pruned_model() -> None:
    model = build(networks.Depthwise)
    ck.prune.apply_(model, ck.prune.plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4))
    record = json.loads(json.dumps(surgery.structure(model)))
    fresh = networks.Depthwise()
    surgery.restructure_(fresh, record)
    fresh.load_state_dict(model.state_dict())
    x = image(4)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(*x), model.eval()(*x))
    assert fresh.depth[0].groups == model.depth[0].groups
    with pytest.raises(CheckpointError, match="made of another model"):
        surgery.restructure_(networks.Chain(), record)


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    with surgery.mode(model, training=False):
        assert not model[0].training
    assert [m.training for m in model] == [True, False]


class Told(nn.Linear):
    """It has a table in eval mode alone, which `train` makes, as the position biases of LeViT."""

    def train(self, mode: bool = True) -> Told:
        super().train(mode)
        vars(self).pop("table", None)
        if not mode:
            self.table = self.weight.detach() + 0
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight if self.training else self.table)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_modules_are_told_that_their_mode_is_restored(outer, training) -> None:
    model = nn.Sequential(Told(2, 2), Told(2, 2), nn.Sequential(Told(2, 2))).train(outer)
    model[1].train(not outer)
    with surgery.mode(model, training=training):
        assert model(torch.ones(1, 2)).shape == (1, 2)
    assert [module.training for module in model.modules()] == [outer, outer, not outer, outer, outer]
    assert [hasattr(module, "table") for module in (model[0], model[1], model[2][0])] == [not outer, outer, not outer]


@pytest.mark.parametrize("enabled", [True, False])
def test_attention_has_no_fast_path_inside_a_mode(enabled) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with pytest.raises(ZeroDivisionError), surgery.mode(nn.Linear(1, 1), training=False):
            with surgery.mode(nn.Linear(1, 1), training=True):
                assert not torch.backends.mha.get_fastpath_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
            raise ZeroDivisionError
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@torch.no_grad()
def test_padded_positions_are_computed_in_eval_mode_as_in_train_mode() -> None:
    model, inputs = networks.PaddedEncoder(), networks.padded_tokens(length=10)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout | nn.MultiheadAttention):
            layer.p = layer.dropout = 0.0
    wanted = model.train()(*inputs)
    with surgery.mode(model, training=False):
        torch.testing.assert_close(model(*inputs), wanted)


class Cached(nn.Module):
    """Keeps a table of `size` positions, of `width` values each, which no state dict holds."""

    def __init__(self, table, size, width):
        super().__init__()
        self.size, self.width, self.exit, self.layer = size, width, 1, nn.Linear(width, width)
        self.register_buffer("table", table, persistent=False)


@pytest.mark.parametrize(
    ("table", "size", "grown"),
    [(torch.zeros(4, 8), 4, 6), (torch.zeros(0), 0, 6), (None, -1, 6), (torch.zeros(0), (0, 0), (6, 5))],
    ids=["rows", "empty", "unset", "tuple"],
)
def test_the_length_of_a_table_that_a_run_made_is_not_restored(table, size, grown) -> None:
    pruned = Cached(torch.zeros(6, 5), grown, 5)
    pruned.exit = 3
    fresh = Cached(table, size, 8)
    surgery.restructure_(fresh, json.loads(json.dumps(surgery.structure(pruned))))
    assert fresh.size == size
    assert fresh.width == 5, "pruning makes widths smaller"
    assert fresh.exit == 3
    assert fresh.layer.in_features == 5


def test_a_length_without_a_table_is_restored() -> None:
    fresh = Cached(None, 4, 8)
    fresh.register_buffer("table", torch.zeros(4, 8))
    surgery.restructure_(fresh, surgery.structure(fresh) | {"modules": surgery.structure(Cached(None, 6, 8))["modules"]})
    assert fresh.size == 6


def test_unknown_names_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"a\.b: Linear has no module 'a'"):
        surgery.get_tensor(model, "a.b")
    with pytest.raises(ModelError, match="wait: Linear has no parameter or buffer"):
        surgery.get_tensor(model, "wait")


def test_a_weight_that_is_computed_is_no_parameter() -> None:
    """A plan of the plain model put a buffer in its place, that nothing reads, and cut all else."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    plan = ck.prune.plan_channels(model, torch.randn(2, 4), ck.keep(macs=0.5))
    nn.utils.parametrizations.weight_norm(model[0])
    before = {name: value.shape for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match="0.weight: Sequential has no parameter or buffer of that name"):
        ck.prune.apply_(model, plan)
    assert {name: value.shape for name, value in model.state_dict().items()} == before


class Remembers(nn.Sequential):
    def forward(self, x):
        self.seen = {"hidden": [self[0](x)]}
        return self[1](self.seen["hidden"][0])


def test_what_a_model_remembers_is_copied_without_its_graph() -> None:
    model, x = Remembers(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    wanted = model(x)
    copied = surgery.copy_model(model)
    (kept,), (seen,) = copied.seen["hidden"], model.seen["hidden"]
    assert kept.is_leaf
    assert kept.equal(seen)
    assert kept.data_ptr() != seen.data_ptr()
    assert seen.grad_fn is not None
    assert copied(x).equal(wanted)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_copy_of_an_old_weight_norm_follows_its_own_parameters() -> None:
    model, x = nn.utils.weight_norm(nn.Linear(3, 4)), torch.randn(5, 3)
    wanted = model(x)
    copied = surgery.copy_model(model)
    assert copied(x).equal(wanted)
    copied.weight_g.data *= 2
    assert (copied(x) - copied.bias).allclose(2 * (wanted - model.bias))
    assert model(x).equal(wanted)


def test_masks_of_torch_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 5))
    torch.nn.utils.prune.l1_unstructured(model[1], "weight_hh_l0", amount=0.5)
    with pytest.raises(ModelError, match=r"masks of torch.nn.utils.prune, in 1; .*prune.remove\(module, 'weight_hh_l0'\)"):
        surgery.copy_model(model)


def test_the_attribute_that_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(Remembers(nn.Linear(3, 4), nn.Linear(4, 2)))
    model[0](torch.randn(5, 3))
    model[0].lock = threading.Lock()
    with pytest.raises(ModelError, match=r"its attribute '0.lock', of type lock\): cannot pickle"):
        surgery.copy_model(model)


def test_a_function_and_a_class_in_the_place_of_a_model_are_refused(tmp_path) -> None:
    x = image(2)
    for refused in (
        lambda model: capture(model, x),
        lambda model: ck.export_onnx(model, tmp_path / "m.onnx", x),
        lambda model: ck.quant.quantize_static(model, [x]),
        lambda model: ck.quant.prepare_qat(model, [x]),
    ):
        with pytest.raises(ModelError, match=r"^\w+: wanted a torch.nn.Module as the model, got function; put a function into"):
            refused(lambda x: x)
        with pytest.raises(ModelError, match=r"^\w+: wanted .* got the class Chain; make an instance of it"):
            refused(networks.Chain)


class Counts(nn.Linear):
    """Adds the number of its runs, which `write` writes, to its outputs."""

    def __init__(self, write):
        super().__init__(3, 4)
        self.register_buffer("runs", torch.zeros(()))
        self.write = write

    def forward(self, x):
        self.write(self)
        return super().forward(x) + self.runs


def add_one(model):
    model.runs += 1


def replace(model):
    model.runs = torch.zeros(()) if model.runs is None else model.runs + 1


@pytest.mark.parametrize("write", [add_one, replace])
@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_buffers_that_each_run_writes_are_put_back(write, switch) -> None:
    with torch.no_grad():
        model, x = nn.Sequential(Counts(write), nn.ReLU()), torch.randn(2, 3)
        buffer = model[0].runs
        with switch():
            output, written = surgery.call_unmoved(model, (x,))
        assert written == ["0.runs"]
        assert model[0].runs is buffer
        assert not buffer.any()
        torch.testing.assert_close(output.clone(), model(x))
        assert surgery.call_unmoved(nn.BatchNorm1d(3).eval(), (x,))[1] == []


def test_buffers_that_are_none_stay_so() -> None:
    model = Counts(replace)
    model.runs = None
    with surgery.unset_buffers_kept(model):
        model(torch.randn(2, 3))
        assert model.runs is not None
    assert model.runs is None


class KeepsState(nn.Linear):
    """Keeps what `write` makes of its attributes, and adds `seen` to its outputs."""

    def __init__(self, write, *, read=True):
        super().__init__(3, 4)
        self.seen, self.steps, self.cache, self.table = torch.zeros(4), 0, {"past": []}, None
        self.write, self.read = write, read

    def forward(self, x):
        self.write(self, x)
        return super().forward(x) + self.seen if self.read else super().forward(x)


def sets_anew(module, x):
    module.seen, module.steps = module.seen + x.mean(), module.steps + 1


def writes_in_place(module, x):
    module.seen += 1
    module.cache["past"].append(x)
    module.cache["last"] = x


def makes_one(module, x):
    module.seen = module.seen + 1
    module.last = x.clone()


@pytest.mark.parametrize(
    ("write", "names"),
    [(sets_anew, ["0.seen", "0.steps"]), (writes_in_place, ["0.cache", "0.seen"]), (makes_one, ["0.last", "0.seen"])],
)
def test_attributes_that_each_run_sets_are_put_back(write, names) -> None:
    with torch.no_grad():
        model, x = nn.Sequential(KeepsState(write)), torch.randn(2, 3)
        seen, cache = model[0].seen, model[0].cache
        output, written = surgery.call_unmoved(model, (x,))
        assert sorted(written) == names
        assert model[0].seen is seen
        assert not seen.any()
        assert model[0].cache is cache
        assert cache == {"past": []}
        assert model[0].steps == 0
        assert not hasattr(model[0], "last")
        torch.testing.assert_close(output, model(x))


def test_what_no_output_depends_on_is_put_back_and_not_named() -> None:
    model = KeepsState(sets_anew, read=False)
    with torch.no_grad():
        assert surgery.call_unmoved(model, (torch.randn(2, 3),))[1] == []
    assert model.steps == 0


def test_what_the_first_run_makes_stays() -> None:
    def once(module, x):
        if module.table is None:
            module.table = torch.ones(4)

    model = KeepsState(once)
    with torch.no_grad():
        assert surgery.call_unmoved(model, (torch.randn(2, 3),))[1] == []
    assert model.table is not None


def test_a_vocabulary_is_not_looked_through(monkeypatch) -> None:
    monkeypatch.setattr(surgery, "LARGEST_STATE", 2)
    model = KeepsState(lambda module, _: module.cache["past"].append(1))
    with torch.no_grad():
        surgery.call_unmoved(model, (torch.randn(2, 3),))
        assert model.cache["past"] == []
        model.cache = {"past": [], "large": [0, 0, 0], "last": None}
        surgery.call_unmoved(model, (torch.randn(2, 3),))
    assert model.cache["past"] == [1]  # what is in it is neither compared nor put back


def test_a_static_method_as_an_attribute_is_shared_by_copies() -> None:
    model = nn.Linear(3, 3)
    model.act = staticmethod(torch.relu)
    copied = surgery.copy_model(model)
    assert copied.act is model.act
    assert copied.weight is not model.weight


class Tagged(nn.Parameter):
    """A class of parameters of one's own."""


def test_a_cut_parameter_keeps_what_the_user_gave_it() -> None:
    conv, seen = nn.Conv2d(8, 8, 3), []
    conv.weight = Tagged(conv.weight.detach())
    conv.to(memory_format=torch.channels_last)
    conv.weight.no_weight_decay = True
    conv.weight.register_hook(lambda grad: seen.append("gradient"))
    conv.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    surgery.select_(conv, "weight", {0: torch.arange(5)})
    assert type(conv.weight) is Tagged
    assert conv.weight.no_weight_decay
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    conv.weight.sum().backward()
    assert seen == ["gradient", "accumulated"]
    cube = nn.Conv3d(4, 4, 3).to(memory_format=torch.channels_last_3d)
    surgery.select_(cube, "weight", {1: torch.arange(2)})
    assert cube.weight.is_contiguous(memory_format=torch.channels_last_3d)
