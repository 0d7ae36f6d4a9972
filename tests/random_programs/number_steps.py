"""Steps of random models with numbers that are complex or whole, and with ops that have several results."""

from __future__ import annotations

import math
from random import Random

from tests.random_programs.steps import step
from tests.random_programs.writer import Dims, Value, Writer


def _complex(w: Writer, dims: Dims) -> str:
    shape = ", ".join(map(str, dims))
    return w.held("p", f"nn.Parameter(0.3 * torch.randn({shape}, dtype=torch.complex128))")


def _form(r: Random, made: str) -> str:
    """Return real numbers that are made of complex ones, of the same shape."""
    return r.choice(("{}.real", "{}.imag", "{}.abs()", "({0} * {0}.conj()).real", "2 * {}.real", "{}.angle()")).format(
        made
    )


@step
def fourier(w: Writer, r: Random, h: Value) -> Value | None:
    """Filter frequencies by complex parameters."""
    if h.last < 3:
        return None
    kept = h.last // 2 + 1
    p = _complex(w, (kept,))
    return w.value(f"torch.fft.irfft(torch.fft.rfft({h.name}) * {p}, n={h.last})", h.dims)


@step
def fourier_mixed(w: Writer, r: Random, h: Value) -> Value | None:
    """Mix channels of the frequencies, as neural operators do."""
    if len(h.dims) != 2 or h.last < 3:
        return None
    kept, out = h.last // 2 + 1, r.choice((2, 3, 4))
    p = _complex(w, (h.dims[0], out, kept))
    text = f"torch.einsum('bik,iok->bok', torch.fft.rfft({h.name}), {p})"
    return w.value(f"torch.fft.irfft({text}, n={h.last})", (out, h.last))


@step
def complex_product(w: Writer, r: Random, h: Value) -> Value | None:
    out = r.choice((2, 3, 5))
    p, bias = _complex(w, (h.last, out)), _complex(w, (out,))
    made = w.value(f"{h.name}.to(torch.complex128) @ {p} + {bias}", (*h.dims[:-1], out))
    w.values.pop()
    return w.value(_form(r, made.name), made.dims)


@step
def complex_elements(w: Writer, r: Random, h: Value) -> Value | None:
    p = w.parameter((h.last,))
    made = r.choice(
        (
            f"torch.complex({h.name}, -{h.name} * {p})",
            f"torch.polar({h.name}.abs() + 0.5, {h.name} * {p})",
            f"torch.exp(torch.complex(-{h.name}.abs(), {h.name} + {p}))",
            f"({h.name} + 1j * {p})",
        )
    )
    name = f"c{len(w.done)}"
    w.done.append(f"{name} = {made}")
    return w.value(_form(r, f"({name} ** 2 + {name})"), h.dims)


@step
def state_space(w: Writer, r: Random, h: Value) -> Value | None:
    """Convolve by a kernel of powers of complex numbers, as diagonal state spaces do."""
    if h.last < 2:
        return None
    p = w.parameter((3,))
    q = _complex(w, (3,))
    places = f"torch.arange({h.last}, dtype=torch.float64)"
    kernel = f"(({q}[:, None] * torch.exp(torch.complex(-{p}.exp(), {p})[:, None] * {places})).sum(0)).real"
    n = 2 * h.last
    return w.value(
        f"torch.fft.irfft(torch.fft.rfft({h.name}, n={n}) * torch.fft.rfft({kernel}, n={n}), n={n})[..., :{h.last}]",
        h.dims,
    )


@step
def looked_up(w: Writer, r: Random, h: Value) -> Value | None:
    """Look up whole numbers that are made of real ones."""
    if len(h.dims) > 2:
        return None
    tokens, out = r.choice((3, 5, 8)), r.choice((2, 4, 5))
    table = w.module(f"nn.Embedding({tokens}, {out})")
    ids = f"({h.name}.detach().sigmoid() * {tokens}).long().clamp(0, {tokens - 1})"
    return w.value(f"{table}({ids}) * {h.name}.unsqueeze(-1)", (*h.dims, out))


@step
def coded(w: Writer, r: Random, h: Value) -> Value | None:
    """Take the nearest of a book of codes, with the gradient passed straight on."""
    book = w.parameter((4, h.last))
    near = f"torch.cdist({h.name}.reshape(-1, {h.last}), {book}).argmin(-1)"
    made = w.value(f"{book}[{near}].view_as({h.name})", h.dims)
    return w.value(f"{h.name} + ({made.name} - {h.name}).detach() + 0.1 * {made.name}", h.dims)


