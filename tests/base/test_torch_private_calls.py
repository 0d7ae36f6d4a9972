"""Each private part of torch that the product uses is called, and does what it is used for: one line for each.

That a name exists says little: torch 2.14 has all of them, and nothing worked. This file needs nothing but the
installed package, so `make smoke` runs it under other versions of torch; `test_torch_private` holds that no name is
left out here.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch.fx import graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hetu_fx.base import torch_compile
from hetu_fx.base import torch_private as private

aten = torch.ops.aten
ADD, EXP, LINEAR, SUM = aten.add.Tensor, aten.exp.default, aten.linear.default, aten.sum.default
HOST = torch.device("cpu")
SOON = timedelta(seconds=30)


class OwnTensor(Tensor):
    """A tensor of another type, on which torch functions give plain tensors."""

    __torch_function__ = private.disabled_torch_function


class Wrapped(Tensor):
    """A tensor that has no numbers of its own."""

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} runs on it")


class Seen(private.TorchDispatchMode):
    """Notes the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


class Doubled(torch.autograd.Function):
    """A function whose forward is called without its context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Aborts:
    """What has the two calls of NCCL's backend, which a build without it lacks, and notes them."""

    def __init__(self, *calls: str) -> None:
        self.said: list[str] = []
        for name in calls:
            setattr(self, name, lambda name=name: self.said.append(name))

    def abort(self) -> None:
        self.said.append("abort")


def ops_of(work: Callable[[], Any]) -> list[Any]:
    with Seen() as seen:
        work()
    return seen.ops


def fake_mode() -> private.FakeTensorMode:
    return private.FakeTensorMode(shape_env=ShapeEnv())


def in_backward(ask: Callable[[Tensor], Any], keeps: bool = False) -> Any:
    """Return what is answered inside of a backward, of the leaf."""
    said: list[Any] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: said.append(ask(leaf)))
    (2 * leaf).sum().backward(retain_graph=keeps)
    return said[0]


@torch.enable_grad()
def node_of(leaf: Tensor) -> Any:
    return leaf.expand_as(leaf).grad_fn.next_functions[0][0]


def in_trace(ask: Callable[[Tensor], Any]) -> Any:
    """Return what is answered inside of a trace, of its input."""
    said: list[Any] = []
    make_fx(lambda x: (said.append(ask(x)), x + 1)[1])(torch.ones(2))
    return said[0]


def graph_of(op: Any, *rest: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(op, (graph.placeholder("x"), *rest)),))
    return fx.GraphModule(nn.Module(), graph)


@contextmanager
def world_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=private.TCPStore("127.0.0.1", 0, None, True, SOON), rank=0, world_size=1)
    try:
        yield private.get_default_group()
    finally:
        dist.destroy_process_group()
        private.forget_group_count()


def sum_by(group: dist.ProcessGroup) -> float:
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    return float(x.sum())


def of_world(ask: Callable[[dist.ProcessGroup], Any]) -> Any:
    with world_of_one() as group:
        return ask(group)


def stored(store: Any) -> bool:
    store.set("key", "value")
    return bool(store.get("key") == b"value")


def prefixed() -> bool:
    store = private.TCPStore("127.0.0.1", 0, None, True, SOON)
    inside = private.PrefixStore("a", store)
    assert isinstance(inside, private.Store)
    assert private.store_address(inside) == f"{store.host}:{store.port}"
    return stored(inside) and stored(private.connected_anew(inside)) and store.get("a/key") == b"value"


def named_group(world: dist.ProcessGroup) -> bool:
    group = private.new_named_group([0], 0, "ours", SOON)
    assert private.is_group_member(group)
    assert stored(private.store_of_world())
    return sum_by(group) == 2 and dist.get_process_group_ranks(group) == [0]


def through_devices() -> bool:
    with private.gloo_devices([private.make_gloo_device("127.0.0.1")]), world_of_one() as world:
        assert sum_by(world) == 2
    with world_of_one() as world:
        backend = private.group_backend(private.new_named_group([0], 0, "through", SOON), HOST)
        return private.is_gloo(backend) and private.timeout_of_backend(backend) == SOON


def counted_collectives(world: Any) -> int:
    before = private.collectives_begun(world) or 0
    sum_by(world)
    return (private.collectives_begun(world) or 0) - before


