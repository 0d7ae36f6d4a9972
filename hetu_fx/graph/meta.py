"""Read and write what is known about a node; the one owner of `node.meta`.

Keys used: "val" (the example value: FakeTensor, SymInt, number or tuple of them), "stack_trace" (the user's
call stack as text), "module_stack" (tuple of (FQN, class name) of the modules around the call, outermost
first), "grad_enabled" (False inside a no-grad region; only until detach nodes say the same), "on_host" (True where
an op is to run on the host, whatever device runs the graph) and "uncast" (True where the model turns autocast off).
"""

from __future__ import annotations

import copy
import linecache
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from hetu_fx.base.torch_private import (
    FakeTensorMode,
    detect_fake_mode,
    keeping_sizes,
    new_size,
    number_of_expression,
    replaced_sizes,
    size_guards,
    tree_leaves,
    tree_map,
    without_guards,
)
from hetu_fx.errors import CaptureError

ModuleStack = tuple[tuple[str, str], ...]
Size = int | torch.SymInt
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What stands for numbers in a trace that only a batch tells."""

DATA_DEPENDENT = -1
TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "custom")


class HasBatchSymbol(Protocol):
    """A graph, as far as this module needs it."""

    @property
    def batch_symbol(self) -> sympy.Symbol | None:
        """The symbol of the batch size, or None if it is static."""

    @property
    def all_rows(self) -> sympy.Symbol | None:
        """The symbol of the rows that all replicas have together, or None if nothing has them."""


FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
UNKNOWN_LINE = "unknown line"
NOT_THE_USERS = (TORCH_FOLDER, OWN_FOLDER, "torch/")  # torch records some of its own frames by a short path


def value(node: fx.Node) -> Any:
    """Return the node's example value: FakeTensor, SymInt, number, or a tuple of them."""
    return node.meta["val"]


def has_value(node: fx.Node) -> bool:
    """Tell whether an example value is known."""
    return "val" in node.meta


def set_value(node: fx.Node, example: Any) -> None:
    """Set the node's example value."""
    node.meta["val"] = example
    node.meta.pop("tensor_meta", None)


def storages(node: fx.Node) -> set[StorageWeakRef]:
    """Return the storages of the tensors that the node's example value is made of."""
    return example_storages(node.meta.get("val"))


def example_storages(example: Any) -> set[StorageWeakRef]:
    """Return the storages of the tensors that a value is made of; few ops make nested ones."""
    tensors = example if isinstance(example, (tuple, list)) else [example]
    return {StorageWeakRef(item.untyped_storage()) for item in tensors if isinstance(item, torch.Tensor)}


def is_tensor(node: fx.Node) -> bool:
    """Tell whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: fx.Node) -> tuple[Size, ...]:
    """Return the sizes of a tensor-valued node; symbolic ones are SymInt."""
    return tuple(value(node).shape)


def dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a tensor-valued node."""
    result = value(node).dtype
    assert isinstance(result, torch.dtype)
    return result


def hint(size: Size) -> int:
    """Return the size in the example batch; DATA_DEPENDENT if only the values of a batch tell."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return DATA_DEPENDENT if known is None else int(known)


def evaluate_size(sizes: Mapping[sympy.Symbol, int], size: Size) -> int:
    """Return a size where symbols stand for these numbers; as in the example batch where they do not say."""
    if isinstance(size, int) or not sizes:
        return hint(size)
    found = expression(size).subs(sizes)
    return int(found) if found.is_number else hint(size)


def hints(node: fx.Node) -> tuple[int, ...]:
    """Return the sizes of a tensor-valued node in the example batch."""
    return tuple(hint(size) for size in shape(node))


def is_symbolic(size: object) -> bool:
    """Tell whether a size is not fixed by the graph."""
    return isinstance(size, torch.SymInt) and not size.node.is_constant()


def expression(size: Size) -> Any:
    """Return the sympy expression of a symbolic size, or the int itself."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def same_shape(first: fx.Node, second: fx.Node) -> bool:
    """Tell whether two tensor-valued nodes have the same sizes for every batch, without adding guards."""
    return [expression(size) for size in shape(first)] == [expression(size) for size in shape(second)]


def depends_on_batch(item: fx.Node | Size, graph: HasBatchSymbol) -> bool:
    """Tell whether a size, or any size of a node's value, contains the batch symbol."""
    return _depends_on(item, graph.batch_symbol)


def depends_on_all_rows(item: fx.Node | Size, graph: HasBatchSymbol) -> bool:
    """Tell whether a size, or any size of a node's value, contains the number of rows that all replicas have."""
    return _depends_on(item, graph.all_rows)


def is_data_dependent(node: fx.Node) -> bool:
    """Tell whether only the values of a batch tell a size of a node's value, or the size that it is."""
    return any(hint(size) == DATA_DEPENDENT for size in _sizes_of(value(node)))


