"""Capture a model as a graph of ATen operators: a plain `fx.GraphModule` whose parameters keep their dotted names.

Quantization rewrites this graph, and ONNX files are written from it.

    capture(model, example) -> Captured      torch.export, eval mode, dynamic batch (or other dimensions)
    Captured.module                          the GraphModule: trains, deep-copies, changes mode like any module
    Captured.shapes                          node name -> concrete shape for the example
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CompressError, ModelError, SettingError, named_first_line
from compresskit.base.inputs import AnyInputs, as_inputs, call_inputs, check_has_rows, lacks_decoder_inputs, misfit, names_of_args
from compresskit.base.progress import stderr_held
from compresskit.base.settings import as_python_dims
from compresskit.base.task import Inputs, batch_size, first_rows, shapes_of
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.packed_sequences import check_cell_states_, check_padded_outputs
from compresskit.graph.layers.value_ranges import drop_idle_activations_
from compresskit.graph.normalize import Node, fold_written_constants_, mutates_a_view, normalize_
from compresskit.graph.recurrent import KeepRecurrent, restore_recurrent_
from compresskit.graph.rewrites.exportable import make_exportable_
from compresskit.graph.rewrites.reserved_names import rename_first, rename_reserved_, reserved_names
from compresskit.graph.rewrites.squeezes import drop_idle_squeezes_
from compresskit.graph.rewrites.traced_calls import PlainCalls
from compresskit.graph.surgery import call_unmoved, check_is_module, get_tensor, mode, state_kept, unset_buffers_kept
from compresskit.graph.tracing import first_time, one_thread_traces
from compresskit.graph.varying.conditions import warn_of_conditions
from compresskit.graph.varying.constant_sizes import constant_dimensions
from compresskit.graph.varying.named_dimensions import check_dimensions, check_names
from compresskit.graph.varying.other_traces import traced_after_other_sizes, traced_by_code, traced_with_len

#: The dynamic dimensions of the inputs: numbers that hold for every tensor, `(0, 2, 3)`; names for the dimensions of each input,
#: `{"x": {0: "batch", 2: "height"}}`; or `()` for none.
Dynamic = tuple[int, ...] | Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model.

    Attributes:
        module: GraphModule of functional ATen operators; called like the model (same arguments, same output structure).
        prefix: dotted path of the captured submodule in the user's model, "" for the whole model.
        example: the inputs that it was captured with; two rows of each where the batch is dynamic.
        inputs: a name for each tensor input, in the order of the placeholders.
        dynamic: the dynamic dimensions of the inputs that were given to `capture`.
        varying: the dynamic dimensions of each tensor input, in order.
        shapes: concrete shape of every tensor-valued node for `example`.
        renamed: first part of a name in the graph -> in the model, for names that a graph module has for itself.
        parameters: names of the model's parameters that positional arguments reach, in order.
    """

    module: fx.GraphModule
    prefix: str
    example: Inputs
    inputs: tuple[str, ...]
    dynamic: Dynamic
    varying: tuple[tuple[int, ...], ...]
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    renamed: dict[str, str] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    def name_in_model(self, name: str) -> str:
        """The dotted name that a tensor of the graph has in the model that was captured."""
        return rename_first(name, self.renamed)

    def copy_parameters_to_(self, model: nn.Module) -> None:
        """Copy the values of the graph's parameters to those of the model that was captured."""
        with torch.no_grad():
            for name, values in self.module.named_parameters():
                get_tensor(model, self.name_in_model(name)).copy_(values)