def aborted(*calls: str) -> list[str]:
    backend = Aborts(*calls)
    private.abort_together([backend, backend])
    return backend.said


def recurrent_weights() -> bool:
    layer, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    before = layer(x)[0]
    with private.without_weak_references(layer):
        layer.weight_ih_l0 = nn.Parameter(2 * layer.weight_ih_l0.detach())
    with private.listing_weights(layer):
        changed = layer(x)[0]
    return not torch.equal(before, changed)


def hooks_moved() -> bool:
    said: list[str] = []
    old, new = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    old.register_hook(lambda gradient: said.append("gradient"))
    old.register_post_accumulate_grad_hook(lambda leaf: said.append("accumulated"))
    private.set_gradient_hooks(new, private.gradient_hooks(old))
    new.sum().backward()
    return said == ["gradient", "accumulated"]


def sources_dropped() -> bool:
    graph = graph_of(SUM)
    name = graph.forward.__code__.co_filename
    known = name in graph_module._loader.eval_cache
    private._drop_source(name)
    return known and name not in graph_module._loader.eval_cache


def sizes_watched() -> bool:
    seen: list[Any] = []
    mode = fake_mode()
    size, other = private.new_size(mode, "size", 6), private.new_size(mode, "other", 6)
    with private.watching_sizes(lambda symbol, value: seen.append(symbol)):
        assert size == other
    return bool(private.replaced_sizes(mode)) and (bool(seen) or not hasattr(ShapeEnv, "_set_replacement"))


def guards_forgotten() -> bool:
    mode = fake_mode()
    size = private.new_size(mode, "size", 6)
    assert size > 4
    (guard,) = private.size_guards(mode)
    private.forget_guard(mode, guard, size.node.expr)
    known = mode.shape_env.var_to_range[size.node.expr]
    return private.size_guards(mode) == [] and known.lower == 2 and private.statically_known_true(size > 1)


def numbers_of_values() -> bool:
    mode = fake_mode()
    symbol = mode.shape_env.create_unbacked_symint()
    with private.answering_guards(lambda condition, error: True):
        answered = bool(symbol > 7)
    told = private.is_told_by_values(symbol.node.expr)
    return answered and told and not private.is_told_by_values(private.new_size(mode, "size", 6).node.expr)


def expression() -> bool:
    size = private.new_size(fake_mode(), "size", 6)
    expr = size.node.expr
    made = private.number_of_expression(private.FloorDiv(expr, 2) + private.Mod(expr, 4), size, size)
    return isinstance(made, torch.SymInt) and private.PythonMod(7, 4) == 3 and private.FloorDiv(7, 2) == 3


def taken_gradients() -> bool:
    seen: list[Any] = []

    def taken(function: Any, *rest: Any) -> Any:
        seen.append(function)
        return private.GRAD_AND_VALUE(function, *rest)

    with private.instead_of_grad_and_value(taken):
        found = torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
    return len(seen) == 1 and found.tolist() == [2, 2]


def levels() -> bool:
    said: list[Any] = []
    torch.func.grad(lambda x: (said.append(private.transform_level()), x)[1])(torch.tensor(1.0))
    return said[0] is not None and private.transform_level() is None


def composites_kept_apart() -> bool:
    def traced(x: Tensor) -> Tensor:
        with private.without_composites():
            return torch.nn.functional.linear(x, x)

    made = make_fx(traced, pre_dispatch=True)(torch.ones(2, 2))
    return LINEAR not in {node.target for node in made.graph.nodes}


def named_in_trace(x: Tensor) -> bool:
    other = private.suspend_trace()
    with other:
        plain = torch.ones(2)
    assert not private.is_in_trace(plain)
    private.give_name_in_trace(plain, x)
    return private.is_in_trace(plain) and private.is_between_ops()


def gradient_by_aot(module: fx.GraphModule, **how: Any) -> tuple[list[fx.GraphModule], Tensor]:
    """Return the graphs of forward and backward, and the gradient of a vector of ones."""
    compiled: list[Any] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return make_boxed_func(graph.forward)

    x = torch.ones(2, requires_grad=True)
    made = torch_compile.aot_autograd(fw_compiler=compiler, bw_compiler=compiler, **how)(module, [x])
    made(x)[0].sum().backward()
    assert x.grad is not None
    return compiled, x.grad


