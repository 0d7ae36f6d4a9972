"""Make a flat graph functional: in-place ops become ops that return a new value.

Views are followed by storage. A write through a view is scattered back to the tensor it views, and views
taken before the write are taken again when they are next read. Only graphs with writes are changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import is_complex
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import functional_form, viewed_argument, written_arguments
from hetu_fx.graph.capture_failure import WAY_OUT
from hetu_fx.graph.regions import gradient_carriers
from hetu_fx.graph.shared_memory import check_layouts

aten = torch.ops.aten

SAME_ELEMENTS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
})  # fmt: skip
SAME_VALUE = frozenset({
    aten.alias.default, aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device,
    aten.to.other, aten.type_as.default, aten.lift_fresh.default, aten.dropout.default,
})  # fmt: skip
WITH_STATISTICS = frozenset({aten.native_batch_norm.default, aten._native_batch_norm_legit.default})
NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default, *WITH_STATISTICS})
OWN_INVERSE = frozenset({aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.mT.default})
SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
SPLITS = frozenset({
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections,
})  # fmt: skip
RENAMED = {aten.normal_.default: aten.normal_functional.default}


def functionalize(graph: fx.Graph, differentiable: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Rewrite all in-place ops of a flat graph; return the new value of every placeholder written to.

    Args:
        differentiable: the placeholders that may carry a gradient.

    Raises:
        CaptureError: for a write that cannot be followed (to several tensors, through unusual views).
    """
    if not any(written_arguments(node) or _updates_statistics(node) for node in graph.nodes):
        return {}
    check_layouts(graph)
    return _Functionalizer(graph, gradient_carriers(graph, differentiable)).run()


def _updates_statistics(node: fx.Node) -> bool:
    """Tell whether a norm writes to its running statistics, of which most schemas say nothing."""
    return node.target in NORMS and bool(node.args[5]) and node.args[3] is not None


