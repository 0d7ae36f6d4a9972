"""What a stage's program says of each op of a graph (see `hetu_fx.plans.op_regions`).

Every op that batch and parameters reach has a region, but for items of results and views that only rearrange dims,
which lie as what they are of; what depends on inputs alone is whole. A dim of a pattern of leaves stands for the one
class of it that the op has, so that twins of blocks are one region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch

from torch import fx

from hetu_fx.base.documents import nearest
from hetu_fx.base.torch_private import OpOverload, schema
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import is_view, overload
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.plans.op_regions import ROWS, SUMMANDS, LeafDim, OpRegion
from hetu_fx.plans.stage import Stage
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.flow import is_item


@dataclass(frozen=True, slots=True)
class OpCut:
    """How an op runs: a part of `factor`, on summands of its operands, or all of it on every device.

    The parts follow the ratios of `segment`. With `factors`, gradients of parameters that it reads whole are made from
    gathered factors, not summed.
    """

    factor: FactorClass | None = None
    on_summands: bool = False
    factors: bool = False
    segment: int = 0


Choices = Mapping[fx.Node, OpCut]


def program_choices(analysed: AnalysedGraph, stage: Stage) -> Choices:
    """Return what a stage's program says of the ops of a graph.

    Raises:
        PlanError: an op has no region, or a region no op, or one that cannot run so; names both and the way out.
    """
    names = {node: name for node, name in op_names(analysed.graph).items() if analysed.factors.is_op(node)}
    found = {node: _region(name, stage.program) for node, name in names.items()}
    _check_all(analysed, names, found, stage.program)
    told = ((node, region) for node, region in found.items() if region is not None and _may_choose(analysed, node))
    ratios = segments(stage)

    def choice(node: fx.Node, region: OpRegion) -> OpCut:
        segment = ratios.index(region.ratios or stage.ratios)
        return replace(_choice(analysed, node, names[node], region), segment=segment)

    return {node: choice(node, region) for node, region in told}


def segments(stage: Stage) -> tuple[tuple[int, ...], ...]:
    """Return the ratios that parts follow, each once: those of the stage, then those of regions with their own."""
    return tuple(dict.fromkeys((stage.ratios, *(region.ratios for region in stage.program if region.ratios))))


def _region(name: str, program: Sequence[OpRegion]) -> OpRegion | None:
    return next((region for region in program if fnmatch(name, region.ops)), None)


def _check_all(
    analysed: AnalysedGraph,
    names: Mapping[fx.Node, str],
    found: Mapping[fx.Node, OpRegion | None],
    program: Sequence[OpRegion],
) -> None:
    for place, region in enumerate(program):
        if not any(fnmatch(name, region.ops) for name in names.values()):
            raise PlanError(
                f"program[{place}]: {region} matches no op{nearest(region.ops, tuple(names.values()))}; ops are "
                f"named by the module and what is called there, such as {next(iter(names.values()), 'mlp.up:linear')!r}"
            )
    missing = [name for node, name in names.items() if found[node] is None and _needs_region(analysed, node)]
    if missing:
        raise PlanError(
            f"the program says nothing of {len(missing)} ops: {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}"
            f"\nhint: give a region for each, such as {{'ops': '*', 'split': 'whole'}} as the last one"
        )


def _needs_region(analysed: AnalysedGraph, node: fx.Node) -> bool:
    return analysed.flow.is_mixed(node) and meta.has_tensor(node) and _may_choose(analysed, node)


def _may_choose(analysed: AnalysedGraph, node: fx.Node) -> bool:
    is_learned = node in analysed.flow.parameters and not is_item(node)
    return is_learned and not only_rearranges(node, analysed.factors.op(node))


def only_rearranges(node: fx.Node, op: OpFactors) -> bool:
    """Tell whether an op is a view of all of one operand, its dims in another order or number."""
    if len(op.operands) != 1 or len(op.results) != 1 or op.whole or not op.known or not is_view(node):
        return False
    made, read = (sorted(c.id for c in flat(dims)) for dims in (op.results[0], op.operands[0].dims))
    return made == read


def _choice(analysed: AnalysedGraph, node: fx.Node, name: str, region: OpRegion) -> OpCut:
    if not region.is_cut:
        return OpCut(on_summands=region.split == SUMMANDS)
    op = analysed.factors.op(node)
    named = set(_named(region, analysed.factors)) & op.classes
    if not named and region.split == ROWS:
        return OpCut()  # what has no rows is the same on every device that has some
    if len(named) != 1:
        what = "has none of it" if not named else f"has {len(named)} of it"
        raise PlanError(
            f"{region} cuts '{name}' on {region.split!r}, but the op {what}\nhint: {_ways(node, analysed.factors)}"
        )
    (factor,) = named
    if region.factors:
        _check_factors(node, op, factor, f"{region} makes gradients of '{name}' from factors")
    if not can_cut(node, factor, analysed.factors):
        raise PlanError(
            f"{region} cuts '{name}' on {region.split!r}, which the op needs whole ({meta.source_line(node)})"
            f"\nhint: {_ways(node, analysed.factors)}"
        )
    return OpCut(factor, factors=region.factors)


def sends_factors(node: fx.Node, op: OpFactors) -> frozenset[FactorClass]:
    """Return what an op may be cut on where gradients of its parameters are made from gathered factors.

    These are the rows of products of rows with a weight. Empty for other ops, and for those with further arguments.
    """
    product = PRODUCTS.get(overload(node)) if isinstance(node.target, OpOverload) else None
    given = {product.x, product.weight, product.bias} if product else set()
    if product is None or node.kwargs or not given.issuperset(range(len(node.args))):
        return frozenset()
    ends = {operand.path: operand for operand in op.operands}
    bias = ends.get((product.bias,)) if product.bias is not None else None
    if bias is not None and len(bias.dims) > 1:  # it has rows of its own
        return frozenset()
    return frozenset(flat(op.results[0][:-1])) - ends[(product.weight,)].classes


def _check_factors(node: fx.Node, op: OpFactors, factor: FactorClass, asked: str) -> None:
    """Refuse gradients from factors where the op is no product of rows with a weight, or not cut on its rows."""
    able = sends_factors(node, op)
    if not able:
        known = ", ".join(map(str, PRODUCTS))
        raise PlanError(f"{asked}, but {node.target} is none of {known}, or has more arguments\nhint: drop the factors")
    if factor not in able:
        raise PlanError(
            f"{asked}, but it is cut on {factor}, which its weight has\nhint: cut it on its rows, or leave factors out"
        )


def _named(region: OpRegion, factors: FactorMap) -> Iterator[FactorClass]:
    """Yield the classes that a region names, over all leaves that match."""
    told = region.leaf_dim
    if told is None:
        assert region.split == ROWS
        yield from (c for c in factors.classes if c.is_batch)
        return
    leaves = [leaf for leaf in factors.leaves if leaf.kind in (LeafKind.PARAMETER, LeafKind.INPUT)]
    matching = [leaf for leaf in leaves if fnmatch(leaf.name, told.leaf)]
    if not matching:
        known = tuple(leaf.name for leaf in leaves)
        raise PlanError(f"{region} is cut on {region.split!r}, but there is no such leaf{nearest(told.leaf, known)}")
    for leaf in matching:
        yield from _at(told, factors.dims(leaf.node), region)


def _at(told: LeafDim, dims: Sequence[tuple[FactorClass, ...]], region: OpRegion) -> tuple[FactorClass, ...]:
    classes = dims[told.dim] if told.dim < len(dims) else ()
    if told.factor is None and len(classes) == 1:
        return classes
    if told.factor is not None and told.factor < len(classes):
        return (classes[told.factor],)
    sizes = [[str(c) for c in dim] for dim in dims]
    raise PlanError(f"{region} is cut on {region.split!r}, which names no factor; the leaf's dims have {sizes}")


def can_cut(node: fx.Node, factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether a program may cut an op on a factor."""
    op = factors.op(node)
    seen = op.with_cut(factor)
    known_only = seen.sharded | seen.averaged  # forms for parts are written with numbers
    able = factor not in seen.whole and (factor.size is not None or factor not in known_only)
    return able and factors.splittable(factor) and not (factor.is_batch and _orders_rows(node, op, factors))


