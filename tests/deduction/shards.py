"""Run an op on simulated shards of one factor, forward and backward, as its rule says, and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetu_fx.deduction.rules.call import Call, Path, make_call
from hetu_fx.deduction.rules.registry import find_rule
from hetu_fx.deduction.rules.rule import Dims, Factoring, factor_names

Cut = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """Arguments for one call of an op. `values` False: results are random, only shapes can be compared."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True
    fixed: tuple[int, ...] = ()  # operands that have no gradient
    unit: int = 1  # cut points are multiples of it (kernels that want aligned strides)


def sample(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


def find_op(name: str) -> Any:
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


@dataclass(frozen=True)
class Trial:
    """An op, one call of it, and what its rule says."""

    target: Any
    sample: Sample
    call: Call
    factoring: Factoring
    results: tuple[torch.Tensor, ...]

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {name: size.hint for name, size in self.factoring.sizes.items()}
        shapes = [*(operand.shape for operand in self.call.operands), *self.call.results]
        for shape, dims in zip(shapes, (*self.factoring.operands, *self.factoring.results), strict=True):
            for size, dim in zip(shape, dims, strict=True):
                sizes.update({name: size.hint for name in dim if name not in self.factoring.sizes})
        return sizes

    def cuttable(self) -> list[str]:
        unread = self.factoring.unread
        read = [dims for i, dims in enumerate(self.factoring.operands) if i not in unread]
        # The forms of sharded and placed factors have tests of their own.
        stays = self.factoring.whole | self.factoring.sharded | self.factoring.placed
        used = factor_names((*read, *self.factoring.results)) - stays
        return [name for name, size in self.sizes.items() if size > 1 and name in used]


def trial_of(name: str, given: Sample) -> Trial:
    target = find_op(name)
    results = flat(target(*given.args, **given.kwargs))
    call = make_call(target, given.args, given.kwargs, results, as_tensor)
    rule = find_rule(target)
    assert rule is not None
    return Trial(target, given, call, rule.factor(call), results)


def as_tensor(item: Any) -> torch.Tensor | None:
    return item if isinstance(item, torch.Tensor) else None


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a result; a gradient that was not asked for is none."""
    return tuple(one for one in result if one is not None) if isinstance(result, tuple | list) else (result,)


def cuts_of(size: int, unit: int) -> list[list[Cut]]:
    """Return an even and a 2:1 cut in two, or none if there are not two units."""
    count = size // unit
    places = dict.fromkeys(((count + 1) // 2, count - max(count // 3, 1))) if count > 1 else ()
    return [[(0, at * unit), (at * unit, size)] for at in places]


def take(tensor: torch.Tensor, dims: Dims, name: str, sizes: dict[str, int], cut: Cut) -> torch.Tensor:
    """Return the shard of a tensor: the dim with the factor is viewed as its factors, which are cut, and back."""
    for dim, factors in enumerate(dims):
        if name in factors:
            at = factors.index(name)
            outer = math.prod(sizes[other] for other in factors[:at])
            view = tensor.unflatten(dim, (outer, sizes[name], tensor.size(dim) // outer // sizes[name]))
            return view.narrow(dim + 1, cut[0], cut[1] - cut[0]).flatten(dim, dim + 2)
    return tensor


def join(parts: Sequence[torch.Tensor], dims: Dims, name: str, sizes: dict[str, int]) -> torch.Tensor:
    for dim, factors in enumerate(dims):
        if name in factors:
            outer = math.prod(sizes[other] for other in factors[: factors.index(name)])
            inner = math.prod(sizes[other] for other in factors[factors.index(name) + 1 :])
            views = [part.unflatten(dim, (outer, -1, inner)) for part in parts]
            return torch.cat(views, dim + 1).flatten(dim, dim + 2)
    raise AssertionError(f"no dim of {dims} has {name}")


def has(dims: Dims, name: str) -> bool:
    return any(name in factors for factors in dims)


def replaced_args(given: Sample, values: dict[Path, Any]) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = list(given.args), dict(given.kwargs)
    for path, value in values.items():
        container: Any = args if isinstance(path[0], int) else kwargs
        for step in path[:-1]:
            container[step] = list(container[step])
            container = container[step]
        container[path[-1]] = value
    return args, kwargs


def at_path(given: Sample, path: Path) -> Any:
    value: Any = given.args if isinstance(path[0], int) else given.kwargs
    for step in path:
        value = value[step]
    return value


@dataclass(frozen=True)
class Shard:
    """The run of an op on one shard: its results and the gradients of its float operands by position."""

    results: tuple[torch.Tensor, ...]
    gradients: dict[int, torch.Tensor]


def gradients_of(
    results: Sequence[torch.Tensor], leaves: dict[int, torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    pairs = [(result, cot) for result, cot in zip(results, cotangents, strict=True) if result.requires_grad]
    if not pairs:
        return {}
    found = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [c for _, c in pairs], allow_unused=True)
    return {
        position: torch.zeros_like(leaf) if grad is None else grad
        for (position, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def run(trial: Trial, operands: Sequence[torch.Tensor], literals: dict[Path, Any], cotangents: Any) -> Shard:
    """Run the op on the operands; `cotangents(results)` gives the gradients of its results."""
    leaves = {
        i: operand.detach().clone().requires_grad_()
        for i, operand in enumerate(operands)
        if operand.is_floating_point() and i not in trial.sample.fixed
    }
    passed = [leaves.get(i, operand.clone()) for i, operand in enumerate(operands)]
    paths = {operand.path: value for operand, value in zip(trial.call.operands, passed, strict=True)}
    args, kwargs = replaced_args(trial.sample, {**paths, **literals})
    results = flat(trial.target(*args, **kwargs))
    return Shard(tuple(r.detach() for r in results), gradients_of(results, leaves, cotangents(results)))


def check_factor(trial: Trial, name: str, cuts: list[Cut]) -> None:
    """Compare the op on shards of one factor with the op on the whole, forward and backward."""
    operands = [operand.source for operand in trial.call.operands]
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in trial.results]
    whole = run(trial, operands, {}, lambda results: full)
    shards = [run_shard(trial, name, cut, index, full) for index, cut in enumerate(cuts)]
    compare(
        combined_results(trial, name, cuts, shards),
        whole.results,
        f"{trial.call.op} results cut along {name}",
    )
    if whole.gradients:
        gradients = combined_gradients(trial, name, shards)
        compare(gradients, tuple(whole.gradients.values()), f"{trial.call.op} gradients cut along {name}")


def weight(trial: Trial, name: str, cut: Cut) -> float:
    return (cut[1] - cut[0]) / trial.sizes[name] if name in trial.factoring.averaged else 1.0


def run_shard(trial: Trial, name: str, cut: Cut, index: int, full: Sequence[torch.Tensor]) -> Shard:
    sizes, factoring = trial.sizes, trial.factoring
    local = [
        operand.source if i in factoring.unread else take(operand.source, dims, name, sizes, cut)
        for i, (operand, dims) in enumerate(zip(trial.call.operands, factoring.operands, strict=True))
    ]
    for position in factoring.additive:
        if index and name in factoring.reduced and not has(factoring.operands[position], name):
            local[position] = torch.zeros_like(local[position])
    own = {**sizes, name: cut[1] - cut[0]}
    literals = {lit.path: math.prod(own[n] for n in lit.names) for lit in factoring.literals if name in lit.names}
    literals = {path: size for path, size in literals.items() if at_path(trial.sample, path) != -1}
    cotangents = [take(c, dims, name, sizes, cut) for c, dims in zip(full, factoring.results, strict=True)]
    scaled = [
        c if has(dims, name) else c * weight(trial, name, cut)
        for c, dims in zip(cotangents, factoring.results, strict=True)
    ]
    return run(trial, local, literals, lambda results: scaled)


def combined_results(trial: Trial, name: str, cuts: list[Cut], shards: Sequence[Shard]) -> tuple[torch.Tensor, ...]:
    results = []
    for i, dims in enumerate(trial.factoring.results):
        parts = [shard.results[i] for shard in shards]
        if has(dims, name):
            results.append(join(parts, dims, name, trial.sizes))
        elif name in trial.factoring.reduced:
            weights = [weight(trial, name, cut) for cut in cuts]
            results.append(sum(w * p if w != 1 else p for w, p in zip(weights, parts, strict=True)))
        else:
            compare((parts[1],), (parts[0],), f"{trial.call.op} result {i} that lacks {name}")
            results.append(parts[0])
    return tuple(results)


def combined_gradients(trial: Trial, name: str, shards: Sequence[Shard]) -> tuple[torch.Tensor, ...]:
    gradients = []
    for position in shards[0].gradients:
        dims = trial.factoring.operands[position]
        parts = [shard.gradients[position] for shard in shards]
        once = position in trial.factoring.additive and name in trial.factoring.reduced
        unread = position in trial.factoring.unread
        gradients.append(
            parts[0] if unread or (once and not has(dims, name))
            else join(parts, dims, name, trial.sizes) if has(dims, name)
            else sum(parts)
        )  # fmt: skip
    return tuple(gradients)


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}"
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if other.dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance)


def summands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part = x * 0.25 if x.is_floating_point() or x.is_complex() else x // 2
    return part, x - part


def check_linear(trial: Trial, group: frozenset[int]) -> None:
    """Check that two summands of the operands of a group give two summands of the result."""
    operands = [operand.source for operand in trial.call.operands]
    parts = {i: summands(operands[i]) for i in group}
    halves = []
    for half in (0, 1):
        passed = [parts[i][half] if i in group else x for i, x in enumerate(operands)]
        halves.append(run(trial, passed, {}, lambda results: [torch.zeros_like(r) for r in results]))
    sums = tuple(a + b for a, b in zip(halves[0].results, halves[1].results, strict=True))
    compare(sums, trial.results, f"{trial.call.op} as a linear function of operands {sorted(group)}")