def capture(model: nn.Module, example: AnyInputs, *, inside: str | None = None, dynamic: Dynamic = (0,)) -> Captured:
    """Capture a model, or its submodule `inside`, as a graph with a dynamic batch.

    Args:
        model: any module; it is captured in eval mode and not changed. Buffers that its forward pass writes are constants of the
            graph, of which a warning tells.
        example: its inputs: a tensor, a tuple of positional or a dict of keyword arguments. A dynamic batch is captured with two
            rows; an example of one row is doubled, since `torch.export` would treat a batch of 1 as a constant.
        inside: dotted name of the submodule to capture, with the inputs that it receives from the model.
        dynamic: dimensions that may vary: `(0, 2, 3)`, or `{"x": {0: "batch", 2: "height"}}`; `()` for none.

    Raises:
        ModelError: `torch.export` cannot follow the code; the message names the line.
        SettingError: the inputs do not have the dynamic dimensions.
    """
    check_is_module(model, "capture")
    prefix, example = inside or "", as_inputs(example)
    with one_thread_traces(), torch.no_grad(), mode(model, training=False, tells=False), unset_buffers_kept(model):
        written = check_runs(model, example)
        if inside is not None:
            model, example = inputs_inside(model, example, inside)
            written = [name.removeprefix(f"{inside}.") for name in written if name.startswith(f"{inside}.")]
        with state_kept(model, buffers=False):
            program, example = trace(model, example, dynamic)
        warn_of_state(program, model, written)
        module = graph_of(program, type(model).__name__)
        shapes = _node_shapes(module, example)
    names = tuple(n.name for n in module.graph.nodes if n.op == "placeholder" and n.name in shapes)
    return Captured(
        module=module,
        prefix=prefix,
        example=example,
        inputs=names,
        dynamic=as_python_dims(dynamic),
        varying=tuple(_varying(model, example, dynamic).values()),
        shapes=shapes,
        renamed={there: here for here, there in reserved_names(model).items()},
        parameters=names_of_args(model),
    )


def capture_or_fix_batch(model: nn.Module, example: AnyInputs) -> Captured:
    """Capture a model with a dynamic batch, or, where its code or its inputs allow none, for the batch of the example alone.

    Raises ModelError where it cannot be captured at all.
    """
    try:
        return capture(model, example)
    except (ModelError, SettingError):
        return capture(model, example, dynamic=())


def graph_of(program: torch.export.ExportedProgram, name: str) -> fx.GraphModule:
    """Return what `trace` made of a model as a normalized graph, a module of the given name."""
    module = program.module()
    fold_written_constants_(module)
    if mutates_a_view(module.graph):
        # In-place writes into views (x[:, :4] = ...) need torch's own functionalization, which costs seconds.
        module = program.run_decompositions({}).module()
    module = fx.GraphModule(module, module.graph, name)
    restore_recurrent_(module.graph)
    normalize_(module)
    drop_idle_activations_(module)
    return module