def _orders_rows(node: fx.Node, op: OpFactors, factors: FactorMap) -> bool:
    """Tell whether an op counts rows, or has them in an order of its own, which parts of the rows would not share."""
    return bool(op.counted) or not factors.shard_ordered.isdisjoint((node, *node.all_input_nodes))


def _ways(node: fx.Node, factors: FactorMap) -> str:
    able = sorted((c for c in factors.op(node).classes if can_cut(node, c, factors)), key=lambda c: c.id)
    places = [f"{name}:{dim}" for c in able for name, dim in factors.occurrences(c)[:1]]
    rows = [ROWS] if any(c.is_batch for c in able) else []
    return f"give one of {', '.join(map(repr, (*rows, *places, 'whole')))}"


def op_names(graph: Graph) -> Mapping[fx.Node, str]:
    """Return the names of all ops: `<module path>:<op>`; of further ops of a kind in a module, `...:<op>#1` and so on.

    The op is called as in torch's schema, without its overload: `mlp.up:linear`, or `:sum` outside of all modules.
    """
    seen: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            name = f"{_module_path(node)}:{_op(node)}"
            names[node] = f"{name}#{seen[name]}" if seen[name] else name
            seen[name] += 1
    return names


def _module_path(node: fx.Node) -> str:
    stack = meta.module_stack(node)
    return stack[-1][0] if stack else ""


def _op(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return schema(node.target).name.split("::")[-1]
    return str(getattr(node.target, "__name__", node.target))
