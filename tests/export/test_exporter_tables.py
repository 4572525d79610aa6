"""The exporter's tables are built once and stay torch's own outside of an export."""

from __future__ import annotations

import checkout
import onnx
import onnxruntime
import pytest
import torch
from onnxscript.rewriter import _rewrite_rule
from torch import nn
from torch.onnx._internal.exporter import _registration

import compresskit as ck
from compresskit.export.exporter_tables import quick_exporter

REGISTRY = _registration.ONNXRegistry


def test_translations_are_built_once_and_given_as_copies(monkeypatch) -> None:
    calls: list[int] = []

    def build(opset_version: int = 18):
        calls.append(opset_version)
        registry = REGISTRY()
        registry.functions = {"aten::relu": ["torch's own"]}
        return registry

    monkeypatch.setattr(REGISTRY, "from_torchlib", build)
    for _ in range(2):
        with quick_exporter():
            registry = REGISTRY().from_torchlib(opset_version=20)
            assert registry.functions == {"aten::relu": ["torch's own"]}
            registry.functions["aten::relu"].insert(0, "a user's")  # as the exporter does with a custom translation
            registry.functions["aten::gelu"] = ["a user's"]
    assert calls == [20]
    with quick_exporter():
        REGISTRY().from_torchlib(opset_version=23)
    assert calls == [20, 23]


def test_rules_are_tried_only_at_the_operator_that_they_end_in(monkeypatch) -> None:
    tried: list[tuple[str, str]] = []
    plain = _rewrite_rule.RewriteRule.try_rewrite

    def noted(rule, model, graph, node, **settings):
        tried.append((rule._target_pattern.output_nodes[0].op_type, node.op_type))
        return plain(rule, model, graph, node, **settings)

    monkeypatch.setattr(_rewrite_rule.RewriteRule, "try_rewrite", noted)

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * 1.0) + 2

    with quick_exporter():
        program = torch.onnx.export(Scaled().eval(), (torch.randn(2, 3),), dynamo=True, verbose=False)
    assert tried
    assert not {(pattern, operator) for pattern, operator in tried if pattern != operator}
    assert "Mul" not in {node.op_type for node in program.model.graph}, "a rule that fits is applied"


def test_torch_is_as_it_was_after_a_failure() -> None:
    before = vars(REGISTRY)["from_torchlib"]
    with pytest.raises(ValueError, match="in the exporter"), quick_exporter():
        assert vars(REGISTRY)["from_torchlib"] is not before
        raise ValueError("in the exporter")
    assert vars(REGISTRY)["from_torchlib"] is before


def test_a_release_without_these_internals_exports_as_before(monkeypatch) -> None:
    monkeypatch.delattr(REGISTRY, "from_torchlib")
    with quick_exporter():
        assert "from_torchlib" not in vars(REGISTRY)


def test_the_first_export_of_a_process_is_as_quick_as_the_next() -> None:
    """Its parts of torch are not imported yet then."""
    code = (
        "import sys; from compresskit.export.exporter_tables import quick_exporter;"
        "name = 'torch.onnx._internal.exporter._fx_passes'; assert name not in sys.modules;"
        "exec('with quick_exporter():\\n    print(sys.modules[name].decompose_with_registry.__module__)')"
    )
    assert checkout.python("-c", code).stdout.strip() == "compresskit.export.decompositions"


class Epsilon(nn.Module):
    """Numbers that are nearly 0 and nearly 1, which rules for nothing take for 0 and 1 unless told otherwise."""

    def forward(self, x):
        shares = x / (x.norm(dim=1, keepdim=True) + 1e-8)
        return shares, torch.log(x.relu() + 1e-12), (x - 1e-10) * 1e10, x * 1.000001, (x + 0) * 1 / 1


def test_small_numbers_stay_in_a_file(tmp_path) -> None:
    model, x = Epsilon(), (torch.randn(4, 4),)
    path = ck.export_onnx(model, tmp_path / "f.onnx", x)
    zeros = (torch.zeros(3, 4),)
    assert ck.verify_onnx(path, model, [x, zeros]).passed
    wanted, got = model(*zeros), onnxruntime.InferenceSession(path).run(None, {"x": zeros[0].numpy()})
    for value, array in zip(wanted, got, strict=True):
        torch.testing.assert_close(torch.from_numpy(array), value)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert (kinds.count("Add"), kinds.count("Sub"), kinds.count("Div")) == (2, 1, 1)  # adding 0 and dividing by 1 are left out
