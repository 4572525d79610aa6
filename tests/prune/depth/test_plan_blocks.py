"""Plans of blocks: what is removed equals a branch of zeros, budgets are met, plans print, serialize and apply."""

from __future__ import annotations

import copy
import json

import networks
import oracles
import pytest
import torch
from networks import build, image, images_task
from residual import Basic, Mobile, Pair, ResNet, Transformer
from terminal import show_terminal
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune import plan_channels
from compresskit.prune.depth import BlockPlan, costs, importance, plan_blocks
from compresskit.prune.depth.find_blocks import find_blocks
from compresskit.prune.depth.plan_blocks import ORDER_ROUNDS, order_blocks

MACS = {"cost": costs.macs}
FAMILIES = {"resnet": ResNet, "mobile": Mobile, "transformer": Transformer}


def zero_branch_(model: nn.Module, path: str) -> None:
    """The last layers of a block's branches give zeros: the same by hand."""
    block = model.get_submodule(path)
    with torch.no_grad():
        for layer in {
            ResNet: lambda: [block.b[1]], Mobile: lambda: [block.project[1]], Transformer: lambda: [block.out, block.mlp[2]],
        }[type(model)]():  # fmt: skip
            layer.weight.zero_()
            layer.bias.zero_()


@pytest.mark.parametrize("family", FAMILIES)
def test_removed_equals_a_branch_of_zeros(family) -> None:
    model = build(FAMILIES[family]).eval()
    plan = plan_blocks(model, image(4), blocks=2, importance=importance.influence, **MACS)
    small, zeroed = plan.apply_(copy.deepcopy(model)), copy.deepcopy(model)
    for path in plan.paths:
        zero_branch_(zeroed, path)
    for rows in (1, 7):
        inputs = image(rows)
        torch.testing.assert_close(small(*inputs), zeroed(*inputs), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(small(*inputs), model(*inputs))
    assert ck.count_macs(small, image(2)) == plan.macs < plan.macs_before
    assert not any(name.startswith(plan.paths) for name in small.state_dict())
    assert small.train()(*image(7)).shape == (7, 10)


def test_a_relu_that_would_change_the_input_keeps_its_block() -> None:
    model = build(ResNet)
    model.stem = nn.Conv2d(3, 8, 3, 1, 1)  # gives negative values, which the ReLU of the first block removes
    plan = plan_blocks(model, image(4), blocks=2, importance=lambda s: {b.path: int(b.path[-1]) for b in s.blocks}, **MACS)
    assert plan.paths == ("layer1.1", "layer2.1")
    assert "as where a ReLU changes that input" in plan.locked["layer1.0"]


def test_a_block_that_the_code_reads_stays() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False)
    plan = plan_blocks(encoder.eval(), torch.randn(2, 5, 16), blocks=2, **MACS)
    assert set(plan.paths) == {"layers.1", "layers.2"}
    assert plan.locked["layers.0"].startswith("the model does not run without it: AttributeError")
    assert "with 2 norms on its way" in str(plan)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.a(x).relu()


class Outer(nn.Module):
    """A residual block that reads a layer of the one inside of it."""

    def __init__(self):
        super().__init__()
        self.inner, self.b = Inner(), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.b(self.inner(x) * self.inner.a.weight.mean())


def test_a_block_inside_of_another_is_tried_by_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Outer(), Inner(), nn.Linear(8, 3))
    plan = plan_blocks(model.eval(), torch.randn(4, 8), blocks=2, importance=importance.influence, **MACS)
    assert set(plan.paths) == {"1", "2"}
    assert plan.locked["1.inner"].startswith("the model does not run without it: AttributeError")


@pytest.mark.parametrize(("quantity", "kept"), [("macs", 0.6), ("parameters", 0.5), ("bytes", 0.6)])
def test_budgets_are_met(quantity, kept) -> None:
    model = build(ResNet)
    plan = plan_blocks(model, image(2), ck.keep(**{quantity: kept}), importance=importance.influence, **MACS)
    small = plan.apply_(copy.deepcopy(model))
    count = {"macs": lambda m: ck.count_macs(m, image(2))}.get(quantity, ck.count_parameters)
    assert count(small) / count(model) <= kept + (0.05 if quantity == "bytes" else 0)
    assert len(plan.blocks) < 5
    if quantity == "bytes":
        assert "of the dense one" in plan.note