class _Functionalizer:
    """Walks the graph once; `cached` holds each original node's latest value and the version it is of."""

    def __init__(self, graph: fx.Graph, carriers: Collection[fx.Node]) -> None:
        self.graph = graph
        self.carriers = carriers
        views = ((node, viewed_argument(node)) for node in graph.nodes if node.target not in NORMS)
        self.parents = {node: parent for node, parent in views if parent is not None}
        self.versions: dict[fx.Node, int] = {}
        self.cached: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}  # norms that update statistics: views and writes name the old node
        self.changed: set[fx.Node] = set()  # placeholders whose value changes (detach_ changes no value)
        self.here: fx.Node

    def run(self) -> dict[fx.Node, fx.Node]:
        """Rewrite the graph; see `functionalize`."""
        for node in list(self.graph.nodes):
            self.here = node
            if node.op == "placeholder":
                continue
            if _updates_statistics(node):
                self._rewrite_norm(node)
            elif written := written_arguments(node):
                self._rewrite_write(node, written)
            elif node in self.parents and self._version(node):
                self.cached.pop(node, None)  # a view of something written before: taken where it is read
            else:
                node.args = fx.node.map_arg(node.args, self._read)
                node.kwargs = fx.node.map_arg(node.kwargs, self._read)
        new_values = {node: self._read(node) for node in self.versions if node in self.changed}
        for norm, output in self.replaced.items():
            norm.replace_all_uses_with(output)
        return new_values

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.parents:
            node = self.parents[node]
        return node

    def _version(self, node: fx.Node) -> int:
        return self.versions.get(self._root(node), 0)

    def _read(self, node: fx.Node) -> fx.Node:
        version = self._version(node)
        if version == 0:
            return node
        known_version, known = self.cached.get(node, (0, node))
        if known_version == version:
            return known
        assert node in self.parents, "the latest value of a root is always at hand"
        # An in-place op returns the tensor it wrote to; any other view is taken again.
        value = self._read(self.parents[node]) if written_arguments(node) else self._take_again(node)
        self.cached[node] = (version, value)
        return value

    def _write(self, node: fx.Node, value: fx.Node) -> None:
        if node in self.parents:
            parent = self.parents[node]
            if written_arguments(node):
                self._write(parent, value)
            else:
                self._write_through(node, parent, value)
        else:
            self.versions[node] = self.versions.get(node, 0) + 1
        self.cached[node] = (self._version(node), value)

    def _write_through(self, view: fx.Node, parent: fx.Node, value: fx.Node) -> None:
        if view.target is operator.getitem:
            self._write(self.parents[parent], self._scatter_piece(view, parent, value))
        else:
            self._write(parent, self._scatter(view, self._read(parent), value))

    def _scatter(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        target, rest = view.target, tuple(view.args[1:])
        rest = fx.node.map_arg(rest, self._read)
        if target in SCATTERS:
            return self._put(SCATTERS[target], base, value, *rest)
        if target in SAME_ELEMENTS:
            return self._insert(aten.reshape.default, (value, self._sizes(base)))
        if target in SAME_VALUE and meta.same_shape(view, base):
            return value
        if target in OWN_INVERSE:
            return self._insert(target, (value, *rest))
        if target is aten.permute.default:
            order = [dim % len(rest[0]) for dim in rest[0]]  # type: ignore[arg-type, operator, union-attr]
            inverse = [order.index(dim) for dim in range(len(order))]
            return self._insert(aten.permute.default, (value, inverse))
        raise self._refusal(f"a write through a view made by {target}")

    def _scatter_piece(self, piece: fx.Node, split: fx.Node, value: fx.Node) -> fx.Node:
        """Put a piece of a split back: pieces are counted by their sizes, which must be fixed."""
        base = self._read(self.parents[split])
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        index = piece.args[1]
        if split.target is aten.unbind.int:
            unbind_dim = split.args[1] if len(split.args) > 1 else split.kwargs.get("dim", 0)
            return self._put(aten.select_scatter.default, base, value, unbind_dim, index)
        assert isinstance(dim, int)
        assert isinstance(index, int)
        lengths = [example.shape[dim] for example in meta.value(split)]
        if split.target not in SPLITS or any(meta.is_symbolic(length) for length in lengths[: index + 1]):
            raise self._refusal(f"a write through a piece made by {split.target}")
        start = sum(lengths[:index])
        return self._put(aten.slice_scatter.default, base, value, dim, start, start + lengths[index])

    def _put(self, scatter: Callable[..., Any], base: fx.Node, value: fx.Node, *place: Any) -> fx.Node:
        """Insert a scatter; of complex values one of each part, as torch knows no gradient through theirs."""
        if not is_complex(meta.dtype(base)):
            return self._insert(scatter, (base, value, *place))
        pairs = ([self._insert(part, (z,)) for z in (base, value)] for part in (aten.real.default, aten.imag.default))
        return self._insert(aten.complex.default, tuple(self._insert(scatter, (*pair, *place)) for pair in pairs))

    def _rewrite_write(self, node: fx.Node, written: list[fx.Node]) -> None:
        into = node.kwargs.get("out")
        target = written[0]
        if len(written) != 1 or (target is not into and target is not node.args[0]):
            raise self._refusal(f"{node.target}, which writes to several tensors, or to one in the middle")
        through_op = self._root(target).op != "placeholder"
        if through_op and target in self.carriers and not meta.traced_with_grad(node):
            raise self._refusal("a write in a no-grad region to a value that carries a gradient")
        if node.target is not aten.detach_.default and not through_op:
            self.changed.add(self._root(target))
        node_args = fx.node.map_arg(node.args, self._read)
        kwargs = fx.node.map_arg({name: arg for name, arg in node.kwargs.items() if name != "out"}, self._read)
        value = self._functional_value(node, node_args, kwargs)
        if target is into and not meta.same_shape(value, target):
            raise self._refusal(f"{node.target}, which gives the tensor of its out= argument another size")
        if meta.dtype(value) != meta.dtype(target):
            value = self._insert(aten.to.dtype, (value, meta.dtype(target)))
        self._write(target, value)

    def _functional_value(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        match node.target:
            case aten.copy_.default:
                return self._broadcast(args[1], args[0])
            case aten.fill_.Tensor:
                return self._broadcast(args[1], args[0])
            case aten.fill_.Scalar:
                return self._insert(aten.full_like.default, (args[0], args[1]))
            case aten.fill_diagonal_.default if len(meta.shape(args[0])) == 2 and not any(
                (*args[2:], *kwargs.values())
            ):
                diagonal = self._insert(aten.diagonal.default, (args[0],))
                filled = self._insert(aten.full_like.default, (diagonal, args[1]))
                return self._put(aten.diagonal_scatter.default, args[0], filled)
            case aten.zero_.default:
                return self._insert(aten.zeros_like.default, (args[0],))
            case _:
                return self._insert(self._functional_variant(node.target), args, kwargs)

    def _functional_variant(self, target: Any) -> Callable[..., Any]:
        if target in RENAMED:
            renamed: Callable[..., Any] = RENAMED[target]
            return renamed
        variant = functional_form(target)
        if variant is None:
            raise self._refusal(f"{target}, which writes, and has no functional form")
        return variant

    def _broadcast(self, source: fx.Node, like: fx.Node) -> fx.Node:
        if meta.dtype(source) != meta.dtype(like):
            source = self._insert(aten.to.dtype, (source, meta.dtype(like)))
        if meta.same_shape(source, like):
            return source
        if not meta.shape(source):  # a number in host memory may be written to any device
            return self._insert(aten.fill.Tensor, (like, source))
        return self._insert(aten.expand.default, (source, self._sizes(like)))

    def _rewrite_norm(self, node: fx.Node) -> None:
        args = fx.node.map_arg(node.args, self._read)
        of_rows = node.target is aten.instance_norm.default
        output, *statistics = self._instance_norm(*args) if of_rows else self._batch_norm(*args)
        for written, value in zip(node.args[3:5], statistics, strict=True):
            assert isinstance(written, fx.Node)
            if self._root(written).op == "placeholder":
                self.changed.add(self._root(written))
            self._write(written, value)
        several = node.target in WITH_STATISTICS
        self.replaced.update(self._results(node, output, *args) if several else {node: output})

    def _results(self, node: fx.Node, output: fx.Node, x: Any, *rest: Any) -> dict[fx.Node, fx.Node]:
        """Return what a norm's results become: its output, and each channel's mean and one over its deviation."""
        value, dims = self._insert(aten.detach.default, (x,)), [0, *range(2, len(meta.shape(x)))]
        variance = self._insert(aten.var.correction, (value, dims), {"correction": 0})
        mean = self._insert(aten.mean.dim, (value, dims))
        rate = self._insert(aten.rsqrt.default, (self._insert(aten.add.Tensor, (variance, rest[6])),))
        return {piece: (output, mean, rate)[piece.args[1]] for piece in node.users}  # type: ignore[index]

    def _batch_norm(self, *args: Any) -> list[fx.Node]:
        """Insert a norm over the batch; return its output and the new running mean and variance."""
        result = self._insert(aten._native_batch_norm_legit_functional.default, args[:8])
        return [self._insert(operator.getitem, (result, index)) for index in (0, 3, 4)]

    def _instance_norm(self, *args: Any) -> list[fx.Node]:
        """Insert a norm of each row; its running statistics follow the means of the statistics of rows."""
        x, weight, bias, mean, variance, training, momentum, *rest = args
        output = self._insert(aten.instance_norm.default, (x, weight, bias, None, None, training, momentum, *rest))
        value = self._insert(aten.detach.default, (x,))
        inside = list(range(2, len(meta.shape(x))))
        means = self._insert(aten.mean.dim, (value, [0, *inside]))
        variances = self._insert(aten.mean.dim, (self._insert(aten.var.correction, (value, inside)), [0]))
        pairs = ((mean, means), (variance, variances))
        return [output, *(self._insert(aten.lerp.Scalar, (old, new, momentum)) for old, new in pairs)]

    def _sizes(self, node: fx.Node) -> list[Any]:
        return [
            self._insert(aten.sym_size.int, (node, dim)) if meta.is_symbolic(size) else size
            for dim, size in enumerate(meta.shape(node))
        ]

    def _insert(self, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
        with self.graph.inserting_before(self.here):
            node = self.graph.call_function(target, args, kwargs)
        meta.copy_meta(self.here, node)
        meta.infer(node)
        return node

    def _take_again(self, view: fx.Node) -> fx.Node:
        latest = {arg: self._read(arg) for arg in view.all_input_nodes}
        with self.graph.inserting_before(self.here):
            return self.graph.node_copy(view, latest.__getitem__)

    def _refusal(self, what: str) -> CaptureError:
        return CaptureError(f"cannot follow {what} ({meta.source_line(self.here)})\nhint: {WAY_OUT}")
