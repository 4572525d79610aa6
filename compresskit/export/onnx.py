"""Write a model as an ONNX file: capture, torch's exporter, graph rewrites, metadata."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from compresskit.base.errors import ExportError, SettingError, named_first_line
from compresskit.base.files import absolute_path
from compresskit.base.inputs import AnyInputs, as_inputs
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs
from compresskit.base.version import __version__
from compresskit.export.computed_weights import with_stored_results
from compresskit.export.exporter_tables import quick_exporter
from compresskit.export.files import KEY, write_model
from compresskit.export.merged_program import merged_program
from compresskit.export.ops.translations import translations
from compresskit.export.rewrite.dtypes import check_kernels, least_precise_dtype, store_bf16_, transpose_in_fp32_, widen_to_fp32
from compresskit.export.rows_without_keys import keep_rows_without_keys_
from compresskit.graph.capture import Dynamic, check_runs, inputs_inside, trace, warn_of_state
from compresskit.graph.masks import check_removed_are_zero
from compresskit.graph.normalize import source_line
from compresskit.graph.quantized import is_quantized, quantized_parts
from compresskit.graph.rewrites.exportable import drop_constant_outputs_, refuse_weights_of_samples
from compresskit.graph.surgery import call_unmoved, check_is_module, copy_model, mode, state_kept, unset_buffers_kept
from compresskit.graph.tracing import log_level, one_thread_traces

log = logging.getLogger(__name__)

OPSETS = range(13, 26)  # 13: the first whose QuantizeLinear has a scale for each channel; 25: the first with int2
EXPORTED = 18  # the oldest opset that torch's exporter writes; for older ones its graph is rewritten
EXPORTED_LAST = 23  # the newest
Opset = int | Literal["lowest"]


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example: AnyInputs,
    *,
    opset: Opset | None = None,
    dynamic: Dynamic | None = None,
    inside: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model to an ONNX file with torch's exporter (`dynamo=True`). Threads that export take turns.

    Args:
        model: a float module, a quantized one of this library, or a module with quantized submodules; weights are stored as they
            are quantized. A bf16 model is written with bf16 weights and computes in fp32; an fp16 model stays fp16. Layers of a
            float model that compute one linear function are one in the file (`graph.layers.merge_layers`).
        path: of the file; an existing one is replaced only once the new one is complete. Past 2 GB the weights go to
            `<path>.data`, and an existing file is removed before its weights are replaced: a killed process leaves none.
        example: inputs of the model, a tuple or a dict; a dict names the inputs of the file. Outputs of the model that are no
            tensors (None, numbers, text) are left out of the file.
        opset: version of ONNX's operators, 13 to 25, or "lowest" for the lowest that the operators of the file have a form in,
            which the oldest runtimes read; None takes that of a quantized model's target, or what its types need, else 20.
        dynamic: dimensions of the inputs that may vary: `(0, 2, 3)` for batch, height and width of every input, or names for
            those of each, `{"x": {0: "batch", 2: "height"}}`; `()` for none. None takes the batch; for a quantized model, the
            dimensions that it was quantized with.
        inside: dotted name of a submodule; it alone is exported, with the inputs that it receives when the model runs.
        metadata: key-value pairs to store in the file, beside the entries of this library; see `read_metadata`.

    Returns:
        The absolute path of the file.

    Raises SettingError for a bad opset, metadata that are no texts, or swapped arguments, ModelError where the model cannot be
    captured or masked weights are not 0, ExportError where an operator has no translation or form, or the file cannot be written.
    """
    path = _file_to_write(path)
    check_is_module(model, "export_onnx")
    example = as_inputs(example)
    check_opset(opset, "export_onnx")
    _check_metadata(metadata)
    with progress_bar(total=3, desc="export", unit="step") as bar:
        try:
            if inside:
                with torch.no_grad(), mode(model, training=False):
                    model, example = inputs_inside(model, example, inside)
            dynamic = _varying_dimensions(model) if dynamic is None else dynamic
            file = _file_in_opset(model, example, opset, dynamic, metadata or {})
        except ExportError as error:
            raise ExportError(f"{path.name}: {error}") from error.__cause__
        bar.update(2)
        write_model(file, path)
        bar.update()
    return path