def by_aot_autograd() -> bool:
    graphs, gradient = gradient_by_aot(graph_of(EXP))
    return len(graphs) == 2 and torch.equal(gradient, torch.ones(2).exp())


def recomputed() -> bool:
    module = nn.Module()
    module.body = graph_of(EXP)
    graph = fx.Graph()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    graph.output(torch_compile.insert_checkpointed_call(graph, body, [x]))
    graphs, gradient = gradient_by_aot(fx.GraphModule(module, graph), partition_fn=min_cut_rematerialization_partition)
    assert torch.equal(gradient, torch.ones(2).exp())
    return EXP in {node.target for node in graphs[1].graph.nodes}


def condition_of_sizes() -> bool:
    symbols = torch_compile.Symbols()
    size, other = symbols.size(4), symbols.size(4)
    with symbols.tracing():
        assert symbols.tensor((size, 2), (2, 1), False).shape[0] == other
    return [symbols.condition([size, other])(sizes) for sizes in ([6, 6], [6, 7])] == [True, False]


def budget() -> bool:
    with torch_compile.budget_that_keeps(draws=True):
        return torch_compile.memory_budget() == 1.0


def by_one_library() -> bool:
    symbols = torch_compile.Symbols()
    with torch_compile.one_library(), symbols.tracing():
        made = torch_compile.by_inductor(graph_of(EXP), [symbols.tensor((3, 40), (40, 1), True, dtype=torch.float64)])
    x = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    (out,) = made(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())
    return any(Path(torch_compile._Kernel((), "", "").path.parent).glob("kernel_*.so"))


def carried() -> bool:
    with private.set_thread_local("hetu_fx.test", 3):
        inside = (
            private.thread_local_value("hetu_fx.test"),
            in_backward(lambda leaf: private.thread_local_value("hetu_fx.test")),
        )
    return inside == (3, 3) and private.thread_local_value("hetu_fx.test") is None


def version_after(change: Callable[[Tensor], Any]) -> int:
    x = torch.ones(2)
    change(x)
    return private.version(x)


def gradient_by(work: Callable[[Tensor], Any]) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    work(x)
    assert x.grad is not None
    return x.grad.tolist()


def foreach(kernel: Callable[..., Any], *rest: Any) -> list[float]:
    x = torch.ones(2)
    made = kernel([x], *rest)
    return (x if made is None else made[0]).tolist()


def checked_twice(x: Tensor) -> list[bool]:
    holds = private.make_tensor_guard((x,))
    assert holds is not None
    before = holds()
    x.requires_grad_(True)
    return [before, holds()]


def ended_in_order() -> list[str]:
    said: list[str] = []
    in_backward(lambda leaf: (private.at_end_of_backward(lambda: said.append("end")), said.append("inside")))
    return said


NCCL = ("_group_start", "_group_end")
LAYER = nn.BatchNorm1d(2)
LAYER.register_buffer("scratch", torch.ones(1), persistent=False)


# The private names, as the guard finds them in the product's source; and a call that holds if they do what they did.
def tells_a_defect_of_the_compiler_from_a_missing_compiler() -> bool:
    wrapped = (InductorError(one, None) for one in (TypeError(), InvalidCxxCompiler("c++"), CppCompileError([], "")))
    return list(map(torch_compile.is_compiler_defect, wrapped)) == [True, False, False]


def made_of_form() -> bool:
    mode = fake_mode()
    size = private.new_size(mode, "size", 6)
    whole = private.fake_of_form(mode, (size, 2), (2, 1), 0, torch.float32, HOST, 8 * size)
    part = private.fake_of_form(mode, (size,), (2,), 1, torch.int32, HOST, whole)
    shared = {private.storage_key(one.untyped_storage()) for one in (whole, part)}
    return private.is_fake(part) and part.shape[0] == size and part.dtype == torch.int32 and len(shared) == 1


def results_dispatched() -> bool:
    mode, said = fake_mode(), list[Any]()
    own, x = mode.dispatch, mode.from_tensor(torch.ones(2))
    with private.dispatching_by(mode, lambda op, *rest: (said.append(op), own(op, *rest))[1]):
        torch.exp(x)
    torch.exp(x)
    return said.count(EXP) == 1


