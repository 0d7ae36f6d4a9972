"""Small problems, written down and drawn at random."""

from __future__ import annotations

import random

from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.prices import Collectives, RatioPrices, Ratios
from hetu_fx.planner.search.hap.tensor_states import Limits
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram

LINES = Collectives(
    all_gather=Line(1e-3, 1.1e-5),
    reduce_scatter=Line(1e-3, 1.3e-5),
    all_reduce=Line(1.5e-3, 2.1e-5),
    all_to_all=Line(0.5e-3, 0.4e-5),
    shift=Line(0.2e-3, 0.5e-5),
    grouped_all_gather=Line(3e-3, 1.4e-5),
    grouped_reduce_scatter=Line(3e-3, 1.7e-5),
)


def factors(*texts: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(text.split()) for text in texts)


def linear(name: str, x: str, w: str, out: str, dims: str = "b k, o k -> b o", *, segment: int = 0, flops: float) -> Op:
    """Return a product that is linear in each of its two operands."""
    left, right = dims.split("->")
    each = (frozenset({0}), frozenset({1}))
    return Op(name, (x, w), (out,), factors(*left.split(",")), factors(right), flops, linear=each, segment=segment)


def feed_forward(rows: int = 64, width: int = 32, inner: int = 128, layers: int = 1) -> TensorProgram:
    """Return layers of two products with something in between, and a loss; each layer a block."""
    tensors = [Tensor("x0", (rows, width), "input")]
    ops: list[Op] = []
    blocks = []
    for i in range(layers):
        tensors += [
            Tensor(f"{i}.up", (inner, width), "parameter"),
            Tensor(f"{i}.down", (width, inner), "parameter"),
            Tensor(f"{i}.hidden", (rows, inner)),
            Tensor(f"{i}.active", (rows, inner)),
            Tensor(f"x{i + 1}", (rows, width)),
        ]
        work = 2.0 * rows * width * inner
        ops += [
            linear(f"{i}.first", f"x{i}", f"{i}.up", f"{i}.hidden", flops=work),
            Op(f"{i}.gelu", (f"{i}.hidden",), (f"{i}.active",), factors("b o"), factors("b o"), rows * inner * 5.0),
            linear(f"{i}.second", f"{i}.active", f"{i}.down", f"x{i + 1}", flops=work),
        ]
        blocks.append((3 * i, 3 * i + 3))
    last = f"x{layers}"
    tensors.append(Tensor("loss", ()))
    both = (frozenset({0}),)
    ops.append(Op("sum", (last,), ("loss",), factors("b o"), factors(""), rows * width * 1.0, linear=both))
    return TensorProgram(tuple(tensors), tuple(ops), ("loss",), tuple(blocks))


def drawn(seed: int, num_ops: int) -> TensorProgram:
    """Return a random problem of products, sums and pointwise ops over matrices, values used up to twice."""
    chance = random.Random(seed)
    tensors = [Tensor("x", (24, 16), "input", element_bytes=chance.choice([1.0, 4.0]))]
    values, ops = ["x"], []
    weights: list[str] = []
    for i in range(num_ops):
        out, a = f"v{i}", chance.choice(values[-2:])
        segment = 0 if seed % 3 else i * 2 // num_ops
        flops = chance.choice([1e3, 1e5, 1e6])
        match chance.choice(["product", "product", "add", "pointwise", "row"]):
            case "product":
                if weights and chance.random() < 0.2:
                    w = chance.choice(weights)
                else:
                    w = f"w{i}"
                    weights.append(w)
                    tensors.append(Tensor(w, (16, 16), "parameter", element_bytes=chance.choice([1.0, 40.0])))
                ops.append(linear(f"op{i}", a, w, out, flops=flops, segment=segment))
            case "add":
                both = (frozenset({0, 1}),)
                other = chance.choice(values)
                operands = factors("b o", "b o")
                ops.append(
                    Op(f"op{i}", (a, other), (out,), operands, operands[:1], flops, linear=both, segment=segment)
                )
            case "pointwise":
                ops.append(Op(f"op{i}", (a,), (out,), factors("b o"), factors("b o"), flops, segment=segment))
            case _:
                one = factors("b o")
                ops.append(Op(f"op{i}", (a,), (out,), one, one, flops, whole=frozenset("o"), segment=segment))
        tensors.append(Tensor(out, (24, 16), element_bytes=chance.choice([1.0, 8.0])))
        values.append(out)
    read = {name for op in ops for name in op.reads}
    return TensorProgram(tuple(tensors), tuple(ops), tuple(v for v in values[1:] if v not in read))


def chain(seed: int) -> TensorProgram:
    """Return six ops after one another: a product among five that take each element, or each row, alone."""
    chance = random.Random(seed)
    product = chance.randrange(6)
    tensors = [Tensor("x", (24, 16), "input"), Tensor("w", (16, 16), "parameter", element_bytes=20.0)]
    ops: list[Op] = []
    for i in range(6):
        before, flops = f"v{i - 1}" if i else "x", chance.choice([1e3, 1e5, 1e6])
        tensors.append(Tensor(f"v{i}", (24, 16), element_bytes=chance.choice([1.0, 8.0])))
        one, whole = factors("b o"), frozenset(chance.choice(["b", "o", "o"]))
        alone = Op(f"op{i}", (before,), (f"v{i}",), one, one, flops, whole=whole, copyable=bool(chance.randrange(2)))
        ops.append(linear(f"op{i}", before, "w", f"v{i}", flops=flops) if i == product else alone)
    return TensorProgram(tuple(tensors), tuple(ops), ("v5",))


def expansion(
    problem: TensorProgram,
    speeds: tuple[float, ...] = (3e8, 1e8),
    ratios: Ratios | None = None,
    *,
    rules: SynthesisRules | None = None,
    limits: Limits | None = None,
    collectives: Collectives = LINES,
) -> Expansion:
    """Return the moves of a problem on devices of these speeds, in proportion to them unless told."""
    shares = ratios or (tuple(speed / sum(speeds) for speed in speeds),) * problem.num_segments
    prices = RatioPrices(speeds, collectives, shares)
    return Expansion(problem, prices, rules or SynthesisRules(), limits or Limits(num_devices=len(speeds)))