def _file_to_write(path: Any) -> Path:
    """The absolute path of a file. Raises SettingError for what is no path, ExportError where no file can have it."""
    if not isinstance(path, str | Path):
        raise SettingError(
            f"export_onnx: wanted a path as the second argument, got {type(path).__name__}; torch.onnx.export takes the example"
            " first, here it is export_onnx(model, path, example)"
        )
    path = absolute_path(path)
    if not path.parent.is_dir():
        raise ExportError(f"{path}: the folder {path.parent} does not exist")
    if os.path.isdir(path):  # not Path.is_dir, which raises for a name that is too long
        raise ExportError(f"{path}: a folder; wanted the path of a file in it, such as {path / 'model.onnx'}")
    return path


@contextmanager
def _exporting() -> Iterator[None]:
    """Let one thread at a time export inside the block, without what the packages of the exporter log of their internals."""
    with one_thread_traces(), ExitStack() as levels:
        for name in ("torch.onnx", "onnxscript", "onnx_ir"):
            levels.enter_context(log_level(name, logging.ERROR))
        yield


def check_opset(opset: Opset | None, where: str) -> None:
    """Raise SettingError, which begins with `where`, for an opset that no file can be written in."""
    if opset not in (None, "lowest") and (not isinstance(opset, Integral) or isinstance(opset, bool) or opset not in OPSETS):
        raise SettingError(f'{where}(opset=...): wanted {OPSETS.start}..{OPSETS.stop - 1}, "lowest" or None, got {opset!r}')


def _check_metadata(metadata: Any) -> None:
    """Raise SettingError for entries that no file can hold."""
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise SettingError(f'export_onnx(metadata=...): wanted texts by name, {{"author": "..."}}, got {metadata!r:.60}')
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise SettingError(f"export_onnx(metadata={{{name!r:.60}: ...}}): wanted a text, got {value!r:.60}; write str(...)")


@_exporting()
def _file_in_opset(model: nn.Module, example: Inputs, opset: Opset | None, dynamic: Dynamic, metadata: Mapping[str, str]) -> Any:
    """The onnx-ir model in an opset; see `export_onnx`."""
    check_removed_are_zero(model, "export_onnx")
    # They load onnx_ir, which only exporting needs.
    from compresskit.export.ops.blocks import INDICES
    from compresskit.export.rewrite.compact import compact_
    from compresskit.export.rewrite.few_bits import pack_few_bits, raise_opset_
    from compresskit.export.rewrite.opset import check_lowered, first_unknown, lower_opset_, lowest_opset

    def written(version: int, *, pack: bool = True) -> Any:
        exported = min(max(version, EXPORTED), EXPORTED_LAST)
        file = _optimized_file(to_program(model, example, opset=exported, dynamic=dynamic).model, model, dynamic, metadata)
        if pack and (parts := quantized_parts(model).values()):
            ending = "" if any(part.stores_few_bits for part in parts) else INDICES
            pack_few_bits(file, version, ending=ending, int2=all(part.reads_int2 for part in parts))
        if version > exported:
            raise_opset_(file, version)
        return file

    if opset == "lowest":
        file = written(EXPORTED, pack=False)
        version = lowest_opset(file)
        file = written(version) if version > EXPORTED else file
    else:
        version = _default_opset(model) if opset is None else opset
        try:
            file = written(version)
        except ExportError as error:
            # Of an operator that is newer than the opset, torch's exporter says less than we can.
            if version in (EXPORTED, _default_opset(model)) or not (unknown := first_unknown(written(EXPORTED), version)):
                raise
            raise ExportError(unknown) from error
    if (opset is not None and version <= EXPORTED_LAST) or version <= EXPORTED:
        lower_opset_(file, version)
    if version <= EXPORTED:
        check_lowered(file)
    if quantized_parts(model):
        compact_(file)
    return file


def _default_opset(model: nn.Module) -> int:
    """The opset of a quantized model's target, else 20."""
    return max([part.opset for part in quantized_parts(model).values()], default=20)