def versions_told() -> bool:
    mode = fake_mode()
    size, other = private.new_size(mode, "size", 6), private.new_size(mode, "other", 6)
    before = private.version_of_sizes(mode)
    assert size == other
    return private.version_of_sizes(mode) != before


def sizes_copied() -> bool:
    node = (private.new_size(fake_mode(), "size", 6) * 2).node
    copied = private.copied_size(node)
    return copied is not node and (copied.expr, copied.hint) == (node.expr, 12)


def leaves_of_a_new_kind() -> list[int]:
    class Pair(list[int]):
        pass

    private.register_pytree_node(Pair, lambda pair: (list(pair), None), lambda items, _: Pair(items))
    return private.tree_leaves(Pair([1, 2]))


CALLS: dict[str, Callable[[], Any]] = {
    "torch._inductor.exc.CppCompileError torch._inductor.exc.InductorError torch._inductor.exc.InvalidCxxCompiler": (
        tells_a_defect_of_the_compiler_from_a_missing_compiler
    ),
    "torch.Tensor._is_zerotensor": lambda: private.is_zerotensor(torch._efficientzerotensor(2)),
    "torch.Tensor._make_subclass": lambda: type(private.make_subclass(OwnTensor, torch.ones(2))) is OwnTensor,
    "torch.Tensor._make_wrapper_subclass": lambda: private.make_wrapper_subclass(Wrapped, (2, 3)).shape == (2, 3),
    "torch._C._disabled_torch_function_impl": lambda: type(torch.ones(2).as_subclass(OwnTensor) + 1) is Tensor,
    "torch._C.FunctionSchema _schema": lambda: private.argument_names(ADD).all == ("self", "other", "alpha"),
    "_opname": lambda: private.short_name(ADD) == "add",
    "_overloadname": lambda: private.overload_name(ADD) == "Tensor",
    "_name": lambda: private.dispatch_name(ADD) == "aten::add.Tensor",
    "torch._C._dispatch_get_all_op_names": lambda: "aten.linear.default" in private.op_names(),
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda: private.dispatch_has_kernel(
        private.dispatch_name(LINEAR), "AutocastCPU"
    ),
    "_can_decompose torch._ops.OpOverload": composites_kept_apart,
    "torch._ops.HigherOrderOperator": lambda: (
        isinstance(torch.ops.higher_order.cond, private.HigherOrderOperator) and isinstance(ADD, private.OpOverload)
    ),
    "torch._C._VariableFunctions._pack_padded_sequence": lambda: (
        private.pack_padded_sequence(torch.ones(1, 2, 1), torch.tensor([2]), True)[1].tolist() == [1, 1]
    ),
    "torch._C._nn.unflatten_dense_tensors": lambda: (
        [one.shape for one in private.unflatten_dense_tensors(torch.ones(5), [torch.ones(2), torch.ones(3)])]
        == [(2,), (3,)]
    ),
    "torch._foreach_copy_": lambda: foreach(private.foreach_copy, [torch.zeros(2)]) == [0, 0],
    "torch._foreach_mul_": lambda: foreach(private.foreach_mul, 3) == [3, 3],
    "torch._foreach_norm": lambda: private.foreach_norm([torch.full((4,), 2.0)])[0] == 4,
    "_version": lambda: version_after(lambda x: x.add_(1)) == 1,
    "torch._C._increment_version": lambda: version_after(lambda x: private.increment_version([x])) == 1,
    "torch._C._autograd._unsafe_set_version_counter": lambda: (
        version_after(lambda x: private.set_versions((x,), (7,))) == 7
    ),
    "_cdata": lambda: (
        private.storage_key((x := torch.ones(2)).untyped_storage()) == private.storage_key(x[1:].untyped_storage())
    ),
    "torch._C._autograd._get_current_graph_task_keep_graph": lambda: (
        [in_backward(lambda leaf: private.keeps_graph(), keeps) for keeps in (False, True)] == [False, True]
    ),
    "torch._C._will_engine_execute_node": lambda: (
        in_backward(lambda leaf: private.accumulates_into_leaves([node_of(leaf)])) == [True]
        and private.accumulates_into_leaves([node_of(torch.ones(2, requires_grad=True))]) == [False]
    ),
    "torch.autograd.Variable._execution_engine.queue_callback": lambda: ended_in_order() == ["inside", "end"],
    "torch.autograd.graph._engine_run_backward": lambda: (
        gradient_by(lambda x: private.run_backward([3 * x], [torch.ones(2)])) == [3, 3]
    ),
    "torch.autograd.function._is_setup_context_defined": lambda: (
        private.is_setup_context_defined(Doubled)
        and gradient_by(lambda x: private.plain_apply(Doubled)(x).sum().backward()) == [2, 2]
    ),
    "_backward_hooks _post_accumulate_grad_hooks": hooks_moved,
    "torch._C._dynamo.guards": lambda: checked_twice(torch.ones(2)) == [True, False],
    "torch._C._functorch.maybe_current_level": levels,
    "torch._functorch.eager_transforms.grad_and_value_impl": taken_gradients,
    "torch._C._get_obj_in_tls torch._C._is_key_in_tls torch._C._stash_obj_in_tls": carried,
    "torch._dispatch.python.enable_python_dispatcher": lambda: (
        torch_compile.Symbols().run(graph_of(torch.ops.aten.t.default), [torch.ones(2, 3)])[0].shape == (3, 2)
    ),
    "torch._dynamo.config.patch": lambda: (
        [private.FakeTensorMode().cache_enabled, under(private.without_fake_tensor_cache())] == [True, False]
    ),
    "torch._dynamo.source.ConstantSource": lambda: private.new_size(fake_mode(), "size", 1).node.hint == 2,
    "torch._guards.TracingContext torch._guards.tracing": condition_of_sizes,
    "torch._guards.detect_fake_mode torch._subclasses.fake_tensor.is_fake": lambda: (
        private.is_fake(made := fake_mode().from_tensor(torch.ones(2))) and private.detect_fake_mode([made]) is not None
    ),
    "torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.in_kernel_invocation_manager": lambda: (
        made_of_form() and results_dispatched()
    ),
    "_version_counter": versions_told,
    "_expr _hint": sizes_copied,
    "torch._C._dispatch_key_set": lambda: (
        private.keys_of_kernels(torch.ones(2)) != private.keys_of_kernels(torch.ones(2, device="meta"))
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": lambda: (
        fake_mode().from_tensor(torch.ones(4, 3)).sum(1).shape[0] == 4
    ),
    "torch._functorch.config.activation_memory_budget torch._functorch.config.patch": budget,
    "torch._dynamo.backends.common.aot_autograd": by_aot_autograd,
    "torch._higher_order_ops.wrap.tag_activation_checkpoint": recomputed,
    "_set_replacement": sizes_watched,
    "_update_version_counter torch.utils._sympy.value_ranges.ValueRanges torch.utils._sympy.numbers.int_oo": (
        guards_forgotten
    ),
    "torch.utils._sympy.symbol.SymT.UNBACKED_INT torch.utils._sympy.symbol.symbol_is_type": numbers_of_values,
    "torch.utils._sympy.functions.FloorDiv torch.utils._sympy.functions.Mod torch.utils._sympy.functions.PythonMod": (
        expression
    ),
    "_loader torch.fx.graph_module._loader.eval_cache.pop": sources_dropped,
    "_rename": lambda: renamed(fx.Graph()) == "y",
    "_boxed_call": lambda: (
        private.takes_boxed_arguments(make_boxed_func(print)) and not private.takes_boxed_arguments(print)
    ),
    "torch.nn.modules.batchnorm._BatchNorm _check_input_dim": lambda: (
        isinstance(LAYER, private.BatchNorm) and private.check_input_of_norm(LAYER, torch.ones(2, 2)) is None
    ),
    "_parameters": lambda: list(private.parameter_slots(LAYER)) == ["weight", "bias"],
    "_buffers": lambda: "running_mean" in private.buffer_slots(LAYER),
    "_non_persistent_buffers_set": lambda: private.not_saved(LAYER) == {"scratch"},
    "_flat_weight_refs _flat_weights _flat_weights_names": recurrent_weights,
    "_is_param": lambda: marked(torch.ones(2).as_subclass(OwnTensor)),
    "torch.utils._device._device_constructors": lambda: (
        private.makes_tensors(torch.zeros) and not private.makes_tensors(torch.add)
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": lambda: ops_of(lambda: torch.ones(2) + 1)[-1] is ADD,
    "torch.utils._python_dispatch._disable_current_modes": lambda: in_trace(named_in_trace),
    "torch.utils._pytree.register_pytree_node": lambda: leaves_of_a_new_kind() == [1, 2],
    "torch.utils._pytree.tree_flatten torch.utils._pytree.tree_unflatten": lambda: (
        private.tree_unflatten(*private.tree_flatten({"a": [1, 2]})) == {"a": [1, 2]}
    ),
    "torch.utils._pytree.tree_flatten_with_path": lambda: (
        [str(path[0]) for path, _ in private.tree_flatten_with_path({"a": 1})[0]] == ["['a']"]
    ),
    "torch.utils._pytree.tree_leaves": lambda: private.tree_leaves({"a": [1, (2,)]}) == [1, 2],
    "torch.utils._pytree.tree_map": lambda: private.tree_map(lambda x: 2 * x, [1, (2,)]) == [2, (4,)],
    "torch.utils._pytree.tree_map_only": lambda: private.tree_map_only(int, lambda x: 2 * x, [1, "a"]) == [2, "a"],
    "torch.cuda._is_in_bad_fork": lambda: private.in_bad_fork() is False,
    "torch._C._distributed_c10d.PrefixStore torch._C._distributed_c10d.Store torch._C._distributed_c10d.TCPStore "
    "_underlying_non_prefix_store": prefixed,
    "torch.distributed.distributed_c10d._get_default_group": lambda: of_world(sum_by) == 2,
    "torch.distributed.distributed_c10d._new_process_group_helper torch.distributed.distributed_c10d._world.pg_map "
    "torch.distributed.distributed_c10d._world.pg_group_ranks torch.distributed.distributed_c10d._world.group_count": (
        lambda: of_world(named_group)
    ),
    "_Options _devices _threads _timeout _get_backend": through_devices,
    "_get_sequence_number_for_group": lambda: of_world(counted_collectives) == 1,
    "_device_types": lambda: of_world(private.device_types) >= {"cpu"},
    "_group_start _group_end": lambda: aborted(*NCCL) == ["_group_start", "abort", "abort", "_group_end"],
}

BY_THE_COMPILER = (
    "torch._inductor.async_compile.AsyncCompile torch._inductor.codecache.CppPythonBindingsCodeCache.__name__ "
    "torch._inductor.codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags torch._inductor.config.patch "
    "torch._inductor.compile_fx.compile_fx torch._inductor.cpp_builder.CppBuilder _load_library_inner "
    "torch._inductor.cpp_builder.CppTorchDeviceOptions torch._inductor.cpp_builder.get_cpp_compiler "
    "torch._inductor.cpu_vec_isa.VecISA torch._inductor.cpu_vec_isa.pick_vec_isa "
    "torch._inductor.runtime.cache_dir_utils.cache_dir"
)
"""What one compiled graph goes through."""


def under(context: Any) -> bool:
    with context:
        return bool(private.FakeTensorMode().cache_enabled)


def renamed(graph: fx.Graph) -> str:
    node = graph.placeholder("x")
    private.rename(node, "y")
    return node.name


def marked(tensor: Tensor) -> bool:
    before = private.is_parameter(tensor)
    private.mark_parameter(tensor)
    return not before and private.is_parameter(tensor) and isinstance(tensor, nn.Parameter)


@pytest.mark.parametrize("names", CALLS)
def test_what_is_private_does_what_it_is_used_for(names: str) -> None:
    assert CALLS[names](), f"torch {torch.__version__}: {names} does something else"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
def test_a_graph_is_compiled_into_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert by_one_library(), f"torch {torch.__version__}: {BY_THE_COMPILER}"
    torch.compiler.reset()


def test_communicators_that_cannot_be_grouped_are_ended_at_the_same_time() -> None:
    all_there = threading.Barrier(3)

    class Waits:
        """A communicator whose end waits for that of the others, as NCCL's may."""

        def abort(self) -> None:
            all_there.wait(30)

    private.abort_together([Waits(), Waits(), Waits()])
    assert not all_there.broken
    assert all_there.n_waiting == 0
