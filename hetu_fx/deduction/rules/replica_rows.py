"""Rules of the ops between a replica's own rows and those of all, and of those that read them whole."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import FIRST, fresh_dims, names, opaque, replace_dims, rules_for_ops
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.rule import Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import Size, integer


def _moved(call: Call, source: str, result: str) -> Factoring:
    """Other rows in one dim, which is (outer, rows, inner); those of all replicas are never cut."""
    dim, around = call.integer("dim"), {name: integer(call.integer(name)) for name in ("outer", "inner")}
    sizes = {name: size for name, size in around.items() if size.number != 1}

    def named(shape: Shape, rows: str) -> Dims:
        inside = shape[dim]
        for size in around.values():
            inside = _over(inside, size)
        sizes[rows] = inside
        parts = (name for name in ("outer", rows, "inner") if name in sizes)
        return replace_dims(fresh_dims(shape), {dim: tuple(parts)})

    state, *others = (fresh_dims(operand.shape, f"o{i}_") for i, operand in enumerate(call.operands[1:]))
    given, made = named(call.operands[0].shape, source), named(call.results[0], result)
    literals = tuple(LiteralSize(call.at(name), (name,)) for name in around if name in sizes)
    return Factoring((given, state, *others), (made,), sizes, names(state) | {"all"}, FIRST, literals=literals)


def _over(size: Size, part: Size) -> Size:
    rest = size.over(part)
    assert rest is not None, "a dim that has rows is a product"
    return rest


RULES: tuple[Rule, ...] = (
    *rules_for_ops(opaque, "_local_scalar_dense", "hetu.leaf.default"),
    *rules_for_ops(_moved, "hetu.place_rows.default", source="rows", result="all"),
    *rules_for_ops(_moved, "hetu.own_rows.default", source="all", result="rows"),
)