@step
def spread(w: Writer, r: Random, h: Value) -> Value | None:
    """Write each number where its size says."""
    dim = r.randrange(1, len(h.dims) + 1)
    size = h.dims[dim - 1]
    places = f"({h.name}.detach().sigmoid() * {size}).long().clamp(max={size - 1})"
    form = r.choice(
        (
            "torch.zeros_like({0}).scatter_add({1}, {2}, {0})",
            "{0}.scatter({1}, {2}, 0.5 * {0})" if size == 1 else "{0}.gather({1}, {2})",
            "{0}.scatter_reduce({1}, {2}, {0}, reduce='mean')",
        )
    )
    return w.value(form.format(h.name, dim, places), h.dims)


@step
def two_results(w: Writer, r: Random, h: Value) -> Value | None:
    """Use both results of an op."""
    dim = r.randrange(1, len(h.dims) + 1)
    if h.dims[dim - 1] < 2:
        return None
    a, b = f"a{len(w.done)}", f"b{len(w.done)}"
    forms = (
        (f"torch.max({h.name}, {dim}, keepdim=True)", f"{h.name} - {a} + 0.1 * {b}"),
        (f"torch.sort({h.name}, {dim})", f"{a} * (1 + {b})"),
        (f"torch.var_mean({h.name}, {dim}, keepdim=True)", f"({h.name} - {b}) / ({a} + 1).sqrt()"),
        (f"torch.aminmax({h.name}, dim={dim}, keepdim=True)", f"({h.name} - {a}) / ({b} - {a} + 1)"),
        (f"torch.frexp({h.name})", f"{h.name} * {b}"),
        (f"torch.topk({h.name}, {h.dims[dim - 1]}, {dim})", f"{a} + {b}"),
        (f"torch.cummax({h.name}, {dim})", f"{a} - 0.5 * {b}"),
    )
    made, used = r.choice(forms)
    w.done.append(f"{a}, {b} = {made}")
    return w.value(used, h.dims)


@step
def unbound(w: Writer, r: Random, h: Value) -> Value | None:
    """Take a value apart, and use some of it."""
    dim = r.randrange(1, len(h.dims) + 1)
    size = h.dims[dim - 1]
    if len(h.dims) < 2 or size > 4:
        return None
    parts = f"u{len(w.done)}"
    w.done.append(f"{parts} = {h.name}.unbind({dim})")
    dims = tuple(old for i, old in enumerate(h.dims) if i + 1 != dim)
    return w.value(f"{parts}[0] * torch.sigmoid({parts}[-1])", dims)


@step
def states(w: Writer, r: Random, h: Value) -> Value | None:
    """Use the last states of a recurrent module, which runs with time first or not."""
    if len(h.dims) != 2 or r.random() < 0.5:
        return None
    out, first = r.choice((2, 3)), r.random() < 0.5
    cell = w.module(f"nn.LSTM({h.last}, {out}, batch_first={not first})")
    made, last, kept = (f"{letter}{len(w.done)}" for letter in "ole")
    given = f"{h.name}.transpose(0, 1)" if first else h.name
    w.done.append(f"{made}, ({last}, {kept}) = {cell}({given})")
    made = f"{made}.transpose(0, 1)" if first else made
    return w.value(f"{made} + 0.1 * ({last}[-1] + {kept}[0]).unsqueeze(1)", (h.dims[0], out))


@step
def time_first(w: Writer, r: Random, h: Value) -> Value | None:
    """Compute with rows in the second dim, as torch's modules do if nothing is said."""
    if len(h.dims) != 2:
        return None
    heads = r.choice([n for n in (1, 2, 3) if h.last % n == 0])
    t = f"t{len(w.done)}"
    w.done.append(f"{t} = {h.name}.transpose(0, 1)")
    forms = (
        f"{w.module(f'nn.MultiheadAttention({h.last}, {heads})')}({t}, {t}, {t})[0]",
        f"torch.cumsum({t}, 0)",
        f"{t} - {t}.mean((0, 2), keepdim=True)",
        f"F.layer_norm({t}, ({h.last},))",
        f"{t}.softmax(0)",
    )
    return w.value(f"({r.choice(forms)}).transpose(0, 1)", h.dims)


@step
def convolved_image(w: Writer, r: Random, h: Value) -> Value | None:
    if len(h.dims) != 3 or min(h.dims[1:]) < 2:
        return None
    channels, out = h.dims[0], r.choice((2, 3, 4))
    forms = (f"nn.Conv2d({channels}, {out}, 3, padding=1)", f"nn.ConvTranspose2d({channels}, {out}, 3, padding=1)")
    conv = w.module(r.choice(forms))
    made = w.value(f"{conv}({h.name})", (out, *h.dims[1:]))
    return w.value(f"F.relu({made.name}, inplace=True)", made.dims) if math.prod(made.dims) <= 96 else made