def check_runs(model: nn.Module, example: Inputs) -> list[str]:
    """Raise `ModelError` unless the model runs on the example in eval mode; the model is not changed.

    The first two rows are run where the model takes them, which shows all that the rows have in common, and the example else.

    Returns the names of the buffers that each run of the model writes, and of attributes that each run sets and outputs depend
    on; all are as they were before.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{model.original_name} is a TorchScript module, whose code cannot be captured; wanted the nn.Module that it was"
            " scripted or traced from, with `load_state_dict(scripted.state_dict())` if only the script has the weights"
        )
    try:
        with torch.no_grad(), mode(model, training=False):
            with contextlib.suppress(Exception):
                if _share_rows(example):
                    return call_unmoved(model, first_rows(example, 2))[1]
            return call_unmoved(model, example)[1]
    except Exception as error:
        why = misfit(model.forward, example)
        dtypes = "" if why else _other_dtypes(example)
        raise ModelError(
            f"{type(model).__name__} does not run on the example (inputs of shape {shapes_of(example)}{dtypes}):"
            f" {why or named_first_line(error) + lacks_decoder_inputs(model.forward, example, error)}"
        ) from error


def _share_rows(example: Inputs) -> bool:
    """Whether the inputs are tensors that all have the same number of rows, more than two."""
    rows = {len(value) if isinstance(value, Tensor) and value.ndim else 0 for value in pytree.tree_leaves(example)}
    return len(rows) == 1 and min(rows) > 2


def _other_dtypes(example: Inputs) -> str:
    """Name the dtypes of inputs that are not float32, the most frequent cause of an error."""
    other = {str(v.dtype) for v in pytree.tree_leaves(example) if isinstance(v, Tensor) and v.dtype != torch.float32}
    return f" and {', '.join(sorted(other))} values; use .float() where the model wants numbers, not indices" if other else ""


def trace(model: nn.Module, example: Inputs, dynamic: Dynamic) -> tuple[torch.export.ExportedProgram, Inputs]:
    """Export a model in eval mode with `torch.export`.

    Returns:
        The exported program, and the inputs that it was exported with: two rows where the batch is dynamic.

    Raises:
        ModelError, SettingError: as `capture` does.
    """
    check_dynamic(dynamic, "dynamic")
    given = example
    if _has_dynamic_batch(dynamic):
        check_has_rows(example, "the example")
        example = _two_rows(model, example, dynamic)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    dims, varying = dynamic_dims(model, example, dynamic), _varying_places(model, example, dynamic)
    recurrent = KeepRecurrent()

    def export(*, strict: bool = False) -> torch.export.ExportedProgram:
        with recurrent, PlainCalls(), warnings.catch_warnings(), stderr_held() as written:
            warnings.simplefilter("ignore")  # torch.export warns of its own internals
            try:
                return torch.export.export(model, args, kwargs, dynamic_shapes=dims, strict=strict)
            except Exception as error:  # torch writes all of the graph until there, of which the error has the last line
                written.take_out(str(vars(error).get("partial_fx_graph")))
                raise

    with one_thread_traces():
        try:
            program = export()
        except CompressError:
            raise
        except Exception as error:
            again = traced_after_other_sizes(error, model, example, varying, export)
            if again is None and recurrent.packs:  # packed sequences are followed by running the code
                again = traced_with_len(error, model, export)
            elif again is None:
                again = traced_by_code(error, model, example, varying, lambda: export(strict=True))
            if again is None:
                why = constant_dimensions(error, export) or f"{named_first_line(error)}{_blame(error)}\n  {_advice(error)}"
                raise ModelError(f"{type(model).__name__} cannot be captured as a graph: {why}") from error
            program = again
    if recurrent.packs:
        check_cell_states_(program.graph_module.graph)
        compared = given if batch_size(given) > 1 else example  # a graph with a dynamic batch may want two rows
        check_padded_outputs(model, program, compared)
    drop_idle_squeezes_(program.graph_module)  # where a size is 1, it differs from the model, of which is warned
    warn_of_conditions(program, model, example, varying)
    vars(program).update({"_guards_code": []} if "_guards_code" in vars(program) else {})  # fails on `forward(**batch)`
    rename_reserved_(program, reserved_names(model))
    make_exportable_(program.graph_module)
    return program, example


def warn_of_state(program: torch.export.ExportedProgram, model: nn.Module, written: Sequence[str]) -> None:
    """Warn, once for a class of models, of the state on which outputs depend although each run of the model writes it.

    Args:
        program: the graph of the model, which does not write it.
        model: was captured.
        written: names of the buffers that each of its runs writes, and of attributes that outputs depend on, see `check_runs`.
    """
    if not written:
        return
    renamed, read = reserved_names(model), _buffers_read(program)
    buffers = {name for name, _ in model.named_buffers()}
    names = [name for name in written if name not in buffers or rename_first(name, renamed) in read]
    if names and first_time(type(model), ("state", *names)):
        kind = "buffers" if buffers.issuperset(names) else "attributes"
        warnings.warn(
            f"{type(model).__name__}: forward writes the {kind} {names}, which its outputs depend on: the graph, and a file of"
            " it, hold them as they are now and never change them. Where the state matters, make it an input and an output of"
            " forward",
            stacklevel=3,
        )


def _buffers_read(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the buffers that outputs of an exported program are computed from."""
    buffers = program.graph_signature.inputs_to_buffers
    pending, visited = list(program.graph.output_node().all_input_nodes), set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending += node.all_input_nodes
    return {buffers[node.name] for node in visited if node.name in buffers}


def check_dynamic(dynamic: Any, where: str) -> None:
    """Raise SettingError, which begins with `where`, for what cannot name the dimensions that vary; see `Dynamic`."""
    dynamic = as_python_dims(dynamic)
    named = isinstance(dynamic, Mapping)
    for dims in dynamic.values() if named else [dynamic]:
        numbers = isinstance(dims, Collection) and all(isinstance(d, Integral) and not isinstance(d, bool) for d in dims)
        names = isinstance(dims, Mapping) and all(isinstance(name, str) for name in dims.values())
        if not numbers or isinstance(dims, str) or names != named:  # "" holds no entry that is no number
            raise SettingError(
                f'{where}: wanted dimensions, such as (0, 2, 3), or their names for each input, {{"x": {{0: "batch"}}}}, or'
                f" () for none, got {dynamic!r}"
            )


