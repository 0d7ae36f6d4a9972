"""All that we use of torch without its promise to keep it: a new version of torch is this one file's work.

What there is for its compilers is in `torch_compile`. Here stand the names of modules, functions and attributes that
begin with an underscore, each with what it is for. Below torch.ops these are names of ops, and count as public.
`tests/base/test_torch_private.py` says which names an installed torch lacks, and that nothing else in the product uses
any.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial, wraps
from operator import attrgetter
from threading import Thread
from types import FunctionType
from typing import Any, NamedTuple, cast
from unittest import mock
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import FunctionSchema
from torch._C._distributed_c10d import PrefixStore as PrefixStore  # where ranks meet; torch.distributed's, typed here
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._functorch import eager_transforms
from torch._guards import detect_fake_mode as detect_fake_mode  # the mode that given values were made in
from torch._ops import HigherOrderOperator as HigherOrderOperator  # regions of a captured graph
from torch._ops import OpOverload as OpOverload  # what a node of a captured graph calls
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # shapes without numbers
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.autograd.function import _is_setup_context_defined
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group, _new_process_group_helper, _world
from torch.fx import graph_module
from torch.fx.experimental.proxy_tensor import decompose, get_proxy_mode, get_proxy_slot, has_proxy_slot, set_proxy_slot
from torch.fx.experimental.sym_node import SymNode as SymNode  # what a symbolic size is, each one of its own
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.utils import _pytree as pytree  # nested values: what arguments and results of ops are
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op that runs
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv as FloorDiv  # how sizes are made of others
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.functions import PythonMod as PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from hetu_fx.base.patches import Patch, register_patch

register_pytree_node = pytree.register_pytree_node
tree_flatten = pytree.tree_flatten
tree_flatten_with_path = pytree.tree_flatten_with_path
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten

# Subclasses of Tensor: made without a copy, and without what torch does to results of subclasses by itself.
make_subclass = Tensor._make_subclass
make_wrapper_subclass = Tensor._make_wrapper_subclass
disabled_torch_function = torch._C._disabled_torch_function_impl

# Versions tell of writes: to a view they count for what it views.
increment_version = torch._C._increment_version
set_versions = torch._C._autograd._unsafe_set_version_counter

# Kernels over lists of tensors, one call for all.
Lists = Sequence[Sequence[Any]]
foreach_copy = torch._foreach_copy_
foreach_mul = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unflatten_dense_tensors = torch._C._nn.unflatten_dense_tensors

GRAD_AND_VALUE: Callable[..., tuple[Any, Any]] = eager_transforms.grad_and_value_impl  # what torch.func.grad calls
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # of torch.func; None outside
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether the backward under way may be repeated

at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

is_zerotensor: Callable[[Tensor], bool] = Tensor._is_zerotensor  # zeros without memory, as gradients of steps are

OPTIMIZED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")  # what torch.compile gives, once that is imported
get_default_group = _get_default_group


def collectives_begun(group: ProcessGroup) -> int | None:
    """Return how many collectives this rank has begun in a group; None where its backend does not count them."""
    stated: Any = group  # torch has it, and says nothing of it
    try:
        return int(stated._get_sequence_number_for_group())
    except RuntimeError:
        return None


dispatch_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # whether autocast knows an op


def in_bad_fork() -> bool:
    """Tell whether this process was forked from one that has used CUDA; one that found no device is marked, too."""
    return torch.cuda._is_in_bad_fork() and torch.cuda.is_available()


def make_tensor_guard(tensors: tuple[Tensor, ...]) -> Callable[[], bool] | None:
    """Return what tells whether dtypes, dims and `requires_grad` of tensors, no two the same, are what they are now.

    One call for all, as Dynamo has it: a twentieth of what asking each home tensor takes. It says no also where what
    surrounds it (autocast, a mode) is other than now. It is to be made and asked where gradients are enabled. None:
    this torch has no such thing.
    """
    kind = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if kind is None:
        return None
    open_sizes = [[None] * tensor.dim() for tensor in tensors]
    made = kind(*tensors, dynamic_dims_sizes=open_sizes, dynamic_dims_strides=open_sizes)
    return partial(made.check, *tensors)


# Attributes of ops.
schema: Callable[[Any], FunctionSchema] = attrgetter("_schema")  # names, defaults and aliases of arguments and results
short_name: Callable[[Any], str] = attrgetter("_opname")  # without namespace and overload
overload_name: Callable[[Any], str] = attrgetter("_overloadname")
dispatch_name: Callable[[Any], str] = attrgetter("_name")  # as the dispatcher's tables have it


def op_names() -> tuple[str, ...]:
    """Return the names of all ops that torch has now, as nodes print them: aten.linear.default."""
    found = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return tuple(f"{space}.{name if '.' in name else f'{name}.default'}" for space, _, name in found)


BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # what has the forward of all batch norms


def check_input_of_norm(norm: Any, x: Tensor) -> None:
    """Raise ValueError for an input that has other dims than a batch norm takes."""
    norm._check_input_dim(x)


pack_padded_sequence = torch._C._VariableFunctions._pack_padded_sequence

# Attributes of tensors, storages and modules.
version: Callable[[Tensor], int] = attrgetter("_version")  # how often it has been written in place
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")  # one, however many objects stand for it
SLOTS = ("_parameters", "_buffers", "_modules")  # where a module keeps parameters, buffers and submodules, by name
FORWARD_HOOKS = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}  # and these, by number
BACKWARD_HOOKS = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}
CALL = "_call_impl"  # what calling a module runs: hooks, and `forward`
CALLS = ("forward", CALL, "_compiled_call_impl")  # all that it runs, the last after module.compile()
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(  # of all modules
    vars(torch.nn.modules.module)[f"_global_{kind}"]
    for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
)
parameter_slots: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")  # takes tensors of any kind
buffer_slots: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
LISTED_SLOTS = ("_flat_weights", "_flat_weight_refs")  # where a recurrent layer keeps its parameters once more
RESETS = ("reset_parameters", "_reset_parameters")  # by which a module gives its parameters their first values
not_saved: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")  # buffers that are no state


@contextmanager
def without_weak_references(model: nn.Module) -> Iterator[None]:
    """Have recurrent layers let go of their parameters, which torch does not swap while somebody refers to them."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [None if weight is None else ref(weight) for weight in layer._flat_weights]