def _optimized_file(file: Any, model: nn.Module, dynamic: Dynamic, metadata: Mapping[str, str]) -> Any:
    """The onnx-ir model after all rewrites, with named dimensions and metadata."""
    # They load onnx_ir, which only exporting needs.
    from compresskit.export.ops.blocks import pack_nibbles
    from compresskit.export.rewrite.attention import expand_attention_masks, expand_rotary_caches
    from compresskit.export.rewrite.common import optimize_
    from compresskit.export.rewrite.constant_weights import decode_on_loading
    from compresskit.export.rewrite.onnxruntime import CPU_REWRITES, X86_REWRITES
    from compresskit.export.rewrite.onnxruntime.transposed_ends import write_transposed_ends
    from compresskit.export.rewrite.openvino import keep_extremes_apart
    from compresskit.export.rewrite.opset import set_ir_version_
    from compresskit.export.rewrite.slopes import slopes_in_convolutions, write_slopes

    parts = quantized_parts(model).values()
    tuned = any(part.tuned for part in parts)
    if tuned:
        slopes_in_convolutions(file)
    write_slopes(file)
    rewrites = [*X86_REWRITES] if tuned else []
    rewrites += CPU_REWRITES if any(part.in_onnxruntime for part in parts) else ()
    rewrites += [keep_extremes_apart] if any(part.runtime == "openvino" for part in parts) else []
    optimize_(file, [*rewrites, expand_attention_masks, expand_rotary_caches, write_transposed_ends])
    pack_nibbles(file)
    decode_on_loading(file)
    transpose_in_fp32_(file)
    _name_dimensions(file, dynamic)
    check_kernels(file, model)
    if least_precise_dtype(model) is torch.bfloat16:
        store_bf16_(file)
    set_ir_version_(file)
    file.producer_name, file.producer_version = "compresskit", __version__
    file.metadata_props.update({KEY: json.dumps(_model_record(model)), **metadata})
    return file


def _model_record(model: nn.Module) -> dict[str, Any]:
    """Metadata of the model: versions, class, target."""
    about: dict[str, Any] = {"versions": {"compresskit": __version__, "torch": torch.__version__}}
    about["model"] = model.float_class if is_quantized(model) else type(model).__name__
    if targets := sorted({part.target_name for part in quantized_parts(model).values()}):
        about["target"] = ", ".join(targets)
    return about


def to_program(
    model: nn.Module, example: Inputs, *, opset: int | None = None, dynamic: Dynamic | None = None
) -> torch.onnx.ONNXProgram:
    """Run torch's exporter: the ONNX graph before this library's rewrites, and the exported program it was made from."""
    dynamic = _varying_dimensions(model) if dynamic is None else dynamic
    opset = max(EXPORTED, _default_opset(model)) if opset is None else opset
    with _exporting(), torch.no_grad(), mode(model, training=False, tells=False), unset_buffers_kept(model):
        written = check_runs(model, example)
        module, example = widen_to_fp32(deployed(model), example)
        module.eval()
        with state_kept(module, buffers=False):
            program, example = trace(module, example, dynamic)
        warn_of_state(program, module, written)
        program = merged_program(program, model, example, dynamic)
        outputs = output_names(call_unmoved(module, example)[0])  # of the two rows of a trace, not of a whole batch
        refuse_weights_of_samples(program.graph)
        keep_rows_without_keys_(program, opset)
    if dropped := drop_constant_outputs_(program):
        log.warning("%s: outputs that are no tensors are left out of the file: %s", type(model).__name__, ", ".join(dropped))
    from compresskit.export.rewrite.palettes import write_palettes  # these load onnx_ir, which only exporting needs
    from compresskit.export.rewrite.recurrent import write_recurrent

    try:
        result = _run_exporter(program, outputs, opset)
    except Exception as error:
        stored = with_stored_results(program, example, dynamic)
        if stored is None:
            raise ExportError(f"the ONNX exporter failed: {_cause(error)}") from error
        drop_constant_outputs_(stored)
        try:
            result = _run_exporter(stored, outputs, opset)
        except Exception as again:
            raise ExportError(f"the ONNX exporter failed: {_cause(again)}") from again
    write_palettes(result.model)
    write_recurrent(result.model)
    return result


def _run_exporter(program: ExportedProgram, outputs: list[str], opset: int) -> torch.onnx.ONNXProgram:
    """What torch's exporter makes of a program. outputs: their names, but for those that an input or a weight has, too."""
    nodes = [
        node for node in program.graph.nodes if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    inputs = [node.name for node in nodes]
    # Before 0.7, onnxscript prints how many rules it applied; what a command prints may be JSON.
    with _exporting(), torch.no_grad(), quick_exporter(), warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # the exporter warns of its own internals
        result = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=inputs,
            output_names=_distinct(outputs, [*inputs, *program.state_dict, *program.constants]),
            custom_translation_table=translations(),
            verbose=False,
        )
    assert result is not None
    return result