def dynamic_dims(model: nn.Module, example: Inputs, dynamic: Dynamic) -> Any:
    """Return the dynamic dimensions in the form that `torch.export` takes; SettingError where the inputs do not have them."""
    varying = _varying(model, example, dynamic)
    spec = [
        dict.fromkeys(varying[name], torch.export.Dim.DYNAMIC) if varying.get(name) else None
        for name in input_names(model, example)
    ]
    dims = pytree.tree_unflatten(spec, pytree.tree_structure(example))
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds or isinstance(example, dict):
        return dims
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)  # those of *args are one parameter, a tuple
    return (*dims[:named], *([dims[named:]] if len(dims) > named else ()))


def _varying(model: nn.Module, example: Inputs, dynamic: Dynamic) -> dict[str, tuple[int, ...]]:
    """Input name -> dynamic dimensions, for every tensor among the inputs."""
    leaves = zip(input_names(model, example), pytree.tree_leaves(example), strict=True)
    tensors = {name: value for name, value in leaves if isinstance(value, Tensor)}
    if isinstance(dynamic, Mapping):
        if unknown := sorted(set(dynamic) - set(tensors)):
            raise SettingError(f"dynamic={{{unknown[0]!r}: ...}}: the inputs are {sorted(tensors)}")
        varying = {name: tuple(map(int, dynamic.get(name, ()))) for name in tensors}
    else:
        varying = {name: tuple(int(d) for d in dynamic if d < value.ndim) for name, value in tensors.items()}
        if lost := [d for d in dynamic if d and not any(d in dims for dims in varying.values())]:
            raise SettingError(f"dynamic={tuple(dynamic)}: no input has a dimension {lost[0]}, got {shapes_of(example)}")
    check_dimensions(varying, tensors)
    if isinstance(dynamic, Mapping):
        check_names(dynamic, tensors)
    return varying


def _varying_places(model: nn.Module, example: Inputs, dynamic: Dynamic) -> list[tuple[int, int]]:
    """The dynamic dimensions as (leaf of the example, dimension)."""
    varying = _varying(model, example, dynamic)
    return [(leaf, dim) for leaf, name in enumerate(input_names(model, example)) for dim in varying.get(name, ())]


def _has_dynamic_batch(dynamic: Dynamic) -> bool:
    """Whether the first dimension of any input is dynamic."""
    return any(0 in dims for dims in dynamic.values()) if isinstance(dynamic, Mapping) else 0 in dynamic


def input_names(model: nn.Module, example: Inputs) -> list[str]:
    """Return a name for each leaf of the inputs: the parameter of `forward`, and its position where it is nested."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")

    def one(path: tuple[Any, ...]) -> str:
        first, *inner = map(_index, path)
        head = first if isinstance(first, str) else named[first] if first < len(named) else f"{rest}_{first - len(named)}"
        return "_".join(map(str, [head, *inner]))

    return [one(path) for path, _ in pytree.tree_flatten_with_path(example)[0]]


def _index(key: Any) -> Any:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.key if isinstance(key, pytree.MappingKey) else key


def _advice(error: BaseException) -> str:
    """What the user can do about an error of `torch.export`."""
    if found := re.search(r"<class '([^']+)'> in (output|input)", str(error)):
        return (
            f"An {found[2]} of the model is of the class {found[1]}, wanted tensors, alone or in tuples, lists and dicts. Let the"
            " model leave it out (models of Hugging Face: `model.config.use_cache = False`), or wrap the model in a module that"
            " returns its tensors."
        )
    if "_detect_is_causal_mask" in "".join(traceback.format_exception(error)):
        return (
            "nn.Transformer looks at the values of a mask to see whether it is the causal one. Tell it: forward(src, tgt,"
            " tgt_mask=mask, tgt_is_causal=True), or False for another mask; of an encoder, is_causal=True."
        )
    if isinstance(error, OSError | ImportError):  # no fault of the model
        return "Let torch find what it reads there; if the working directory was deleted, change to another by os.chdir(...)."
    if re.search(r"match hidden\d? batch size|Expected hidden", str(error)):
        return (
            "The rows of a state are not in its first dimension. Give them the name of the input's:"
            ' dynamic={"x": {0: "batch"}, "state": {1: "batch"}}, with the parameters of forward.'
        )
    return (
        "Code whose path depends on values of tensors cannot be captured. Capture the part that can be with"
        " inside='backbone' (the dotted name of a submodule), or rewrite that line."
    )


def _blame(error: BaseException) -> str:
    r"""`\n  at file.py:12 in forward: if x.sum() > 0:` for the innermost line of code that is not torch's."""
    where = ""
    trace = error.__traceback__
    ours = (torch.__file__.rsplit("/", 1)[0], __file__.rsplit("/", 1)[0], "<")
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(ours) and "torch/" not in code.co_filename:
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            where = f"\n  at {code.co_filename}:{trace.tb_lineno} in {code.co_name}: {line}"
        trace = trace.tb_next
    if location := re.search(r'File "([^"]+)", line (\d+), in (\w+)', str(error)):
        where = where if "in forward" in where else "\n  at {}:{} in {}".format(*location.groups())
    return where


