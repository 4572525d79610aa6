"""What a quantized model has besides its forward pass: its quantizers, switches, and the way into training and out of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from compresskit.base.packing import attributes, set_attributes_
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.observers import Observer
from compresskit.quant.numerics.quantizers import ActivationQuantizer, Quantizer, WeightQuantizer
from compresskit.quant.passes.avoid_ties import avoid_ties_
from compresskit.quant.passes.fold_batchnorm import Folded
from compresskit.quant.passes.live_batchnorm import LiveLayer, live_, live_layers, settle_


class Trainable(nn.Module):
    """A captured graph with quantizers, `body`, that can be trained and settled."""

    def __init__(self, body: fx.GraphModule, folds: Sequence[Folded] = ()) -> None:
        super().__init__()
        self.body = body
        self._folds = list(folds)

    def quantizers(self) -> list[Quantizer]:
        """All quantizers, each once."""
        return [q for q in self.body.get_submodule("quantizers").children() if isinstance(q, Quantizer)]

    def activation_quantizers(self) -> list[ActivationQuantizer]:
        """Those of activations."""
        return [q for q in self.quantizers() if isinstance(q, ActivationQuantizer)]

    def enable_(self, on: bool = True) -> None:
        """Round, or let everything pass in float."""
        for quantizer in self.quantizers():
            quantizer.enabled = on

    def observe_(self, on: bool, observer: Callable[[], Observer] | None = None) -> None:
        """Let the ranges of activations follow what passes, from a new observer where one is given, or hold still."""
        for quantizer in self.activation_quantizers():
            quantizer.observing = on
            if observer is not None:
                fresh = observer()
                low = (quantizer.scheme.low - quantizer.zero_point) * quantizer.scale
                high = (quantizer.scheme.high - quantizer.zero_point) * quantizer.scale
                fresh.update(torch.stack([low, high]).reshape(1, 2))
                quantizer.observer = fresh

    def live_(self, *, learned: bool = False) -> None:
        """Make ready for training: folded BatchNorms come back to life (see `live`), and, where `learned`, scales become
        parameters (LSQ). `hold_` and `settle_` end it.
        """
        live_(self.body, self._folds)
        self._folds = []
        if learned:
            for quantizer in self.activation_quantizers():
                quantizer.learn_()
            for rounding, weight in self._weights():
                rounding.learn_(weight)

    def hold_(self) -> None:
        """Ranges and BatchNorm statistics hold still from now on; learned scales go on learning."""
        self.observe_(False)
        for layer in live_layers(self.body):
            layer.following = False

    def settle_(self) -> None:
        """End of the training: fold what is alive, fix what was learned, hold everything still, off ties (see `ties`)."""
        self._fold_()
        avoid_ties_(self.body)
        self.keep_masked_()

    def _fold_(self) -> None:
        """Fold what is alive, fix what was learned; in eval mode it computes what it did, unless a bias needs room."""
        self.hold_()
        learned = [(q, w) for q, w in self._weights() if isinstance(q.scale, nn.Parameter)]
        for quantizer, weight in learned:
            quantizer.learn_(weight, on=False)
        for activation in self.activation_quantizers():
            if isinstance(activation.scale, nn.Parameter):
                activation.learn_(on=False)
        settle_(self.body)

    def keep_masked_(self) -> None:
        """Let no weight that a mask keeps round to zero: it becomes one step of its grid, so that the zeros that are stored are
        those of the masks, no more and no fewer.
        """
        masks = masks_of(self.body)
        for node in self.body.graph.nodes if masks is not None else ():
            rounding = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(rounding, WeightQuantizer) and masks is not None and str(node.args[0].target) in masks.masks:
                with torch.no_grad():
                    rounding.keep_(get_tensor(self.body, node.args[0].target), masks.masks[str(node.args[0].target)])

    def settled(self) -> Self:
        """The model itself, or, where it is still being trained, a copy that computes the same without what training
        needs; off ties are only models that `settle_` ended.
        """
        if not live_layers(self.body) and not any(name.startswith("body.quantizers.") for name, _ in self.named_parameters()):
            return self
        other = copy.deepcopy(self)
        other._fold_()
        other.keep_masked_()
        return other

    def resume_state(self) -> dict[str, Any]:
        """Switches, and what the observers have seen."""
        return {
            "activations": [{"observing": q.observing, "observer": attributes(q.observer)} for q in self.activation_quantizers()],
            "enabled": [q.enabled for q in self.quantizers()],
            "following": [layer.following for layer in live_layers(self.body)],
        }

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Take over what `resume_state` gave of a model that was quantized alike."""
        for activation, saved in zip(self.activation_quantizers(), state["activations"], strict=True):
            activation.observing = saved["observing"]
            set_attributes_(activation.observer, saved["observer"])
        for quantizer, enabled in zip(self.quantizers(), state["enabled"], strict=True):
            quantizer.enabled = enabled
        for layer, following in zip(live_layers(self.body), state["following"], strict=True):
            layer.following = following

    def _weights(self) -> list[tuple[WeightQuantizer, Tensor]]:
        """Weight quantizers and what they round, each once."""
        found: dict[WeightQuantizer, Tensor] = {}
        for node in self.body.graph.nodes:
            module = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(module, WeightQuantizer):
                found[module] = get_tensor(self.body, node.args[0].target).detach()
            elif isinstance(module, LiveLayer) and module.rounding[0] is not None:
                weight, bias = (None if a is None else get_tensor(self.body, a.target).detach() for a in node.args[1:])
                assert weight is not None
                found[module.rounding[0]] = module.folded(weight, bias)[0].detach()
        return list(found.items())