def test_a_block_stays_where_a_later_one_meets_the_budget_alone() -> None:
    model = build(ResNet)  # every block of the second layer holds four times what one of the first does
    worth = {"layer1.0": 0.1, "layer1.1": 0.2, "layer2.1": 8.0}

    def importances(scoring):
        return {block.path: worth.get(block.path, 99.0) for block in scoring.blocks}

    counted = {path: sum(p.numel() for p in model.get_submodule(path).parameters()) for path in worth}
    whole = ck.count_parameters(model)

    def planned(saved: int) -> tuple[str, ...]:
        budget = ck.keep(parameters=1 - saved / whole)
        return plan_blocks(model, image(2), budget, importance=importances, cost=costs.parameters).paths

    assert planned(counted["layer1.0"]) == ("layer1.0",)
    assert planned(counted["layer2.1"]) == ("layer2.1",)
    assert planned(counted["layer2.1"] + 1) == ("layer1.0", "layer2.1")  # of two that would do the less important
    assert planned(counted["layer2.1"] + counted["layer1.0"] + 1) == ("layer1.0", "layer1.1", "layer2.1")


def test_a_latency_is_measured() -> None:
    plan = plan_blocks(build(Mobile), image(2), ck.keep(latency=0.95), importance=importance.influence)
    assert "in ONNX Runtime" in plan.note
    assert plan.unit == "ms"
    assert all(line.cost > 0 for line in plan.lines)


def test_importances() -> None:
    """Against plain loops; the block whose branch is zero costs nothing, whatever the importance."""
    task, model = images_task(ck, samples=32, classes=4), build(ResNet)
    zero_branch_(model, "layer1.1")
    for measure in (importance.output_error, importance.influence, importance.first_order):
        plan = plan_blocks(model, image(4), blocks=1, importance=measure, task=task, samples=32, **MACS)
        assert plan.paths == ("layer1.1",)
        assert plan.lines[0].importance == pytest.approx(0, abs=1e-6)
    alone = {"importance": importance.output_error, "task": task, "samples": 32}
    plan = plan_blocks(model, image(4), blocks=("layer1.0",), **alone, **MACS)
    x, without = task.train[0][0], copy.deepcopy(model)
    without.layer1[0] = nn.Identity()
    with torch.no_grad():
        expected = oracles.soft_targets(without(x), model(x), temperature=1.0)
    assert plan.lines[0].importance == pytest.approx(float(expected), rel=1e-3)
    plan = plan_blocks(model, image(4), blocks=("layer1.0",), importance=importance.influence, task=task, samples=32, **MACS)
    with torch.no_grad():
        before = model.stem(x).flatten(1)
        after = model.layer1[0](model.stem(x)).flatten(1)
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(before, after, strict=True)]
    assert plan.lines[0].importance == pytest.approx(1 - sum(cosines) / len(cosines), rel=1e-3)