def inputs_inside(model: nn.Module, inputs: Inputs, inside: str) -> tuple[nn.Module, Inputs]:
    """Return a submodule by its dotted name, and the inputs that it receives when the model is called with `inputs`.

    Raises:
        ModelError: there is no such submodule, or it is not called, or with arguments that cannot all be named.
    """
    try:
        part = model.get_submodule(inside)
    except AttributeError:
        names = [name for name, _ in model.named_children()]
        raise ModelError(f"inside={inside!r}: {type(model).__name__} has no such module; its own are {names}") from None
    if not (seen := calls_inside(model, inputs, inside)):
        raise ModelError(f"inside={inside!r}: the model does not call this module for these inputs")
    return part, seen[0]


def calls_inside(model: nn.Module, inputs: Inputs, inside: str) -> list[Inputs]:
    """Return the inputs that a submodule gets in every call, when the model is called with `inputs`; see `call_inputs`."""
    seen: list[Inputs] = []

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(call_inputs(part, args, kwargs, f"inside={inside!r}"))

    handle = model.get_submodule(inside).register_forward_pre_hook(note, with_kwargs=True)
    try:
        call_unmoved(model, inputs)
    finally:
        handle.remove()
    return seen


def _two_rows(model: nn.Module, example: Inputs, dynamic: Dynamic) -> Inputs:
    """Take two rows of every input whose first dimension is dynamic; a single row is doubled.

    So are dimensions with the name of such a first one, as of the states of an LSTM, (layers, rows, width). Inputs of which the
    model takes no two rows, as of the nodes of a graph beside its edges, stay whole.
    """
    varying = _varying(model, example, dynamic)
    dimensions = {name: dict.fromkeys([0] if 0 in dims else []) for name, dims in varying.items()}
    if isinstance(dynamic, Mapping):
        named = {name: dims for name, dims in dynamic.items() if isinstance(dims, Mapping)}
        batch = {dims[0] for dims in named.values() if 0 in dims}
        for name, dims in named.items():
            dimensions[name] |= dict.fromkeys(d for d, called in dims.items() if called in batch)
    whole, structure = pytree.tree_flatten(example)
    two = list(whole)
    for i, name in enumerate(input_names(model, example)):
        for d in dimensions.get(name, ()):
            if whole[i].shape[d] == 1:
                whole[i], two[i] = (torch.cat([value, value], d) for value in (whole[i], two[i]))
            two[i] = two[i].narrow(d, 0, min(2, two[i].shape[d]))
    rows: Inputs = pytree.tree_unflatten(two, structure)
    try:
        with torch.no_grad(), mode(model, training=False), torch.random.fork_rng(devices=[]):
            call_unmoved(model, rows)
    except Exception as error:
        if not re.search(r"match hidden\d? batch size|Expected hidden", str(error)):  # `_advice` explains states by two rows
            rows = pytree.tree_unflatten(whole, structure)
    return rows


def _node_shapes(module: fx.GraphModule, example: Inputs) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the graph, by node name."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            shapes[node.name] = tuple(value.shape)

    run_graph(module, pytree.tree_leaves(example), note)
    return shapes


def parameter_name(node: Any) -> str | None:
    """Return the dotted name of the parameter or buffer that a node reads; None for other nodes."""
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def module_path(node: Node) -> str:
    """Return the dotted path of the user's module whose `forward` contains the operator of a node."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if isinstance(path, str)]
    return paths[-1] if paths else ""


def autocasts(graph: fx.Graph) -> Iterator[tuple[Node, torch.dtype]]:
    """Yield the first operator of every block of a graph that runs under `torch.autocast`, with the dtype of the block."""
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2]:
            assert graph.owning_module is not None
            block = graph.owning_module.get_submodule(node.args[4].target)
            assert isinstance(block, fx.GraphModule)
            yield next(n for n in block.graph.nodes if n.op == "call_function"), node.args[1]
