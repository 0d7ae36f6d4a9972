"""What random models are made of: each step writes a statement that the value at hand can be given to.

A step draws its own numbers, so that it goes on being valid where others before it are taken away. Families follow the
files of the rule table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

from tests.random_programs.writer import SIZES, Value, Writer

Step = Callable[[Writer, Random, Value], "Value | None"]
"""Writes a statement on a value, and returns what it makes; None where that cannot be."""

STEPS: dict[str, Step] = {}
MEETING: set[str] = set()
"""Steps in which rows of the batch meet."""


def step(write: Step) -> Step:
    """Let models have a step."""
    STEPS[write.__name__] = write
    return write


def meeting(write: Step) -> Step:
    """Let models have a step in which rows meet."""
    MEETING.add(write.__name__)
    return step(write)


def _dim(r: Random, h: Value, least: int = 1) -> int | None:
    """Draw a dim of a value, not that of the rows, of a least size."""
    found = [i + 1 for i, size in enumerate(h.dims) if size >= least]
    return r.choice(found) if found else None


def _with(h: Value, dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if i + 1 == dim else old for i, old in enumerate(h.dims))


def _without(h: Value, dim: int) -> tuple[int, ...]:
    return tuple(old for i, old in enumerate(h.dims) if i + 1 != dim)


# pointwise


UNARY: Mapping[str, str] = {
    "relu": "torch.relu({})",
    "gelu": "F.gelu({})",
    "silu": "F.silu({})",
    "tanh": "torch.tanh({})",
    "softplus": "F.softplus({})",
    "bell": "torch.exp(-({} ** 2))",
    "log1p": "torch.log1p({}.abs())",
    "sqrt": "torch.sqrt({} ** 2 + 1)",
    "clamp": "{}.clamp(-1.0, 0.7)",
    "sine": "torch.sin({})",
    "negated": "1.0 - {}",
    "leaky": "F.leaky_relu({}, 0.2)",
    "atan": "torch.atan2({}, {} + 3.0)",
    "in place": "F.relu({} + 0, inplace=True)",
    "detached": "{0} * {0}.detach()",
    "masked": "{0}.masked_fill({0} > 0.8, 0.0)",
    "chosen": "torch.where({0} > 0, {0}, 0.1 * {0})",
    "xlogy": "torch.xlogy({0}, {0}.abs() + 1)",
    "zeros": "{0} + torch.zeros_like({0}) * 2",
    "float32": "{0}.float().double() * 0.5",
}


@step
def unary(w: Writer, r: Random, h: Value) -> Value | None:
    return w.value(r.choice(list(UNARY.values())).format(h.name, h.name), h.dims)


@step
def scaled(w: Writer, r: Random, h: Value) -> Value | None:
    """Meet a parameter that is broadcast."""
    dims = tuple(r.choice((size, size, 1)) for size in h.dims[r.randrange(len(h.dims)) :])
    p = w.parameter(dims, 1.0)
    return w.value(r.choice(("{} * {}", "{} + {}", "{} - {}", "{} / (1.5 + {} ** 2)")).format(h.name, p), h.dims)


@step
def met(w: Writer, r: Random, h: Value) -> Value | None:
    """Meet an earlier value of the same shape."""
    others = [v for v in w.values if v.dims == h.dims and v is not h]
    if not others:
        return None
    text = r.choice(("{} + {}", "{} * torch.sigmoid({})", "{} - 0.5 * {}", "torch.maximum({}, {})"))
    return w.value(text.format(h.name, r.choice(others).name), h.dims)


@step
def dropped(w: Writer, r: Random, h: Value) -> Value | None:
    return w.value(f"F.dropout({h.name}, 0.3, self.training)", h.dims) if r.random() < 0.3 else None


@step
def gated(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 2)
    if dim is None or h.dims[dim - 1] % 2:
        return None
    return w.value(f"F.glu({h.name}, {dim})", _with(h, dim, h.dims[dim - 1] // 2))


# products


@step
def linear(w: Writer, r: Random, h: Value) -> Value | None:
    out = r.choice(SIZES)
    bias = r.choice(("", ", bias=False"))
    return w.value(f"{w.module(f'nn.Linear({h.last}, {out}{bias})')}({h.name})", (*h.dims[:-1], out))


@step
def mlp(w: Writer, r: Random, h: Value) -> Value | None:
    wide = r.choice((4, 6, 8, 12))
    up, down = w.module(f"nn.Linear({h.last}, {wide})"), w.module(f"nn.Linear({wide}, {h.last})")
    act = r.choice(("torch.relu", "F.gelu", "torch.tanh"))
    return w.value(f"{h.name} + {down}({act}({up}({h.name})))", h.dims)


@step
def product(w: Writer, r: Random, h: Value) -> Value | None:
    out = r.choice(SIZES)
    p = w.parameter((h.last, out))
    forms = [f"{h.name} @ {p}", f"torch.einsum('...k,kn->...n', {h.name}, {p})", f"torch.matmul({h.name}, {p})"]
    if len(h.dims) == 1:
        forms += [f"torch.mm({h.name}, {p})", f"torch.addmm({w.parameter((out,))}, {h.name}, {p})"]
    return w.value(r.choice(forms), (*h.dims[:-1], out))


@step
def from_the_left(w: Writer, r: Random, h: Value) -> Value | None:
    """Multiply another dim than the last."""
    if len(h.dims) < 2:
        return None
    out = r.choice(SIZES)
    p = w.parameter((out, h.dims[-2]))
    return w.value(f"{p} @ {h.name}", (*h.dims[:-2], out, h.last))


@step
def itself(w: Writer, r: Random, h: Value) -> Value | None:
    """Compare what stands in a row with each other."""
    if len(h.dims) != 2:
        return None
    a = h.dims[0]
    return w.value(r.choice((f"{h.name} @ {h.name}.mT", f"torch.bmm({h.name}, {h.name}.transpose(1, 2))")), (a, a))


@step
def attention(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) != 2:
        return None
    length, width = h.dims
    heads = r.choice([n for n in (1, 2, 3, 4) if width % n == 0])
    q, k, v = (w.module(f"nn.Linear({width}, {width})") for _ in range(3))
    shape = f"{length}, {heads}, {width // heads}"
    q, k, v = (f"{m}({h.name}).unflatten(1, ({length},)).view(-1, {shape}).transpose(1, 2)" for m in (q, k, v))
    causal = r.choice((", is_causal=True", ""))
    text = f"F.scaled_dot_product_attention({q}, {k}, {v}{causal}).transpose(1, 2).reshape(-1, {length}, {width})"
    return w.value(f"{h.name} + {text}", h.dims)


@step
def bilinear(w: Writer, r: Random, h: Value) -> Value | None:
    out = r.choice(SIZES)
    return w.value(f"{w.module(f'nn.Bilinear({h.last}, {h.last}, {out})')}({h.name}, {h.name})", (*h.dims[:-1], out))


# normalization


@step
def normed(w: Writer, r: Random, h: Value) -> Value | None:
    kinds = [f"nn.LayerNorm({h.last})", f"nn.RMSNorm({h.last})", "nn.Softmax(-1)", "nn.LogSoftmax(-1)"]
    if len(h.dims) > 1:
        kinds += [f"nn.GroupNorm({1 if h.dims[0] % 2 else 2}, {h.dims[0]})", "nn.Softmax(1)"]
    return w.value(f"{w.module(r.choice(kinds))}({h.name})", h.dims) if math.prod(h.dims) > 1 else None


@meeting
def batch_norm(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) > 2:
        return None
    return w.value(f"{w.module(f'nn.BatchNorm1d({h.dims[0]})')}({h.name})", h.dims)


@step
def unit(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    return w.value(f"F.normalize({h.name}, dim={dim})", h.dims)


# views and slices


@step
def merged(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) < 2:
        return None
    at = r.randrange(len(h.dims) - 1)
    dims = (*h.dims[:at], h.dims[at] * h.dims[at + 1], *h.dims[at + 2 :])
    if dims[at] > 24:
        return None
    return w.value(f"{h.name}.flatten({at + 1}, {at + 2})", dims)


@step
def parted(w: Writer, r: Random, h: Value) -> Value | None:
    found = [(i, n) for i, size in enumerate(h.dims) for n in (2, 3, 4) if size % n == 0 and size > n]
    if not found or len(h.dims) > 3:
        return None
    at, n = r.choice(found)
    dims = (*h.dims[:at], n, h.dims[at] // n, *h.dims[at + 1 :])
    shape = ", ".join(map(str, dims))
    forms = (
        f"{h.name}.unflatten({at + 1}, ({n}, -1))",
        f"{h.name}.view(-1, {shape})",
        f"{h.name}.reshape(-1, {shape})",
    )
    return w.value(r.choice(forms), dims)


@step
def turned(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) < 2:
        return None
    order = list(range(len(h.dims)))
    r.shuffle(order)
    text = ", ".join(str(i + 1) for i in order)
    return w.value(f"{h.name}.permute(0, {text}){r.choice(('', '.contiguous()'))}", tuple(h.dims[i] for i in order))


@step
def sliced(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 3)
    if dim is None:
        return None
    size = h.dims[dim - 1]
    before = ":, " * dim
    text, left = r.choice(((f"1:{size}", size - 1), ("::2", (size + 1) // 2), (f":{size - 1}", size - 1)))
    return w.value(f"{h.name}[{before}{text}]", _with(h, dim, left))


@step
def picked(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    if dim is None or len(h.dims) < 2:
        return None
    return w.value(f"{h.name}.select({dim}, {r.randrange(h.dims[dim - 1])})", _without(h, dim))


@step
def joined(w: Writer, r: Random, h: Value) -> Value | None:
    """Join values that differ in one dim at most; one alone too."""
    dim = _dim(r, h)
    others = [v for v in w.values if len(v.dims) == len(h.dims) and _without(v, dim) == _without(h, dim)]
    found = [h, *r.sample(others, min(len(others), r.randrange(3)))]
    size = sum(v.dims[dim - 1] for v in found)
    if size > 24:
        return None
    return w.value(f"torch.cat([{', '.join(v.name for v in found)}], {dim})", _with(h, dim, size))


@step
def stacked(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) > 2:
        return None
    at = r.randrange(1, len(h.dims) + 2)
    return w.value(
        f"torch.stack([{h.name}, -{h.name}, {h.name} ** 2], {at})", (*h.dims[: at - 1], 3, *h.dims[at - 1 :])
    )


@step
def pieces(w: Writer, r: Random, h: Value) -> Value | None:
    """Cut into two, and let these meet."""
    dim = _dim(r, h, 2)
    if dim is None or h.dims[dim - 1] % 2:
        return None
    half = h.dims[dim - 1] // 2
    text = r.choice(
        (f"{h.name}.chunk(2, {dim})", f"{h.name}.split({half}, {dim})", f"torch.tensor_split({h.name}, 2, {dim})")
    )
    name = f"v{len(w.done)}"
    w.done.append(f"{name}a, {name}b = {text}")
    forms = ((f"{name}a * torch.sigmoid({name}b)", half), (f"torch.cat([-{name}b, {name}a], {dim})", 2 * half))
    text, size = r.choice(forms)
    return w.value(text, _with(h, dim, size))


@step
def padded(w: Writer, r: Random, h: Value) -> Value | None:
    if h.last > 8:
        return None
    before, after = r.choice(((1, 0), (0, 2), (1, 1)))
    value = r.choice(("", ", value=0.5"))
    return w.value(f"F.pad({h.name}, ({before}, {after}){value})", (*h.dims[:-1], h.last + before + after))


@step
def repeated(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    size = h.dims[dim - 1]
    if size > 6:
        return None
    times = ", ".join("2" if i == dim else "1" for i in range(len(h.dims) + 1))
    forms = (f"{h.name}.repeat({times})", f"{h.name}.repeat_interleave(2, {dim})", f"torch.cat([{h.name}] * 2, {dim})")
    return w.value(r.choice(forms), _with(h, dim, 2 * size))


@step
def moved(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    return w.value(r.choice((f"{h.name}.flip({dim})", f"{h.name}.roll(1, {dim})")), h.dims)


@step
def windows(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 4)
    if dim is None or len(h.dims) > 2:
        return None
    count = (h.dims[dim - 1] - 2) // 2 + 1
    return w.value(f"{h.name}.unfold({dim}, 2, 2)", (*_with(h, dim, count), 2))


@step
def triangle(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) < 2:
        return None
    return w.value(f"{h.name}.{r.choice(('tril', 'triu'))}()", h.dims)


# look-ups


@step
def indexed(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    size, count = h.dims[dim - 1], r.choice((2, 3, 5))
    places = w.buffer(f"torch.tensor({[r.randrange(size) for _ in range(count)]})")
    before = ":, " * dim
    return w.value(
        r.choice((f"{h.name}.index_select({dim}, {places})", f"{h.name}[{before}{places}]")), _with(h, dim, count)
    )


@step
def best(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 2)
    if dim is None:
        return None
    size = h.dims[dim - 1]
    forms = ((f"{h.name}.topk({size - 1}, {dim}).values", size - 1), (f"{h.name}.sort({dim}).values", size))
    text, left = r.choice(forms)
    return w.value(text, _with(h, dim, left))


@step
def gathered(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 2)
    return None if dim is None else w.value(f"{h.name}.gather({dim}, {h.name}.argsort({dim}))", h.dims)


@step
def added_at(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    size = h.dims[dim - 1]
    places = w.buffer(f"torch.tensor({[r.randrange(3) for _ in range(size)]})")
    shape = ", ".join(map(str, _with(h, dim, 3)))
    text = f"{h.name}.new_zeros({h.name}.shape[0], {shape}).index_add({dim}, {places}, {h.name})"
    return w.value(text, _with(h, dim, 3))


# reductions and sums along


REDUCED = ("sum", "mean", "amax", "std", "var", "logsumexp", "prod", "norm")


@step
def reduced(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 2)
    if dim is None:
        return None
    keep = len(h.dims) == 1 or r.random() < 0.5
    dims = _with(h, dim, 1) if keep else _without(h, dim)
    return w.value(f"{h.name}.{r.choice(REDUCED)}(dim={dim}, keepdim={keep})", dims)


@step
def centred(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h, 2)
    if dim is None:
        return None
    return w.value(f"{h.name} - {h.name}.{r.choice(('mean', 'amax', 'sum'))}(dim={dim}, keepdim=True)", h.dims)


@step
def along(w: Writer, r: Random, h: Value) -> Value | None:
    dim = _dim(r, h)
    return w.value(f"{h.name}.{r.choice(('cumsum', 'cumprod', 'logcumsumexp'))}({dim})", h.dims)


@step
def spectrum(w: Writer, r: Random, h: Value) -> Value | None:
    return (
        w.value(f"torch.fft.irfft(torch.fft.rfft({h.name}, dim=-1), n={h.last}, dim=-1)", h.dims)
        if h.last > 2
        else None
    )


@step
def rotated(w: Writer, r: Random, h: Value) -> Value | None:
    """Rotate pairs by complex numbers."""
    if h.last % 2:
        return None
    angle = w.parameter((h.last // 2,))
    text = f"torch.view_as_complex({h.name}.unflatten(-1, (-1, 2)).contiguous())"
    turn = f"torch.polar(torch.ones_like({angle}), {angle})"
    return w.value(f"torch.view_as_real({text} * {turn}).flatten(-2)", h.dims)


# convolution


@step
def convolved(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) != 2 or h.last < 3:
        return None
    channels, out = h.dims[0], r.choice((2, 4, 6))
    groups = r.choice([g for g in (1, 2) if channels % g == 0])
    conv = w.module(f"nn.Conv1d({channels}, {out}, 3, padding=1, groups={groups})")
    return w.value(f"{conv}({h.name})", (out, h.last))


@step
def strided(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) != 2 or h.last < 4:
        return None
    kind = r.choice((f"nn.Conv1d({h.dims[0]}, {h.dims[0]}, 2, stride=2)", "nn.AvgPool1d(2)", "nn.MaxPool1d(2)"))
    return w.value(f"{w.module(kind)}({h.name})", (h.dims[0], h.last // 2))


@step
def recurrent(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) != 2 or r.random() < 0.5:
        return None
    out = r.choice((3, 4))
    cell = w.module(f"nn.{r.choice(('GRU', 'LSTM', 'RNN'))}({h.last}, {out}, batch_first=True)")
    return w.value(f"{cell}({h.name})[0]", (h.dims[0], out))


# rows meet


MET_BY_ROWS = (
    "{0} - {0}.mean(0, keepdim=True)",
    "{0} / ({0}.std(0, keepdim=True) + 1)",
    "{0} - {0}.amax(0, keepdim=True)",
    "{0}.softmax(0)",
    "{0}.cumsum(0)",
    "{0}.flip(0)",
    "{0}.roll(1, 0)",
    "{0}.sort(0).values",
    "{0} / (1 + {0}.sum(0).abs())",
    "{0} - {0}.median(0).values",
    "{0} * ({0} > {0}.quantile(0.5, dim=0)).double()",
    "{0} + torch.cat([{0}[1:], {0}[:1]])",
    "{0} * torch.arange({0}.shape[0]).view(-1, *[1] * ({0}.dim() - 1))",
    "{0} - {0}[0]",
    "{0}[{0}.flatten(1).sum(1).argsort()]",
    "{0} * {0}.shape[0]",
)


@meeting
def rows_meet(w: Writer, r: Random, h: Value) -> Value | None:
    return w.value(r.choice(MET_BY_ROWS).format(h.name), h.dims)


@meeting
def rows_compared(w: Writer, r: Random, h: Value) -> Value | None:
    """Give each row what all others have, by how like they are."""
    if len(h.dims) != 1:
        return None
    return w.value(f"({h.name} @ {h.name}.T).softmax(-1) @ {h.name}", h.dims)