def _depends_on(item: fx.Node | Size, symbol: sympy.Symbol | None) -> bool:
    sizes = _sizes_of(value(item)) if isinstance(item, fx.Node) else [item]
    return symbol is not None and any(_contains(size, symbol) for size in sizes)


def _sizes_of(example: Any) -> list[Any]:
    if isinstance(example, torch.Tensor):
        return list(example.shape)
    if isinstance(example, (tuple, list)):
        return [size for item in example for size in _sizes_of(item)]
    return [] if example is None else [example]  # a gradient that an op was not asked for


def _contains(size: Any, symbol: Any) -> bool:
    symbolic = isinstance(size, SYMBOLIC)
    return symbolic and symbol in size.node.expr.free_symbols


def innermost_frame(stack_trace: str) -> tuple[str, int] | None:
    """Return the last frame of a stack text that is neither torch's nor ours, if any."""
    frames = [(path, int(line)) for path, line in FRAME.findall(stack_trace)]
    outside = [frame for frame in frames if not frame[0].startswith(NOT_THE_USERS)]
    return outside[-1] if outside else None


def source_frame(node: fx.Node) -> tuple[str, int] | None:
    """Return the file and the line that the node comes from, if they are known."""
    return innermost_frame(node.meta.get("stack_trace") or "")


def source_line(node: fx.Node) -> str:
    """Return where the node comes from as "file.py:41", or "unknown line"."""
    frame = source_frame(node)
    return f"{os.path.basename(frame[0])}:{frame[1]}" if frame else UNKNOWN_LINE


def set_source_line(node: fx.Node, where: str) -> None:
    """Let a node come from a line, "file.py:41"."""
    path, _, line = where.rpartition(":")
    node.meta["stack_trace"] = f'File "{path}", line {line}'


def source_text(node: fx.Node) -> str:
    """Return the text of the line that the node comes from; "" where it is not known."""
    frame = source_frame(node)
    return linecache.getline(*frame).strip() if frame else ""


def set_module_stack(node: fx.Node, stack: ModuleStack) -> None:
    """Set the modules (FQN, class name) around the node, outermost first."""
    node.meta["module_stack"] = stack
    node.meta.pop("nn_module_stack", None)


def module_stack(node: fx.Node) -> ModuleStack:
    """Return the modules (FQN, class name) around the node, outermost first; empty if unknown."""
    stack = node.meta.get("module_stack", ())
    assert isinstance(stack, tuple)
    return stack


def exported_module_stack(node: fx.Node) -> ModuleStack:
    """Return the module stack as torch.export records it: (path, class name), outermost first."""
    recorded = node.meta.get("nn_module_stack") or {}
    return tuple((path, str(kind).rsplit(".", 1)[-1]) for path, kind in recorded.values())


def traced_with_grad(node: fx.Node) -> bool:
    """Tell whether the node was traced with gradients enabled."""
    return bool(node.meta.get("grad_enabled", True))


def run_on_host(node: fx.Node) -> None:
    """Let an op run on the host, whatever device runs the graph."""
    node.meta["on_host"] = True


def runs_on_host(node: fx.Node) -> bool:
    """Tell whether an op is to run on the host, whatever device runs the graph."""
    return bool(node.meta.get("on_host", False))


def forbid_casts(node: fx.Node) -> None:
    """Record that the model has turned torch.autocast off around the node."""
    node.meta["uncast"] = True


def forbids_casts(node: fx.Node) -> bool:
    """Tell whether the model has turned torch.autocast off around the node."""
    return bool(node.meta.get("uncast", False))


def set_grad_enabled(node: fx.Node, enabled: bool) -> None:
    """Record whether the node was traced with gradients enabled."""
    node.meta["grad_enabled"] = enabled


def forget_grad_enabled(node: fx.Node) -> None:
    """Drop the record of `set_grad_enabled`."""
    node.meta.pop("grad_enabled", None)


def copy_meta(source: fx.Node, target: fx.Node, *, with_value: bool = False) -> None:
    """Give `target` the source line, modules and region of `source`, and its example value if asked."""
    for key in ("stack_trace", "module_stack", "nn_module_stack", "grad_enabled", "on_host", "uncast", "num_dims"):
        if key in source.meta:
            target.meta[key] = source.meta[key]
    if with_value and "val" in source.meta:
        target.meta["val"] = source.meta["val"]


def keep_num_dims(source: fx.Node, target: fx.Node) -> None:
    """Let `target`, which has no example value, know how many dims the tensor has that `source` is."""
    if is_tensor(source):
        target.meta["num_dims"] = len(shape(source))