def test_what_training_brings_back() -> None:
    """The error by batch statistics, times the parameters: against a copy in train mode; the model keeps its own statistics."""
    task, model = images_task(ck, samples=32, classes=4), build(ResNet)
    before = copy.deepcopy(model.state_dict())
    plan = plan_blocks(model, image(4), blocks=("layer2.1",), importance=importance.after_training, task=task, samples=32, **MACS)
    x, whole, without = task.train[0][0], copy.deepcopy(model).train(), copy.deepcopy(model).train()
    without.layer2[1] = nn.Identity()
    with torch.no_grad():
        wanted = model.eval()(x)
        before_it, after_it = (float(oracles.soft_targets(m(x), wanted, temperature=1.0)) for m in (whole, without))
    assert abs(after_it - before_it) > 1e-4
    expected = (after_it - before_it) * ck.count_parameters(model.layer2[1])
    assert plan.lines[0].importance == pytest.approx(expected, rel=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    one = plan_blocks(model, image(1), blocks=1, importance=importance.after_training, **MACS)  # one row has no variance
    assert len(one.paths) == 1


@pytest.mark.slow
def test_times_are_those_of_the_form_that_will_run() -> None:
    """Each kind of block, the whole model and the candidates are measured as `form` makes them, and bytes are of that form."""
    model, seen = build(ResNet), []

    def form(module: nn.Module, inputs: object) -> nn.Module:
        seen.append(module)
        return ck.quant.quantize_static(module, inputs)

    plan = plan_blocks(model, image(2), ck.keep(latency=0.99), importance=importance.influence, form=form)
    assert plan.unit == "ms"
    assert "in the form wanted" in plan.note
    assert sum(type(module) is ResNet for module in seen) >= 3  # to count, and the dense one and a candidate in turn
    assert sum(type(module) is not ResNet for module in seen) >= 2 * 2  # two kinds of blocks, once and several times in a row
    plan = plan_blocks(model, image(2), ck.keep(bytes=0.9), importance=importance.influence, form=form, **MACS)
    size = int(plan.note.partition("ONNX file of ")[2].split(" ")[0])
    assert size < 4 * ck.count_parameters(plan.apply_(copy.deepcopy(model)))


def test_a_block_that_is_called_twice_saves_its_time_twice_and_goes_from_both_places(monkeypatch) -> None:
    pair, inputs = build(Pair), (*image(4), *(-x for x in image(4)))
    monkeypatch.setattr(costs, "_milliseconds", lambda *_: 0.25)
    plan = plan_blocks(pair, inputs, blocks=("encoder.layer1.1",), importance=importance.influence)
    assert plan.lines[0].cost == pytest.approx(0.5)
    by_hand = copy.deepcopy(pair)
    by_hand.encoder.layer1[1] = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(plan.apply_(copy.deepcopy(pair)).eval()(*inputs), by_hand.eval()(*inputs))
    again = type(plan).from_json(json.loads(json.dumps(plan.to_json())))
    assert again.blocks[0].calls == 2


def test_a_form_that_fails_compares_blocks_by_macs(caplog) -> None:
    """Blocks are then not counted in milliseconds, which they do not have."""

    def form(module: nn.Module, inputs: object) -> nn.Module:
        if type(module) is not ResNet:
            raise RuntimeError("not alone")
        return module

    plan = plan_blocks(build(ResNet), image(2), ck.keep(latency=0.97), importance=importance.influence, form=form)
    assert "cannot be measured alone (not alone)" in caplog.text
    assert plan.unit == "saved"
    assert 1 <= len(plan.blocks) < 5


def test_plans_print_serialize_and_apply_to_another_model() -> None:
    model = build(Transformer)
    plan = plan_blocks(model, image(2), blocks=1, **MACS)
    again = BlockPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert str(plan).splitlines()[1].startswith(f"  {plan.paths[0]}: removed, ")
    other = again.apply_(build(Transformer))
    assert type(other) is Transformer
    assert ck.count_macs(other, image(2)) == plan.macs
    with pytest.raises(ModelError, match=f"{plan.paths[0]}.*: Transformer has no such block|: the plan was made for shape"):
        plan.apply_(other)
    with pytest.raises(ModelError, match="has no such block"):
        plan.apply_(build(ResNet))
    with pytest.raises(CheckpointError, match="not a plan of blocks"):
        BlockPlan.from_json({"blocks": 3})
    with pytest.raises(CheckpointError, match=r"the plan of blocks was changed after it was made, .*; plan again"):
        BlockPlan.from_json(plan.to_json() | {"blocks": []})


def test_channels_are_pruned_afterwards() -> None:
    model = build(ResNet)
    small = plan_blocks(model, image(2), blocks=2, importance=importance.influence, **MACS).apply_(model)
    before = ck.count_macs(small, image(2))
    ck.prune.apply_(small, plan_channels(small, image(2), ck.keep(macs=0.5), round_to=4))
    assert ck.count_macs(small, image(2)) <= 0.5 * before


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, SettingError, r"plan_blocks\(\): wanted either budget=ck.keep\(latency=0.7\), or blocks="),
        ({"budget": ck.keep(macs=0.5), "blocks": 1}, SettingError, "wanted either budget="),
        ({"budget": ck.remove(channels=0.5)}, SettingError, "wanted a budget of latency or macs"),
        ({"blocks": 0}, SettingError, r"blocks=...\): wanted a whole number >= 1, or a tuple of dotted names, got 0"),
        ({"blocks": 1, "samples": 0}, SettingError, r"samples=...\): wanted a whole number >= 1, got 0"),
        ({"blocks": ("layer2.0",)}, SettingError, r"blocks=\('layer2.0', ...\): it cannot be removed: its output is"),
        ({"blocks": 9}, ModelError, r"ResNet: wanted 9 blocks to remove, there are only 5; locked: layer2.0: its output"),
        ({"budget": ck.keep(macs=0.01)}, ModelError, r"wanted 1.0% of the macs, only .*% can be reached; locked: layer2.0"),
        ({"blocks": 1, "importance": importance.first_order}, SettingError, "first_order: it reads a loss; pass task="),
    ],
)
def test_bad_input(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        plan_blocks(build(ResNet), image(2), **{"importance": importance.influence, **MACS, **settings})


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Chain has no residual block that can be removed: wanted modules that add their input"):
        plan_blocks(build(networks.Chain), image(2), blocks=1, **MACS)


def test_blocks_are_ordered_by_importances_that_are_measured_a_few_times() -> None:
    model, calls = build(ResNet).eval(), []

    def by_number(scoring):
        calls.append(len(scoring.blocks))
        return {block.path: float(block.path.replace("layer", "").replace(".", "")) for block in scoring.blocks}

    found = order_blocks(model, image(4), importance=by_number, cost=lambda model, example, blocks: dict.fromkeys(blocks, 1.0))
    every = plan_blocks(model, image(4), blocks=len(found), importance=importance.influence, **MACS)
    assert found == tuple(sorted(every.paths))
    assert len(calls) == len(found) <= ORDER_ROUNDS  # few blocks: anew after each
    first = plan_blocks(model, image(4), blocks=1, importance=importance.output_error, cost=costs.parameters)
    assert order_blocks(model, image(4), cost=costs.parameters)[0] == first.paths[0]
    assert order_blocks(nn.Sequential(nn.Flatten(), nn.Linear(768, 10)).eval(), image(4)) == ()


def test_many_blocks_are_ordered_several_at_a_time() -> None:
    calls = []

    def constant(scoring):
        calls.append(len(scoring.blocks))
        return {block.path: 1.0 for block in scoring.blocks}

    model = build(ResNet).eval()
    model.layer1 = nn.Sequential(*[Basic(8, 8) for _ in range(10)]).eval()
    found = order_blocks(model, image(4), importance=constant, **MACS)
    assert len(calls) == 6  # two at a time
    assert len(set(found)) == len(found) == calls[0] > ORDER_ROUNDS


@pytest.mark.parametrize(
    ("plan", "bars"),
    [
        (lambda model: plan_blocks(model, image(4), blocks=2, **MACS), {"choose blocks", "score blocks"}),
        (lambda model: order_blocks(model, image(4), **MACS), {"order blocks", "score blocks"}),
        (lambda model: plan_blocks(model, image(4), blocks=1), {"time blocks"}),
    ],
)
def test_progress_is_shown(plan, bars, monkeypatch) -> None:
    """Choosing half of the blocks of a ResNet-56 runs it hundreds of times on the samples: minutes."""
    terminal = show_terminal(monkeypatch)
    plan(build(ResNet))
    assert bars <= set(terminal.bars)


class Clipped(nn.Module):
    """Blocks whose ReLU changes their inputs, which have negative values; last: what becomes of the outputs."""

    def __init__(self, last):
        super().__init__()
        self.enter, self.head, self.last = nn.Linear(12, 16), nn.Linear(16, 10), last
        self.blocks = nn.ModuleList(ClippedBlock() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


class ClippedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return (x + self.b(self.a(x).relu())).relu()


CLIPPED = {
    "filled": lambda y: y.masked_fill(torch.arange(10) > 8, -1e9),
    "filled with the least": lambda y: y.masked_fill(torch.arange(10) > 8, torch.finfo(y.dtype).min),
    "a head of zeros": lambda y: y,
}


@pytest.mark.parametrize("last", CLIPPED)
def test_outputs_that_say_little_hide_no_block_that_cannot_go(last) -> None:
    torch.manual_seed(0)
    model = Clipped(CLIPPED[last]).eval()
    if last == "a head of zeros":
        nn.init.zeros_(model.head.weight)
    with pytest.raises(ModelError, match="its input is not what is left with its branch at zero"):
        plan_blocks(model, torch.randn(8, 12), blocks=3, importance=importance.influence, **MACS)


def test_no_block_is_removed_where_no_output_is_finite() -> None:
    with pytest.raises(SettingError, match="blocks.1.*cannot be removed: no output of the model is finite on the example"):
        plan_blocks(Clipped(lambda y: y * float("nan")).eval(), torch.randn(8, 12), blocks=("blocks.1",), **MACS)


def test_equal_blocks_of_other_sizes_are_timed_apart(monkeypatch) -> None:
    """Behind a pooling, a block takes a fourth of the time."""
    monkeypatch.setattr(costs, "_milliseconds", lambda model, block, args, kwargs, form: float(args[0].shape[-1]))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), Basic(8, 8), Basic(8, 8), nn.AvgPool2d(2), Basic(8, 8)).eval()
    found = find_blocks(model, image(2)).removable
    assert costs.milliseconds(model, image(2), found) == {"2": 16.0, "3": 16.0, "5": 8.0}


