"""The quantized model: a captured graph with quantizers that is calibrated, trained, and exported.

calibrate_(batches)                    find the ranges of activations, then round
unfold_batchnorm_(), ... convert_()    quantization-aware training in between
deployed()                             the form that is exported
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.base.inputs import AnyInputs, call_checked, call_inputs, check_constants, each_inputs
from compresskit.base.packing import attribute_state, set_attribute_state_
from compresskit.base.task import Inputs, batch_size, call, shapes_of
from compresskit.graph.capture import Captured
from compresskit.graph.layers.fold_batchnorm import FoldedScales
from compresskit.graph.masks import masks_of
from compresskit.graph.quantized import QuantizedModule
from compresskit.graph.rewrites.fp32_parts import CastNodes, drop_casts_
from compresskit.graph.rewrites.reserved_names import rename_first
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.numerics.observers import KnownRange, MovingAverage, Observer, observed_ends, set_observed_ends_
from compresskit.quant.numerics.quantizers import ActivationQuantizer, BiasQuantizer, Quantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import LEARNED_DOWN_TO
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.insert import stored_roundings
from compresskit.quant.passes.lower_to_onnx import deploy
from compresskit.quant.passes.placement import Placement
from compresskit.quant.passes.prepare_graph import Origin
from compresskit.quant.passes.quantizer_names import check_reached, quantizers_of
from compresskit.quant.passes.rounding_boundaries import nudge_scales_
from compresskit.quant.passes.unfold_batchnorm import UnfoldedLayer, conv_bn_layers, fold_conv_bn_, unfold_batchnorm_, units_of

#: Entries of the state dict of a model that is trained: switches of observers and of BatchNorm statistics, ends of ranges.
OBSERVING, TRACKING, ENDS = "qat_observing", "qat_tracking", "qat_ends"
log = logging.getLogger(__name__)
CALIBRATION_BYTES = 2**24  # of the largest activation that calibration computes at once


class Quantized(QuantizedModule):
    """A model whose activations, weights and biases are rounded as the target's runtime rounds them.

    It is called like the float model it was made from, and trains like any module: gradients pass straight through the rounding.

    body: the captured graph with its quantizers.
    target: the runtime it was quantized for.
    placement: which operators run in integers, and why the others do not.
    origin: what it was made from.
    """

    def __init__(
        self,
        captured: Captured,
        target: Target,
        placement: Placement,
        origin: Origin,
        folds: Sequence[FoldedScales] = (),
        float_modules: Mapping[str, type[nn.Module]] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.body = captured.module
        self._folds, self._renamed = list(folds), captured.renamed
        self._trains = False
        self.target, self.placement, self.origin = target, placement, origin
        self.float_modules, self.float_tensors = dict(float_modules or {}), list(origin.structure["tensors"])
        self.tied, self.names_of_args = dict(tied or {}), captured.parameters
        self.example, self.dynamic, self.varying = captured.example, captured.dynamic, captured.varying
        self.input_shapes = _open(shapes_of(captured.example), captured.varying)
        largest = max(math.prod(shape) for shape in captured.shapes.values())
        self.row_bytes = max(1, 4 * largest // batch_size(captured.example))

    @property
    def target_name(self) -> str:
        """Name of the runtime that it was quantized for."""
        return self.target.name

    @property
    def float_class(self) -> str:
        """Name of the class of the float model that it was made from."""
        return self.origin.float_class

    @property
    def opset(self) -> int:
        """Version of the ONNX operator set that its file is written in, where the user names none."""
        narrow = [bits for bits in self._weight_bits() if self.stores_few_bits]
        wide = [q.scheme.bits for q in self.activation_quantizers() if q.scheme.bits > 8]
        of_bits = {2: 25 if self.reads_int2 else 21, 3: 21, 4: 21}
        narrow_opsets = (of_bits.get(bits, 18) for bits in narrow if bits <= 6)
        needed = max([21] * bool(wide) + list(narrow_opsets), default=0)
        return max(self.target.opset, needed)

    @property
    def stores_few_bits(self) -> bool:  # type: ignore[override]  # of the base, a constant
        """Whether weights of up to 6 bits are stored packed."""
        return self.target.few_bits and min(self._weight_bits(), default=8) <= 6

    def _weight_bits(self) -> list[int]:
        return [q.scheme.bits for q in self.quantizers() if isinstance(q, WeightQuantizer)]

    @property
    def tuned(self) -> bool:
        """Whether its file is rewritten for the integer kernels of ONNX Runtime on x86."""
        return self.target.tuned

    @property
    def in_onnxruntime(self) -> bool:
        """Whether ONNX Runtime runs its file with its own kernels, so that the file is rewritten for its fusions."""
        return self.target.onnxruntime

    @property
    def runtime(self) -> str:
        """Package of the runtime that executes its file: "onnxruntime", "openvino" or "tensorrt"."""
        return self.target.runtime

    @property
    def prepared_for(self) -> Target:
        """The target by whose operators its graph was rewritten; see `prepare_graph`."""
        return self.target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = call_inputs(self, args, kwargs, f"quantized {self.float_class}")
        self.check_inputs(inputs)
        return call(self.body, inputs)

    def extra_repr(self) -> str:
        coverage = str(self.placement.coverage).splitlines()[0]
        return f"{self.float_class} for {self.target_name}, {coverage}"

    def check_inputs(self, inputs: Inputs) -> None:
        """Raise ModelError for a batch of another shape, or other flags, than the model was captured with."""
        order = self.example if isinstance(self.example, dict) else self.names_of_args[: len(self.example)]
        if isinstance(inputs, dict) and inputs.keys() == set(order):
            inputs = {name: inputs[name] for name in order}  # in whatever order they were given
        check_constants(inputs, self.example, self.names_of_args, f"quantized {self.float_class}")
        given = shapes_of(inputs)
        if _open(given, self.varying) != self.input_shapes:
            raise ModelError(
                f"quantized {self.float_class}: wanted inputs {self.input_shapes}, got {given}; it was captured with the"
                " shapes of the example (quantize with dynamic=(0, 2, 3) to let more than the batch vary)"
            )

    def __reduce__(self) -> NoReturn:
        # torch.fx would trace the graph again where it is loaded, and fail there, or lose the shapes of its values.
        raise ModelError(
            f"quantized {self.float_class}: torch.save of a whole model, or sending it to another process, cannot restore its"
            " graph; take ck.save(model, folder) and ck.load(float model of its class, folder), or torch.save of its state_dict()"
        )

    def __copy__(self) -> Self:
        return self._of_state(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = new = self._of_state({})
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _of_state(self, state: dict[str, Any]) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(state)
        return new

    # -- quantizers

    def quantizers(self) -> list[Quantizer]:
        """All quantizers, each once."""
        return quantizers_of(self.body)

    def activation_quantizers(self) -> list[ActivationQuantizer]:
        """The quantizers of activations, each once."""
        return [q for q in self.quantizers() if isinstance(q, ActivationQuantizer)]

    def enable_(self, on: bool = True) -> None:
        """Switch all quantizers on, or let every value pass in float."""
        for quantizer in self.quantizers():
            quantizer.enabled = on

    @contextmanager
    def float_activations(self) -> Iterator[None]:
        """Inside the block activations pass in float, while weights are rounded."""
        quantizers = [quantizer for quantizer in self.quantizers() if quantizer.enabled]
        for quantizer in quantizers:
            quantizer.pass_activations_()
        try:
            yield
        finally:
            for quantizer in quantizers:
                quantizer.pass_activations_(False)

    def check_rounds(self, where: str) -> None:
        """Raise ModelError, which begins with `where`, where a quantizer is switched off: its file rounds all the same."""
        if off := sum(not quantizer.enabled for quantizer in self.quantizers()):
            raise ModelError(
                f"{where}: quantized {self.float_class}: {off} of its {len(self.quantizers())} quantizers are switched off, but"
                " its file rounds; call enable_() first, or take the float model"
            )

    def observe_(self, on: bool, observer: Callable[[], Observer] | None = None) -> None:
        """Let the ranges of activations follow the values that pass, or stop that.

        observer: makes a new observer for each activation, which starts from its present range; None keeps the observers. Those
            of a known range stay.
        """
        for quantizer in self.activation_quantizers():
            quantizer.observing = on
            if observer is not None and not isinstance(quantizer.observer, KnownRange):
                fresh = observer()
                low = (quantizer.scheme.low - quantizer.zero_point) * quantizer.scale
                high = (quantizer.scheme.high - quantizer.zero_point) * quantizer.scale
                fresh.update(torch.stack([low, high]).reshape(1, 2))
                quantizer.observer = fresh

    def check_weights(self) -> None:
        """Raise ModelError for weights of a dtype that no runtime multiplies beside fp32 scales."""
        for name, value in self.body.named_parameters():
            if value.dtype in (torch.float16, torch.float64):
                raise ModelError(
                    f"quantized {self.float_class}: wanted fp32 weights to export, but {name} is {value.dtype}; export"
                    " model.float(), or leave half() and double() out"
                )

    # -- calibration

    def calibrate_(self, batches: Iterable[AnyInputs], *, through: nn.Module | None = None) -> None:
        """Find the ranges of activations: run batches in float while observers watch, then round from now on.

        batches: inputs, tuples or dicts.
        through: the model that this one is a part of, where the batches are inputs of the whole.
        """
        self.enable_(False)
        self.observe_(True)
        model = self if through is None else through
        with torch.no_grad(), mode(model, training=False):  # not inference_mode: what a model caches must stay trainable
            for inputs in each_inputs(batches, "calibration data"):
                for rows in self._split_batch(inputs) if through is None else [inputs]:
                    call_checked(model, rows, "calibration data")
        self.observe_(False)
        check_reached(self.body, self.placement.layers)
        for quantizer in self.activation_quantizers():
            quantizer.freeze_range_(checked=True)
        self.fit_weight_scales_()
        self.enable_()

    def fit_weight_scales_(self) -> None:
        """Fit the scales of weights to the present ranges of activations: undo nudges, and make room for the biases."""
        for node in self.body.graph.nodes:
            rounding = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(rounding, WeightQuantizer):
                rounding.scale_factor.fill_(1)
                rounding.forget_correction_()
        self.make_room_for_biases_()

    def make_room_for_biases_(self) -> None:
        """Enlarge the scales of weights with which a bias, in whole steps, would not fit in int32."""
        for rounding, bias, _ in self._rounded_biases():
            rounding.make_room_(bias)

    def _biases_fit(self) -> bool:
        """Whether int32 holds every bias."""
        return all(rounding.fits(bias, weight) for rounding, bias, weight in self._rounded_biases())

    def _rounded_biases(self) -> Iterator[tuple[BiasQuantizer, Tensor, Tensor]]:
        """The quantizer of each bias, with the bias and the weight of its layer; none of an `UnfoldedLayer`."""
        for node in self.body.graph.nodes:
            rounding = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(rounding, BiasQuantizer):
                bias, weight = (get_tensor(self.body, given.target) for given in node.args)
                yield rounding, bias, weight

    def _split_batch(self, inputs: Inputs) -> list[Inputs]:
        """A batch in parts small enough that the allocator hands the same memory out again and again.

        ResNet-50, 64 images of 224 x 224 on two threads: 5.3 s in fours, 11.3 s at once, half of it in page faults. An observer
        that averages over batches sees them whole.
        """
        sizes = {v.shape[0] if v.ndim else 0 for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)}
        averages = any(isinstance(quantizer.observer, MovingAverage) for quantizer in self.activation_quantizers())
        if len(sizes) != 1 or averages or not all(0 in dims for dims in self.varying):
            return [inputs]
        size, rows = sizes.pop(), max(1, CALIBRATION_BYTES // self.row_bytes)
        cuts = [slice(start, start + rows) for start in range(0, size, rows)]
        return [pytree.tree_map(lambda v, cut=cut: v[cut] if isinstance(v, Tensor) else v, inputs) for cut in cuts] or [inputs]

    # -- quantization-aware training

    def unfold_batchnorm_(self, *, learned: bool = False, offsets: bool = False) -> None:
        """Make ready for training: folded BatchNorms and scales become modules again (see `ConvBN`, `UnfoldedLayer`).

        learned: scales become parameters (LSQ). offsets: zero points, too (LSQ+). `freeze_statistics_` and `convert_` end the
            training.
        """
        unfold_batchnorm_(self.body, self._folds)
        self._folds, self._trains = [], True
        if learned:
            for quantizer in self.activation_quantizers():
                quantizer.learn_(offset=offsets)
            units = units_of(self.body)
            for rounding, weight in self.rounded_weights():
                rounding.learn_(weight, unit=units.get(rounding))

    def freeze_statistics_(self) -> None:
        """Freeze BatchNorm statistics and stop the observers of activations; learned scales go on learning."""
        self.observe_(False)
        for layer in conv_bn_layers(self.body):
            layer.tracking = False

    def convert_(self) -> None:
        """Finish the training: fold BatchNorm, freeze scales, and nudge scales away from rounding boundaries."""
        self._warn_of_lost_scales()
        self._fold_()
        nudge_scales_(self.body)
        self.keep_masked_()

    def converted(self) -> Self:
        """The model itself, or, while it is trained, a copy that computes the same with BatchNorm folded and scales frozen.

        It is a copy with larger scales of weights, too, where a bias was changed so much that it does not fit in int32. Scales
        are moved away from rounding boundaries only by `convert_`.
        """
        learned = any(True for quantizer in self.quantizers() for _ in quantizer.parameters())
        if not self._trains and not conv_bn_layers(self.body) and not learned and self._biases_fit():
            return self
        other = copy.deepcopy(self)
        other._fold_()
        other.keep_masked_()
        return other

    def _fold_(self) -> None:
        """Fold BatchNorm and freeze scales; in eval mode the model computes the same, unless a bias needs a larger scale."""
        drop_casts_(self.body)
        self.freeze_statistics_()
        self._trains = False
        learned = [(q, w) for q, w in self.rounded_weights() if q.ratio is not None]
        for quantizer, weight in learned:
            quantizer.learn_(weight, on=False)
        for activation in self.activation_quantizers():
            if activation.ratio is not None:
                activation.learn_(on=False)
        fold_conv_bn_(self.body)
        self.make_room_for_biases_()

    def _warn_of_lost_scales(self) -> None:
        """Say which learned scales were trained down to the least that they may be."""
        kinds = (ActivationQuantizer, WeightQuantizer)
        lost = [
            q.label if isinstance(q, ActivationQuantizer) else name.rpartition(".")[2]
            for name, q in self.body.named_modules()
            if isinstance(q, kinds) and q.ratio is not None and bool((q.ratio < LEARNED_DOWN_TO).any())
        ]
        if lost:
            log.warning(
                "quantized %s: learned scales fell below %g of their first values, where they are kept, and which cuts larger"
                " values: %s; train with a smaller learning rate, at least of the scales, or with learned=False",
                self.float_class,
                LEARNED_DOWN_TO,
                ", ".join(lost),
            )

    def balance_weights_(self) -> None:
        """Round weights whose scale the kernel's pairs made larger such that errors cancel, see `WeightQuantizer.balance_`."""
        with torch.no_grad():
            for rounding, weight in self.rounded_weights():
                rounding.balance_(weight)

    def keep_masked_(self) -> None:
        """Let no weight that a pruning mask keeps be rounded to zero: it becomes one step of its grid.

        The zeros that are stored are then those of the masks, no more and no fewer.
        """
        masks = masks_of(self.body)
        for rounding, name in stored_roundings(self.body):
            if masks is not None and name in masks.masks:
                with torch.no_grad():
                    rounding.keep_nonzero_(get_tensor(self.body, name), masks.masks[name])

    def rounded_weights(self) -> list[tuple[WeightQuantizer, Tensor]]:
        """Weight quantizers and the tensors that they round, each once."""
        weights: dict[WeightQuantizer, Tensor] = {}
        for quantizer, node, name in self._weight_calls():
            weights[quantizer] = get_tensor(self.body, name).detach()
            if isinstance(module := self.body.get_submodule(node.target), UnfoldedLayer):
                weights[quantizer] = module.folded_at(self.body, node)[0]
        return list(weights.items())

    def _weight_calls(self) -> Iterator[tuple[WeightQuantizer, Any, str]]:
        """Each call of a weight's quantizer: the quantizer, the node, and the name of the weight in the graph."""
        for node in self.body.graph.nodes:
            module = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(module, WeightQuantizer):
                yield module, node, str(node.args[0].target)
            elif isinstance(module, UnfoldedLayer) and (quantizer := module.rounding_of(node)[0]) is not None:
                yield quantizer, node, str(node.args[1].target)

    # -- names of the float model

    def float_names(self) -> dict[str, str]:
        """Name of each parameter and buffer here -> the name that the float model has it under.

        Learned scales are named after what they scale: that of `layer1.0.weight` is `layer1.0.weight_scale`, that of an
        activation `layer1.1.relu_scale`.
        """
        tensors = [*self.body.named_parameters(remove_duplicate=False), *self.body.named_buffers(remove_duplicate=False)]
        names = {f"body.{name}": rename_first(name, self._renamed) for name, _ in tensors}
        weights: dict[Any, str] = {quantizer: rename_first(name, self._renamed) for quantizer, _, name in self._weight_calls()}
        taken = set(names.values())
        for path, quantizer in self.body.named_modules():
            if not isinstance(quantizer, ActivationQuantizer | WeightQuantizer):
                continue
            of = weights.get(quantizer) or self._activation_name(path, quantizer)
            for leaf, word in (("ratio", "scale"), ("offset", "offset")):
                if f"body.{path}.{leaf}" in names and f"{of}_{word}" not in taken:
                    names[f"body.{path}.{leaf}"] = f"{of}_{word}"
        return names

    def _activation_name(self, path: str, quantizer: ActivationQuantizer | WeightQuantizer) -> str:
        label, own = "" if isinstance(quantizer, WeightQuantizer) else quantizer.label, path.rpartition(".")[2]
        module = label.removeprefix("input of ")
        return f"{module}.{own}" if module and module in self.float_modules else own

    def keep_fp32_(self, modules: Collection[str], half: torch.dtype) -> CastNodes:
        """Let operators of modules of the float model compute in fp32 beside half ones, until `remove()` of what is returned.

        modules: dotted names, of which `float_names` are the tensors. half: dtype of all others.
        """
        named = [(here.removeprefix("body."), there) for here, there in self.float_names().items()]
        tensors = {here for here, there in named if any(not m or there.startswith(f"{m}.") for m in modules)}
        return CastNodes(self.body, modules, tensors, half)

    # -- resuming, export

    def resume_state(self) -> dict[str, Any]:
        """Training state that is not in the state dict: switches, and what the observers keep."""
        return {
            "activations": [
                {"observing": q.observing, "observer": attribute_state(q.observer)} for q in self.activation_quantizers()
            ],
            "enabled": [q.enabled for q in self.quantizers()],
            "tracking": [layer.tracking for layer in conv_bn_layers(self.body)],
        }

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Restore what `resume_state` returned for a model that was quantized alike."""
        for activation, saved in zip(self.activation_quantizers(), state["activations"], strict=True):
            activation.observing = saved["observing"]
            set_attribute_state_(activation.observer, saved["observer"])
        for quantizer, enabled in zip(self.quantizers(), state["enabled"], strict=True):
            quantizer.enabled = enabled
        for layer, tracking in zip(conv_bn_layers(self.body), state["tracking"], strict=True):
            layer.tracking = tracking

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """While it is trained, also the ends of ranges and switches, so that a loaded state goes on as the saved one would."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._trains:
            activations, layers = list(self.activation_quantizers()), conv_bn_layers(self.body)
            ends = [observed_ends(q.observer) for q in activations]
            destination |= {
                f"{prefix}{OBSERVING}": torch.tensor([q.observing for q in activations], dtype=torch.bool),
                f"{prefix}{TRACKING}": torch.tensor([layer.tracking for layer in layers], dtype=torch.bool),
                f"{prefix}{ENDS}": torch.tensor(ends, dtype=torch.float32).reshape(-1, 2),
            }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        observing, tracking, ends = (state_dict.pop(f"{prefix}{name}", None) for name in (OBSERVING, TRACKING, ENDS))
        if self._trains and observing is not None:
            activations, layers = list(self.activation_quantizers()), conv_bn_layers(self.body)
            if len(activations) == len(observing) and len(layers) == len(tracking):  # else what differs is named by torch
                for quantizer, switch, (low, high) in zip(activations, observing.tolist(), ends, strict=True):
                    quantizer.observing = switch
                    set_observed_ends_(quantizer.observer, low, high)
                for layer, switch in zip(layers, tracking.tolist(), strict=True):
                    layer.tracking = switch
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: QuantizeLinear and DequantizeLinear, weights and biases stored as integers."""
        self.check_weights()
        self.check_rounds("export")
        saturating = {point.node for point in self.placement.points if point.saturates}
        hardsigmoids = {name: name in saturating for name, kind in self.placement.integer.items() if kind == "hardsigmoid"}
        return deploy(self.converted().body, hardsigmoids)


def _open(shapes: list[tuple[int, ...]], varying: tuple[tuple[int, ...], ...]) -> list[tuple[int | str, ...]]:
    """Shapes with `"N"` for the batch and `"any"` for other dimensions that may vary."""
    free = [*varying, *[()] * (len(shapes) - len(varying))]
    return [
        tuple(("any" if i else "N") if i in dims else n for i, n in enumerate(shape))
        for shape, dims in zip(shapes, free, strict=False)
    ]
