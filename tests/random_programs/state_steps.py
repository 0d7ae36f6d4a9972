"""Steps of random models that write: to values in place, to buffers, and to parameters that other modules have too."""

from __future__ import annotations

from random import Random

from tests.random_programs.steps import meeting, step
from tests.random_programs.writer import Value, Writer

IN_PLACE = (
    "{0}.mul_(0.5)",
    "{0}.add_({1}, alpha=0.3)",
    "{0}.relu_()",
    "{0}.clamp_(-0.5, 1.5)",
    "{0}.masked_fill_({1} > 0.5, 0.25)",
    "{0}[..., 0] = 0.5",
    "{0}[..., -1:] += {1}[..., :1]",
    "{0}[..., :1].mul_(2)",
    "{0}.select(-1, 0).copy_({1}.sum(-1))",
    "{0}.transpose(-1, 1).sigmoid_()",
    "{0}.flatten(1)[:, ::2] *= 0.3",
    "{0}.tanh_().add_(1)",
    "{0}.fill_(0.1).sub_({1})",
    "{0}[{1} < 0] = 0.0",
    "{0}.copy_({1}.flip(-1))",
    "F.dropout({0}, 0.0, self.training, inplace=True)",
)


@step
def written(w: Writer, r: Random, h: Value) -> Value | None:
    """Write to a copy, as a whole or through a view of it."""
    made = w.value(f"{h.name}.clone()", h.dims)
    w.done.append(r.choice(IN_PLACE).format(made.name, h.name))
    return made


@step
def written_twice(w: Writer, r: Random, h: Value) -> Value | None:
    """Write to a value that an earlier one is a view of."""
    made, view = w.value(f"{h.name} * 1.5", h.dims), f"w{len(w.done)}"
    w.done += [f"{view} = {made.name}.flatten(1)", f"{made.name}.mul_(0.5)"]
    return w.value(f"{made.name} + {view}.view_as({made.name})", h.dims)


@step
def counted(w: Writer, r: Random, h: Value) -> Value | None:
    """Count steps in a buffer, and read it."""
    steps = w.buffer("torch.zeros(())")
    w.done.append(r.choice(("{0} += 1", "{0}.add_(1)", "{0} = {0} + 1")).format(steps))
    return w.value(f"{h.name} / (1 + 0.1 * {steps})" if r.random() < 0.5 else f"{h.name} * 1", h.dims)


@meeting
def running(w: Writer, r: Random, h: Value) -> Value | None:
    """Keep a mean over the rows of all steps in a buffer."""
    shape = ", ".join(map(str, h.dims))
    mean = w.buffer(f"torch.zeros({shape})")
    of_rows = r.choice(("mean(0)", "sum(0)", "amax(0)", "var(0)"))
    form = r.choice(("{0}.mul_(0.9).add_(0.1 * {1})", "{0}.lerp_({1}, 0.1)", "{0} = 0.9 * {0} + 0.1 * {1}"))
    w.done.append(form.format(mean, f"{h.name}.detach().{of_rows}"))
    return w.value(f"{h.name} - {mean}", h.dims)


@step
def written_buffer(w: Writer, r: Random, h: Value) -> Value | None:
    """Write to a buffer what a parameter has."""
    p, held = w.parameter((h.last,)), w.buffer(f"torch.randn({h.last})")
    w.done.append(f"{held}.copy_({held} * 0.5 + {p}.detach())")
    return w.value(f"{h.name} * {held} + {p}", h.dims)


@step
def twice(w: Writer, r: Random, h: Value) -> Value | None:
    """Call one module twice."""
    m = w.module(f"nn.Linear({h.last}, {h.last})")
    return w.value(f"{m}(torch.tanh({m}({h.name})))", h.dims)


@step
def tied(w: Writer, r: Random, h: Value) -> Value | None:
    """Multiply by a weight, and later by the same one, as it is or turned."""
    wide = r.choice((2, 3, 4, 6))
    first, second = w.module(f"nn.Linear({h.last}, {wide})"), w.module(f"nn.Linear({h.last}, {wide}, bias=False)")
    w.made.append(f"{second}.weight = {first}.weight")
    back = r.choice((f"{second}({h.name}) @ {first}.weight", f"F.linear({first}({h.name}), {second}.weight.T)"))
    return w.value(f"{h.name} + {back}", h.dims)


@step
def tied_to_earlier(w: Writer, r: Random, h: Value) -> Value | None:
    """Share the weight of an earlier product of the same size."""
    same = [line.split(" ")[0] for line in w.made if f"nn.Linear({h.last}, " in line]
    if not same:
        return None
    first = r.choice(same)
    return w.value(f"F.linear({h.name}, {first}.weight) @ {first}.weight", h.dims)


@step
def frozen(w: Writer, r: Random, h: Value) -> Value | None:
    """Multiply by what is not trained."""
    m = w.module(f"nn.Linear({h.last}, {h.last}).requires_grad_(False)")
    return w.value(f"{m}({h.name})", h.dims)
