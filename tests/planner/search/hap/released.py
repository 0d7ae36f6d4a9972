"""Models, devices and measured bandwidths of HAP's released code, in its own units.

FLOPs are those of its formulas, tensors count elements as if they were bytes, and what its rules do not allow
is marked whole: a linear layer is never cut on what it sums over, layer norm not on what it looks across,
attention only on the batch. Results of some ops are not to be exchanged.
"""

import math
from dataclasses import dataclass, field

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.hap.prices import Collectives
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram

V100, P100 = 3_858_755_112_937, 2_149_250_936_815
FAST, SLOW = 5_712_013_967_207, 3_009_904_927_648
EQUAL = 5_966_645_808_610

# bytes per second: all-gather, all-reduce, reduce-scatter, all-to-all


def of_bandwidths(
    all_gather: float,
    all_reduce: float,
    reduce_scatter: float,
    all_to_all: float,
    *,
    grouped: tuple[float, float] | None = None,
) -> Collectives:
    """Build them from measured bytes per second, without latency; `grouped`: all-gather, reduce-scatter."""
    ag, ar, rs, a2a = (Line(0.0, 1 / rate) for rate in (all_gather, all_reduce, reduce_scatter, all_to_all))
    group = tuple(Line(0.0, 1 / rate) for rate in grouped or ())
    return Collectives(ag, rs, ar, a2a, a2a, *group)


SET_H = of_bandwidths(815_418_707, 476_774_816, 876_490_907, 7_504_501_871)
SET_L = of_bandwidths(9_463_184_466, 5_906_161_310, 9_740_459_122, 24_588_140_722)

TWO_AND_TWO = Cluster.on_paper([V100, V100, P100, P100])
FOUR_EQUAL = Cluster.on_paper([EQUAL] * 4)


@dataclass
class Builder:
    """Collects tensors and ops; dims are letters, as in "blh"."""

    sizes: dict[str, int]
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    dims: dict[str, str] = field(default_factory=dict)

    def tensor(self, name: str, dims: str, kind: str = "value", *, movable: bool = True) -> str:
        shape = tuple(self.sizes[dim] for dim in dims)
        self.tensors.append(Tensor(name, shape, kind, element_bytes=1.0, movable=movable))  # type: ignore[arg-type]
        self.dims[name] = dims
        return name

    def op(self, name: str, reads: list[str], dims: str, flops: float, *, whole: str = "", **more: object) -> str:
        """Add an op; an operand "x:abc" is read with its dims called a, b, c."""
        pairs = [read.partition(":") for read in reads]
        made = self.tensor(name, dims, movable=bool(more.pop("movable", True)))
        names = tuple(name for name, *_ in pairs)
        operands = tuple(tuple(given or self.dims[name]) for name, _, given in pairs)
        backward = tuple(2 * flops if i == 0 else 0.0 for i in range(len(names)))
        if self.tensors[[t.name for t in self.tensors].index(names[0])].kind == "input":
            flops *= 3  # the released code counts the backward of the first op too
        op = Op(name, names, (made,), operands, (tuple(dims),), flops, backward, frozenset(whole), **more)  # type: ignore[arg-type]
        self.ops.append(op)
        return made

    def size(self, dims: str) -> int:
        return math.prod(self.sizes[dim] for dim in dims)

    def linear(self, name: str, x: str, out: str) -> str:
        *front, inner = self.dims[x]
        weight = self.tensor(f"{name}.weight", out + inner, "parameter")
        bias = self.tensor(f"{name}.bias", out, "parameter")
        flops = 3 * self.size(self.dims[x]) * self.sizes[out]
        return self.op(name, [x, weight, bias], "".join((*front, out)), flops, whole=inner)

    def pointwise(self, name: str, x: str) -> str:
        return self.op(name, [x], self.dims[x], 3 * self.size(self.dims[x]), movable=False)

    def add(self, name: str, x: str, y: str) -> str:
        both = (frozenset({0, 1}),)
        dims = self.dims[x]
        return self.op(name, [x, f"{y}:{dims}"], dims, self.size(dims), linear=both)

    def transpose(self, name: str, x: str, dims: str) -> str:
        return self.op(name, [x], dims, self.size(dims), linear=(frozenset({0}),))

    def norm(self, name: str, x: str) -> str:
        dims = self.dims[x]
        return self.op(name, [x], dims, 10 * self.size(dims), whole=dims[-1])

    def loss(self, x: str) -> TensorProgram:
        out = self.op("loss", [x], "", self.size(self.dims[x]), linear=(frozenset({0}),), movable=False)
        return TensorProgram(tuple(self.tensors), tuple(self.ops), (out,))


def mlp(layers: int, batch: int = 128, length: int = 128, width: int = 768) -> TensorProgram:
    """Return `layers` times a linear layer and a sigmoid, then a sum."""
    letters = "efghijkl"
    made = Builder({"b": batch, "s": length, **dict.fromkeys(letters, width)})
    x = made.tensor("x", "bse", "input")
    for layer in range(layers):
        x = made.pointwise(f"sigmoid{layer}", made.linear(f"linear{layer}", x, letters[layer + 1]))
    return made.loss(x)


def encoder(batch: int = 128, length: int = 128, width: int = 768, inner: int = 3072) -> TensorProgram:
    """Return a post-norm encoder layer with dropout and its loss; attention wants the length first."""
    made = Builder({"l": length, "n": batch, "e": width, "o": width, "f": inner, "h": width})
    x = made.tensor("x", "nle", "input")
    out = attention(made, made.transpose("to_length_first", x, "lne"))
    out = made.pointwise("dropout1", made.transpose("to_batch_first", out, "nlo"))
    x = made.norm("norm1", made.add("residual1", x, out))
    hidden = made.pointwise("dropout", made.pointwise("relu", made.linear("linear1", x, "f")))
    out = made.pointwise("dropout2", made.linear("linear2", hidden, "h"))
    x = made.norm("norm2", made.add("residual2", x, out))
    return made.loss(x)


def attention(made: Builder, x: str) -> str:
    """Add multi-head attention of four parameters; the released code does not count its projections' work."""
    made.sizes["v"] = 3 * made.sizes["e"]
    parameters = [
        made.tensor("in_proj.weight", "ve", "parameter"),
        made.tensor("in_proj.bias", "v", "parameter"),
        made.tensor("out_proj.weight", "oe", "parameter"),
        made.tensor("out_proj.bias", "o", "parameter"),
    ]
    length, batch, width = (made.sizes[dim] for dim in "lne")
    flops = 6 * length * batch * width * length + 5 * length * length * batch
    return made.op("attention", [x, *parameters], "lno", flops, whole="levo")