class Keys:
    """What a decoder hands from call to call: the keys of each layer so far."""

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        before = self.layers.get(layer)
        self.layers[layer] = keys if before is None else torch.cat([before, keys], 1)
        return self.layers[layer]


class Attending(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.keys = number, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Keys) -> torch.Tensor:
        keys = cache.update(self.number, self.keys(x))
        return x + torch.softmax(x @ keys.mT, -1) @ keys


class Decoder(nn.Module):
    """A decoder that makes its cache itself, as those of Hugging Face with `use_cache=True` do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending(number) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Keys()
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


def test_blocks_are_timed_with_the_cache_as_they_got_it(monkeypatch, caplog) -> None:
    """Once for all of them, with as many keys as positions in each of the calls in a row."""
    rows, counts, update = [], [], Keys.update

    def export(row, path, inputs, **settings):
        for _ in range(2):
            row(*inputs)
        rows.append(row)

    def counted(cache: Keys, layer: int, keys: torch.Tensor) -> torch.Tensor:
        counts.append(update(cache, layer, keys).shape[1])
        return cache.layers[layer]

    monkeypatch.setattr(Keys, "update", counted)
    monkeypatch.setattr(costs, "export_onnx", export)
    monkeypatch.setattr(costs, "latency", lambda files, inputs, seconds: (1.0, 4.0))
    model, x = Decoder().eval(), (torch.randn(2, 5, 8),)
    assert costs.milliseconds(model, x, find_blocks(model, x).removable) == {f"blocks.{n}": 1.0 for n in range(3)}
    assert not caplog.text
    assert len(rows) == 2
    assert set(counts) == {5}


def test_random_numbers_are_left_as_they_were() -> None:
    """The proof runs the model in train mode, where its dropout draws some."""
    model, inputs = build(Transformer), image(2)
    before = torch.get_rng_state()
    assert plan_blocks(model, inputs, blocks=1, importance=importance.influence, **MACS).blocks
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_is_for_blocks_of_its_sizes() -> None:
    plan, wider = plan_blocks(build(ResNet), image(2), blocks=("layer1.1",), **MACS), ResNet(width=10)
    with pytest.raises(ModelError, match=r"layer1.1.*: the plan was made for shape \(8, 8, 3, 3\), this ResNet has \(10, 10"):
        plan.apply_(wider)


def test_a_relu_that_would_change_other_inputs_keeps_its_block() -> None:
    """The example alone, of pixels that are all positive, does not show it."""
    torch.manual_seed(0)
    model = nn.Sequential(ClippedBlock(), nn.Linear(16, 3)).eval()
    with pytest.raises(ModelError, match="it has 0: its input is not what is left with its branch at zero, .* where a ReLU"):
        plan_blocks(model, torch.rand(8, 16), blocks=("0",), importance=importance.influence, **MACS)


def test_a_budget_of_files_is_met_as_measured(monkeypatch) -> None:
    """Counted, two blocks are enough; the file has something beside the parameters."""
    model = build(ResNet)

    def share_of(small: nn.Module) -> float:
        return ck.count_parameters(small) / ck.count_parameters(model)

    class Measured:
        def __init__(self, *_) -> None:
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def measure(self, small):
            return share_of(small) + 0.03, str(share_of(small) + 0.03)

    monkeypatch.setitem(order_blocks.__globals__, "ExportedCandidates", Measured)
    settings = {"importance": importance.influence, **MACS}
    kept = share_of(plan_blocks(model, image(2), blocks=2, **settings).apply_(copy.deepcopy(model))) + 0.01
    plan = plan_blocks(model, image(2), ck.keep(bytes=kept), **settings)
    assert len(plan.blocks) == 3
    assert float(plan.note) <= kept