def _varying_dimensions(model: nn.Module) -> Dynamic:
    """The dimensions that a quantized model was captured with; the batch for any other model."""
    return model.dynamic if is_quantized(model) else (0,)


def deployed(model: nn.Module) -> nn.Module:
    """The module to export: quantized models and submodules made of ONNX's operators; a float model as it is."""
    parts = quantized_parts(model)
    if "" in parts:
        return parts[""].deployed()
    if parts:
        model = copy_model(model)
    for name, part in parts.items():
        model.set_submodule(name, part.deployed())
    return model


#: Operators that the exporter has no form of -> what to write in their place.
_REMEDIES = {
    "searchsorted": "write torch.searchsorted without sorter=",
    "cummax": "write torch.cummax over few positions as a loop of torch.maximum",
    "cummin": "write torch.cummin over few positions as a loop of torch.minimum",
    "nanmedian": "write torch.median, of values without NaN",
    "linalg_inv_ex": "write the inverse of 2 x 2 or 3 x 3 matrices by its formula",
}


def _cause(error: BaseException) -> str:
    """The innermost cause's first line, as the exporter wraps what went wrong in several layers of advice, with the line of the
    user's code.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    nodes = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__)]
    written = [node for node in nodes if isinstance(node, fx.Node)]  # the exporter's loop names that which it writes so
    line = source_line(written[-1]) if written else ""
    if not (missing := re.match(r"No ONNX function found for (.+?)\. Failure", str(error))):
        return (str(error) if isinstance(error, ExportError) else named_first_line(error)) + line
    name = re.sub(r"<OpOverload\(op='([\w.]+)', .*>", r"\1", missing[1])
    remedy = _REMEDIES.get(name.split(".")[-1], "write it with other operators")
    return f"it has no form of {name}{line}: {remedy}, or leave it out of the file"


def _name_dimensions(file: Any, dynamic: Dynamic) -> None:
    """Give the dimensions that vary their names, at every input and output: `batch` for the first, `dim_2` for others, or the
    user's, and `2*dim_2 + 1` for what is computed of them.
    """
    import onnx_ir as ir

    names = _names_of_symbols(file.graph.inputs, dynamic)

    def named(size: Any) -> Any:
        if isinstance(size, int) or size.value is None:
            return size
        if size.value in names:
            return names[size.value]
        written = {symbol: name if name.isidentifier() else f"({name})" for symbol, name in names.items()}
        return re.sub(r"[^\W\d]\w*", lambda word: written.get(word[0], word[0]), size.value)

    for value in [*file.graph.inputs, *file.graph.outputs]:
        if value.shape is not None:
            value.shape = ir.Shape([named(size) for size in value.shape])


def _names_of_symbols(inputs: Sequence[Any], dynamic: Dynamic) -> dict[str, str]:
    """Symbol of torch for a size of the inputs -> its name in the file: the user's, or a default that no other size has.

    Where `dim_1` is another size's, as in a model of two sequences, the input comes before it, `tgt_dim_1`: ONNX Runtime plans
    its memory by names, and what has one name and two sizes is written to a place of the other size.
    """
    given = dynamic if isinstance(dynamic, Mapping) else {}
    places = [(value.name, d, size) for value in inputs for d, size in enumerate(value.shape or ())]
    symbols = [(name, d, size.value) for name, d, size in places if not isinstance(size, int) and size.value is not None]
    names: dict[str, str] = {}
    for name, d, symbol in symbols:
        if d in given.get(name, {}):
            names.setdefault(symbol, given[name][d])
    for name, d, symbol in symbols:
        default = "batch" if d == 0 else f"dim_{d}"
        while symbol not in names and default in names.values():
            default = f"{name}_{default}"
        names.setdefault(symbol, default)
    return names


def _distinct(outputs: list[str], others: list[str]) -> list[str]:
    """Names of the outputs in a file, where no two values have one name: `x_out` where an input or a weight is called `x`."""
    taken, names = {*outputs, *others}, []
    for name in outputs:
        other = name
        while other in others or (other != name and other in taken):
            other = f"{other}_out"
        taken.add(other)
        names.append(other)
    return names


def output_names(output: Any) -> list[str]:
    """`output` for a single tensor, the keys of a dict, else `output_0`, `output_1`, ..."""
    if isinstance(output, Tensor):
        return ["output"]
    if isinstance(output, Mapping) and all(isinstance(v, Tensor) for v in output.values()):
        return [str(key) for key in output]
    count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output))
    return [f"output_{i}" for i in range(count)]