@contextmanager
def listing_weights(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers list the parameters that they have now, which they read from a list of their own."""
    layers = [(vars(one), one) for one in model.modules() if isinstance(one, nn.RNNBase)]
    before = [space[LISTED_SLOTS[0]] for space, _ in layers]
    try:
        for space, layer in layers:
            space[LISTED_SLOTS[0]] = [getattr(layer, name) for name in layer._flat_weights_names]
        yield
    finally:
        for (space, _), listed in zip(layers, before, strict=True):
            space[LISTED_SLOTS[0]] = listed


def is_written(argument: Any) -> bool:
    """Tell whether an op writes to an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


class ArgumentNames(NamedTuple):
    """What arguments of an op are called, in order: all, those that it writes to, those that are lists of tensors."""

    all: tuple[str, ...]
    written: tuple[str, ...]
    lists_of_tensors: tuple[str, ...]


@cache
def argument_names(op: Any) -> ArgumentNames:
    """Return what the arguments of an op are called, by its schema."""
    arguments = schema(op).arguments
    lists = (one.name for one in arguments if str(one.type).startswith("List[") and "Tensor" in str(one.type))
    written = (one.name for one in arguments if is_written(one))
    return ArgumentNames(tuple(one.name for one in arguments), tuple(written), tuple(lists))


def has_schema(target: Any) -> bool:
    """Tell whether what a node calls is an op with a schema."""
    return hasattr(target, "_schema")


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Do what torch.autograd.backward does, which compares the shapes of both in python first; the engine does, too."""
    torch.autograd.graph._engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what runs a function outside of torch.func: its `apply`, which first looks for what that has left.

    It does so argument by argument, in python, which takes as long as the rest where these are many.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_setup_context_defined(function: type[torch.autograd.Function]) -> bool:
    """Tell whether a function's forward is called without its context."""
    return bool(_is_setup_context_defined(function.setup_context))


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name, as near to this one as its graph has free."""
    node._rename(name)


def accumulates_into_leaves(nodes: Sequence[Any]) -> list[bool]:
    """Tell whether the backward under way adds to the gradients of leaves, by the nodes that do it.

    It does not where torch.autograd.grad returns them (which is what torch's error is about), nor beside `inputs=`.
    """
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return [False] * len(nodes)


gradient_hooks: Callable[[Tensor], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns what holds a leaf's hooks: those on its gradient, and those for once that has accumulated."""


def set_gradient_hooks(tensor: Tensor, hooks: tuple[Any, Any]) -> None:
    """Let a leaf that needs a gradient have the hooks that another one had; their handles stay good."""
    for name, held in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if held:
            setattr(tensor, name, held)


def is_parameter(tensor: Tensor) -> bool:
    """Tell whether a tensor of a subclass counts as a parameter."""
    return bool(getattr(tensor, "_is_param", False))


def mark_parameter(tensor: Tensor) -> None:
    """Let a tensor of a subclass count as a parameter."""
    tensor._is_param = True


# Where patches are put: module, class ("": the module itself), attribute.
TYPES_OF_LIST_KERNELS = (  # what clipping and optimizers give to kernels over lists, by exact type; else one by one
    ("torch.utils._foreach_utils", "", "_foreach_supported_types"),
    ("torch.optim.optimizer", "", "_foreach_supported_types"),
)
SORT_OF_LISTS = ("torch.optim.optimizer", "Optimizer", "_group_tensors_by_device_and_dtype")


def sorting_others(others: Callable[[Lists, bool], tuple[Lists, Callable[[], None]] | None]) -> Callable[[Any], Any]:
    """Return what makes of SORT_OF_LISTS one by which optimizers give other tensors to kernels over lists.

    They sort all their lists by device and dtype once in a step, before the first kernel.

    Args:
        others: takes the lists of one step (parameters, gradients, states), and whether positions in them are told;
            returns what kernels are to be given, and what to call once they have run. None: what there is.
    """

    def wrap(original: Any) -> Any:
        sort = original.__func__

        @wraps(sort)
        def sort_others(lists: Lists, with_indices: bool = False) -> dict[Any, Any]:
            found = None if torch.compiler.is_compiling() else others(lists, with_indices)
            if found is None:
                return sort(lists, with_indices)  # type: ignore[no-any-return]
            groups = _Groups()
            groups.end = found[1]
            groups.update(sort(found[0], with_indices))
            return groups

        return staticmethod(sort_others)

    return wrap


class _Groups(dict[Any, Any]):
    """Lists by device and dtype, which an optimizer holds for as long as its kernels run, also where one fails."""

    end: Callable[[], None]

    def __del__(self) -> None:
        self.end()


def takes_boxed_arguments(compiled: Any) -> bool:
    """Tell whether a compiled function takes its arguments as one list already."""
    return bool(getattr(compiled, "_boxed_call", False))


@contextmanager
def dispatching_by(mode: FakeTensorMode, dispatch: Callable[..., Any]) -> Iterator[None]:
    """Let `dispatch` give what ops give in this mode, by (op, types, args, kwargs)."""
    with mock.patch.object(mode, "dispatch", dispatch):
        yield


def version_of_sizes(mode: FakeTensorMode) -> int:
    """Return what changes with each thing that a mode finds out of its sizes."""
    assert mode.shape_env is not None, "it has symbolic sizes"
    return mode.shape_env._version_counter


def is_traced_by_proxies() -> bool:
    """Tell whether what is done with symbolic sizes now becomes part of a graph."""
    return get_proxy_mode() is not None


keys_of_kernels = torch._C._dispatch_key_set  # which kernels of an op a tensor leads to


def copied_size(node: SymNode) -> SymNode:
    """Return a symbolic size that is equal to another, and not the same one."""
    return SymNode(node._expr, node.shape_env, node.pytype, node._hint, node.constant, node.fx_node)


def fake_of_form(
    mode: FakeTensorMode,
    sizes: Sequence[Any],
    strides: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
    memory: Any,
) -> FakeTensor:
    """Return a fake tensor that shares the `memory` of another one, or has so many bytes of its own."""
    assert mode.shape_env is not None, "it has symbolic sizes"
    with mode.shape_env.suppress_guards(), in_kernel_invocation_manager(mode):
        if not isinstance(memory, Tensor):
            storage = torch.empty(memory, dtype=torch.uint8, device="meta").untyped_storage()
            memory = torch.empty(0, dtype=dtype, device="meta").set_(storage, 0, (0,), (1,))
        elif memory.dtype != dtype:
            memory = torch.empty(0, dtype=dtype, device="meta").set_(memory.untyped_storage(), 0, (0,), (1,))
        return FakeTensor(mode, memory.as_strided(sizes, strides, offset), device)


def without_fake_tensor_cache() -> AbstractContextManager[None]:
    """Do not remember what ops on fake tensors gave.

    With symbolic sizes, torch works out each entry twice; that costs more than its hits save
    (`graph.tracing.known_results` remembers them at less).
    """
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patch


def drop_traced_inputs(mode: FakeTensorMode | None) -> None:
    """Let a mode that torch.export has traced in forget its inputs: they are of use to nobody once that is over.

    Their symbolic sizes hold the mode's environment in C++, where Python's search for garbage does not look, and the
    environment holds them: such a ring is never freed. None: there was no trace.
    """
    environment = None if mode is None else mode.shape_env
    if environment is not None and environment.tracked_fakes:
        environment.tracked_fakes.clear()


def clear_caches_of_sizes() -> None:
    """Let torch forget what it has answered about symbolic sizes: the caches hold the environments of all traces.

    What is asked once more about graphs that are still there is worked out once more.
    """
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _dropping_sources(execute: Callable[..., None]) -> Callable[..., None]:
    """Return what executes the source of an fx graph, and keeps it only as long as its code lives."""

    @wraps(execute)
    def execute_and_drop(source: str, names: dict[str, Any], *rest: Any, **more: Any) -> None:
        execute(source, names, *rest, **more)
        for made in [one for one in names.values() if isinstance(one, FunctionType) and one.__globals__ is names]:
            finalize(made.__code__, _drop_source, made.__code__.co_filename).atexit = False

    return execute_and_drop


def _drop_source(name: str) -> None:
    if name.startswith("<eval_with_key>"):  # other names are of files
        graph_module._loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


register_patch(
    Patch(
        "torch",
        "torch.fx.graph_module",
        "",
        "_exec_with_source",
        why="the sources of all graphs, which tracebacks show, would be kept for good; an export makes six",
        tested="2.13",
        wrap=_dropping_sources,
        is_needed=False,
    )
)


def is_told_by_values(symbol: Any) -> bool:
    """Tell whether a symbol stands for a size that only the values of a batch tell."""
    return symbol_is_type(symbol, SymT.UNBACKED_INT)


@contextmanager
def watching_sizes(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Let `see` have each size that a trace replaces, and by what; nothing where torch does that elsewhere."""
    replace = getattr(ShapeEnv, "_set_replacement", None)
    if replace is None:
        yield
        return

    def watched(shape_env: ShapeEnv, symbol: Any, value: Any, *rest: Any, **more: Any) -> Any:
        see(symbol, value)
        return replace(shape_env, symbol, value, *rest, **more)

    with mock.patch.object(ShapeEnv, "_set_replacement", watched):
        yield


@contextmanager
def answering_guards(answer: Callable[[Any, Exception], bool]) -> Iterator[None]:
    """Let `answer` say whether a condition on what tensors hold is true, with the error that a trace has for it."""
    guard = SymNode.guard_bool

    def guarded(node: SymNode, file: str, line: int) -> bool:
        try:
            return guard(node, file, line)
        except GuardOnDataDependentSymNode as error:
            return answer(node.expr, error)

    with mock.patch.object(SymNode, "guard_bool", guarded):
        yield


class _Composites(dict[Any, Callable[..., Any]]):
    """All ops that torch makes of others, with what makes them."""

    def __contains__(self, op: object) -> bool:
        return isinstance(op, OpOverload) and op._can_decompose()

    def __getitem__(self, op: Any) -> Callable[..., Any]:
        return op.decompose  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return True


def is_of_transforms(target: Any) -> bool:
    """Tell whether what a node calls enters or leaves a transform of torch.func."""
    return str(getattr(target, "__module__", "")).startswith("torch._functorch")


def instead_of_grad_and_value(taken: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Let torch.func's grad and grad_and_value be `taken`, by function, numbers of arguments, whether it has more than
    a value to give, and what it is given; all transforms around them stay."""
    return mock.patch.object(eager_transforms, "grad_and_value_impl", taken)


def without_composites() -> AbstractContextManager[Any]:
    """Let the trace under way have what composite ops are made of, as autograd does, and not them."""
    made: AbstractContextManager[Any] = decompose(_Composites())
    return made


def is_in_trace(tensor: Tensor) -> bool:
    """Tell whether the trace under way knows a tensor; False inside of its ops."""
    mode = get_proxy_mode()
    return mode is not None and has_proxy_slot(tensor, mode.tracer)


def is_between_ops() -> bool:
    """Tell whether a trace is under way, and not inside of an op."""
    return get_proxy_mode() is not None


def give_name_in_trace(tensor: Tensor, known: Tensor) -> None:
    """Let a tensor be in the trace under way what another one is that it knows; to be called between ops."""
    mode = get_proxy_mode()
    assert mode is not None, "a trace is under way"
    set_proxy_slot(tensor, mode.tracer, get_proxy_slot(known, mode.tracer))


@contextmanager
def keeping_sizes() -> Iterator[None]:
    """Run composite ops on fake tensors by kernels in Python, as torch.export does; some in C++ fix dynamic sizes."""
    with enable_python_dispatcher():
        yield


def replaced_sizes(mode: FakeTensorMode) -> dict[Any, Any]:
    """Return what has been put for symbols of sizes so far: a number, or another symbol that must be equal."""
    return dict(mode.shape_env.replacements) if mode.shape_env is not None else {}


def size_guards(mode: FakeTensorMode) -> list[Any]:
    """Return what a mode's trace has found out of its sizes, as sympy expressions of those that are left free."""
    environment = mode.shape_env
    replaced = [] if environment is None else [environment.replace(guard.expr) for guard in environment.guards]
    return [guard for guard in replaced if guard.free_symbols]


def forget_guard(mode: FakeTensorMode, condition: Any, symbol: Any) -> None:
    """Have a mode's trace not know any more what it has found out of one size: it may be any number but 0 and 1."""
    environment = mode.shape_env
    assert environment is not None, "it has found something out"
    environment.guards[:] = [guard for guard in environment.guards if environment.replace(guard.expr) != condition]
    environment.var_to_range[symbol] = ValueRanges(2, int_oo)
    environment._update_version_counter()


def new_size(mode: FakeTensorMode, name: str, example: int) -> Any:
    """Make a symbolic size for tensors of a mode that is no size of theirs; its example is 2 at least."""
    assert mode.shape_env is not None, "a captured graph has symbolic sizes"
    source, example = ConstantSource(name), max(example, 2)  # torch takes 0 and 1 for fixed
    symbol = mode.shape_env.create_symbol(example, source, DimDynamic.DYNAMIC)
    return mode.shape_env.create_symintnode(symbol, hint=example, source=source)


def number_of_expression(expression: Any, like: torch.SymInt | torch.SymFloat, mode_of: torch.SymInt) -> Any:
    """Return the symbolic number of an expression over sizes like `mode_of`; kind and example are those of `like`."""
    env = mode_of.node.shape_env
    make = env.create_symintnode if isinstance(like, torch.SymInt) else env.create_symfloatnode
    return make(expression, hint=like.node.hint)


def without_guards(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Let what ops ask about symbolic sizes of a mode be answered by the example, without holding it for all time."""
    return nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()


def group_backend(group: ProcessGroup, device: torch.device) -> Any:
    """Return what sends a group's tensors of a kind of device. Raises RuntimeError where it has none for it."""
    return group._get_backend(device)


def timeout_of_backend(backend: Any) -> timedelta:
    """Return the bound of a backend's waits."""
    timeout: timedelta = backend.options._timeout
    return timeout


def is_gloo(backend: Any) -> bool:
    """Tell whether a backend of a group sends from host memory, as gloo does."""
    return "gloo" in type(backend).__name__.lower()


def abort_together(backends: Sequence[Any]) -> None:
    """End the communicators of backends at the same time: one after another they wait for each other (pytorch 119797).

    NCCL ends all of them in one call, between a start and an end. The nccl2 backend has neither call in Python; each of
    its communicators is ended by a thread of its own (not tried on devices yet).
    """
    if not hasattr(backends[0], "_group_start"):
        threads = [Thread(target=backend.abort, daemon=True) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[0]._group_end()


def device_types(group: ProcessGroup) -> set[str]:
    """Return the kinds of devices that a group sends from."""
    return {device.type for device in group._device_types}


@contextmanager
def gloo_devices(devices: Sequence[Any] | None) -> Iterator[None]:
    """Let gloo groups that are created meanwhile connect through these devices; None: through what gloo finds itself.

    Nothing that creates a group takes them: torch gives gloo a time-out and no more.
    """
    if devices is None:
        yield
        return
    gloo: Any = distributed_c10d.ProcessGroupGloo
    given = list(devices)

    class GlooThrough(gloo):  # type: ignore[misc]
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            # From torch 2.15 on it is told, too, whether the group can be reconfigured: ours never is.
            options = gloo._Options()
            options._devices, options._threads, options._timeout = given, 2 * len(given), timeout
            super().__init__(store, rank, size, options)

    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", GlooThrough):
        yield


def make_gloo_device(address: str) -> Any:
    """Return a device of gloo that others reach at an address of this machine."""
    gloo: Any = distributed_c10d.ProcessGroupGloo
    return gloo.create_device(hostname=address)


def _gloo_devices() -> Sequence[Any] | None:
    """Return the devices through which the world sends from host memory; None where it has none that are known."""
    try:
        options = group_backend(_get_default_group(), torch.device("cpu")).options
    except (RuntimeError, AttributeError):  # no backend for it, or one of another kind
        return None
    return getattr(options, "_devices", None) or None


def new_named_group(members: list[int], me: int, name: str, timeout: timedelta) -> ProcessGroup:
    """Create a group of members of the world, of which this process is number `me`, under a name of our own.

    It connects through the devices of gloo that the world does.
    """
    backend, store = _world.pg_map[_get_default_group()]
    with gloo_devices(_gloo_devices()):
        created = _new_process_group_helper(
            len(members), me, members, dist.Backend(backend), store, cast(Any, name), timeout=timeout
        )
    group: ProcessGroup = created[0]
    _world.pg_group_ranks[group] = {member: position for position, member in enumerate(members)}
    return group


def store_of_world() -> Store:
    """Return what the ranks of the world have met in, by a connection of its own where it is one."""
    return connected_anew(_world.pg_map[_get_default_group()][1])


def connected_anew(store: Any) -> Store:
    """Return a store by a connection of its own; the same where it is none of connections."""
    kind = getattr(store, "_underlying_non_prefix_store", store)
    found: Store = store.clone() if isinstance(kind, TCPStore) else store
    return found


def host_of_world() -> str | None:
    """Return the host of the store in which the ranks of the world have met, where that is on a network."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return store_address(_world.pg_map[_get_default_group()][1]).rpartition(":")[0] or None


def store_address(store: Store) -> str:
    """Return where a store is served, for messages; "" for one that is no TCPStore."""
    found: Any = getattr(store, "_underlying_non_prefix_store", store)
    return f"{found.host}:{found.port}" if isinstance(found, TCPStore) else ""


def is_group_member(group: ProcessGroup) -> bool:
    """Tell whether this process is (still) in a group."""
    return group in _world.pg_map


def forget_group_count() -> None:
    """Count groups from 0 again: torch names them by their number, which must be that of the other ranks."""
    _world.group_count = 0


def suspend_trace() -> AbstractContextManager[Any]:
    """Compute with values inside, although a trace is under way."""
    made: AbstractContextManager[Any] = _disable_current_modes()
    return made


@cache
def makes_tensors(function: Any) -> bool:
    """Tell whether a function makes tensors of nothing, on the device that it is told or else on the default one."""
    return function in _device_constructors()


@contextmanager
def set_thread_local(key: str, value: object) -> Iterator[None]:
    """Have a value in this thread, and in those in which autograd runs a backward that is called inside."""
    before = thread_local_value(key)
    torch._C._stash_obj_in_tls(key, value)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(key, before)


def thread_local_value(key: str) -> Any:
    """Return the value of this name that this thread has; None if it has none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