def num_dims(node: fx.Node) -> int | None:
    """Return how many dims a node of a device's graph has; None where it does not know."""
    known: int | None = node.meta.get("num_dims")
    return known


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """Return the mode that the graph's example values belong to."""
    examples = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    mode = detect_fake_mode(examples)
    assert mode is not None, "a captured graph has fake example values"
    return mode


def conditions(graph: fx.Graph, batch_symbol: Any, *, takes_one_row: bool) -> tuple[sympy.Expr, ...]:
    """Return what a trace has found out of its sizes and gone on by, but for sizes that are equal or fixed.

    That a size is not 1 is such a condition too: the trace has broadcast and squeezed nothing for its sake. Rows may be
    1 where a trace of one row has come out alike (`takes_one_row`).
    """
    found = dict.fromkeys(size_guards(fake_mode(graph)))
    inputs = [size for node in graph.nodes if node.op == "placeholder" and is_tensor(node) for size in shape(node)]
    others = dict.fromkeys(s for size in inputs if is_symbolic(size) for s in expression(size).free_symbols)
    not_one = [sympy.Ge(symbol, 2) for symbol in others if symbol != batch_symbol or not takes_one_row]
    return (*found, *(condition for condition in not_one if condition not in found))


def infer(node: fx.Node) -> Any:
    """Compute and set the example value of an op node from those that its node arguments have; return it.

    Raises:
        CaptureError: the op fixes a size that is dynamic in the graph, so that what it makes holds for one batch only.
    """
    args, kwargs = tree_map(_argument_value, (node.args, node.kwargs))
    assert callable(node.target)
    known = detect_fake_mode(tree_leaves((args, kwargs))) or fake_mode(node.graph)
    before = replaced_sizes(known)
    with known, torch.no_grad(), keeping_sizes():
        set_value(node, node.target(*args, **kwargs))
    fixed = {symbol: size for symbol, size in replaced_sizes(known).items() if symbol not in before}
    if fixed:
        sizes = ", ".join(str(size) for size in fixed.values() if not size.free_symbols) or "others of its sizes"
        raise CaptureError(
            f"{node.target} at {source_line(node)} fixes sizes that depend on the batch to {sizes}: it would be right "
            "for batches like the example alone\n"
            "hint: pass sizes to the op as numbers, or compute what it computes with other ops"
        )
    return value(node)


def substitute(node: fx.Node, symbol: sympy.Symbol, size: torch.SymInt) -> None:
    """Let a node's example value have `size` wherever its sizes and strides have a symbol."""

    def replaced(item: Any) -> Any:
        return (
            number_of_expression(expression(item).subs(symbol, size.node.expr), item, size)
            if _contains(item, symbol)
            else item
        )

    def renewed(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            sizes, strides = tuple(map(replaced, item.shape)), tuple(map(replaced, item.stride()))
            return torch.empty_strided(sizes, strides, dtype=item.dtype, device=item.device)
        return replaced(item)

    mode = fake_mode(node.graph)
    with mode, without_guards(mode):
        set_value(node, tree_map(renewed, value(node)))


def _argument_value(argument: Any) -> Any:
    return value(argument) if isinstance(argument, fx.Node) else argument


def fresh_placeholder_value(
    graph: fx.Graph, size: tuple[Size, ...], kind: torch.dtype, device: torch.device | None = None
) -> Any:
    """Make an example value for a placeholder of the graph, on the cpu if no device is named."""
    with fake_mode(graph):
        return torch.empty(size, dtype=kind, device=device)


def fresh_size(graph: fx.Graph, name: str, like: sympy.Symbol | int) -> torch.SymInt:
    """Make a symbolic size that is no other's; its example is a number, or that of a symbol of the graph."""
    examples = (size for node in graph.nodes for size in _sizes_of(node.meta.get("val")))
    alike = (hint(size) for size in examples if is_symbolic(size) and expression(size) == like)
    made: torch.SymInt = new_size(fake_mode(graph), name, like if isinstance(like, int) else next(alike))
    return made


def forget_traces(node: fx.Node) -> None:
    """Drop what names paths of this machine."""
    for key in TRACES:
        node.meta.pop(key, None)


def copy_all_meta(source: fx.Node, target: fx.Node) -> None:
    """Make `target` know all that `source` knows."""
    target.meta = copy.copy(source.meta)


def has_tensor(node: fx.Node) -> bool:
    """Tell whether the node's value is a tensor or a tuple with tensors in it."""
    return any(isinstance(item, torch.Tensor) for item in tree_leaves(node.meta.get("val")))


def numel(node: fx.Node) -> int:
    """Return the number of elements of a tensor-valued node in the example batch."""
    return math.prod(hints(node))


HALVES = (torch.float16, torch.bfloat16)  # sums made in these lose most of what is added


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch sums numbers of `dtype`."""
    return torch.float32 if dtype in HALVES else dtype
