"""One call of a leaf: how the module is called, what it makes of values, and the gradients of that.

Nothing is kept between calls. The backward calls the module again, on the same values, the state that was there before
and the same random numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import listing_weights, version
from hetu_fx.errors import StateError
from hetu_fx.graph import meta
from hetu_fx.graph.containers import Constant, Opaque, TensorSlot, Tree, flatten, unflatten, walk
from hetu_fx.graph.leaves.result_shapes import read_form
from hetu_fx.graph.leaves.uses import note_uses
from hetu_fx.graph.leaves.work import NO_WORK, WorkBySize
from hetu_fx.graph.tracing.autocasts import Autocasts, casting

_INNER = "inner"


class Holder(nn.Module):
    """Calls the forward of a module, or a function that has no state, without hooks: a trace sees these."""

    def __init__(self, called: Callable[..., Any]) -> None:
        super().__init__()
        self.called = None if isinstance(called, nn.Module) else called
        if isinstance(called, nn.Module):
            self.inner = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        with listing_weights(self):
            return self.inner.forward(*args, **kwargs) if self.called is None else self.called(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Invocation:
    """How a leaf is called at one place of a forward.

    Attributes:
        label: what it is, for people: "loss (DiceLoss)".
        holder: calls it.
        given: the structure of (args, kwargs), of which slots are filled with tensors and with sizes of these.
        values: the names of the tensors' slots, in order.
        sizes: for each slot of a number: of which tensor it is the size, and of which dim.
        parameters, buffers: names of its state.
        differentiable: which of values and parameters carry gradients.
        modes: which of its modules are in training mode.
        autocasts: that are on around it.
    """

    label: str
    holder: Holder
    given: Tree
    values: tuple[str, ...]
    sizes: Mapping[str, tuple[int, int]]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    differentiable: tuple[bool, ...]
    modes: tuple[tuple[nn.Module, bool], ...]
    autocasts: Autocasts

    def __post_init__(self) -> None:
        assert len(self.differentiable) == len(self.values) + len(self.parameters), "one for each"

    def run(self, operands: Sequence[Tensor], seed: int, also: Sequence[int] = ()) -> Ran:
        """Call it on values, parameters and buffers, which stay as they are.

        Args:
            operands: those, in this order.
            seed: of the random numbers that it draws.
            also: operands that carry gradients besides those of `differentiable`.

        Raises:
            StateError: it has changed what it was given, or what it returns is not made of tensors and plain values.
        """
        inputs, kept = self._inputs(operands, also)
        args, kwargs = self._arguments(inputs)
        names = [f"{_INNER}.{name}" for name in (*self.parameters, *self.buffers)]
        state = dict(zip(names, (*inputs[len(self.values) :], *kept), strict=True))
        before = list(map(version, inputs))
        device = next((tensor.device for tensor in (*inputs, *kept)), HOST)
        with torch.inference_mode(False), _seeded(seed, device), self._surroundings(device):
            output = functional_call(self.holder, state, args, kwargs, tie_weights=True)
        self._check_unchanged(inputs, before, state)
        tree, tensors = flatten(output)
        strange = next((leaf for leaf in walk(tree) if isinstance(leaf, Opaque)), None)
        if strange is not None:
            raise StateError(f"leaf {self.label} returns a {strange.type_name}, but a leaf returns tensors")
        layouts = {str(one.layout) for one in tensors.values() if one.layout is not torch.strided or one.is_nested}
        if layouts:
            raise StateError(
                f"leaf {self.label} returns a tensor of layout {min(layouts)}, but a leaf returns dense ones\n"
                "hint: return made.to_dense()"
            )
        left = {name: state[f"{_INNER}.{name}"] for name in self.buffers}
        given = zip(self.buffers, kept, operands[len(self.differentiable) :], strict=True)
        written = frozenset(name for name, one, before in given if _is_other(left[name], one, before))
        return Ran(tree, tensors, left, written, inputs)

    def _inputs(self, operands: Sequence[Tensor], also: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return values and parameters as the beginning of a graph of autograd, and copies of buffers."""
        count = len(self.differentiable)
        with torch.inference_mode(False):
            inputs = [tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in operands[:count]]
            for place, tensor in enumerate(inputs):
                tensor.requires_grad_(self.differentiable[place] or place in also)
            return inputs, [tensor.detach().clone() for tensor in operands[count:]]

    def _arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled: dict[str, Any] = dict(zip(self.values, inputs, strict=False))
        filled |= {name: inputs[place].shape[dim] for name, (place, dim) in self.sizes.items()}
        args, kwargs = unflatten(self.given, filled)
        return tuple(args), dict(kwargs)

    @contextlib.contextmanager
    def _surroundings(self, device: torch.device) -> Iterator[None]:
        """Let modes, casts and gradients be as where it is called."""
        own = tuple((device.type if kind == HOST.type else kind, dtype) for kind, dtype in self.autocasts)
        before = [(vars(module), module.training) for module, _ in self.modes]
        try:
            for module, training in self.modes:
                vars(module)["training"] = training
            with casting(own), torch.enable_grad():
                yield
        finally:
            for space, training in before:
                space["training"] = training

    def _check_unchanged(self, inputs: Sequence[Tensor], before: Sequence[int], state: Mapping[str, Tensor]) -> None:
        if list(map(version, inputs)) != list(before):
            raise StateError(
                f"leaf {self.label} writes to a tensor that it is given, or to a parameter\n"
                "hint: let its forward work on a copy (`x = x.clone()`)"
            )
        own = inputs[len(self.values) :]
        if any(state[f"{_INNER}.{name}"] is not tensor for name, tensor in zip(self.parameters, own, strict=True)):
            raise StateError(f"leaf {self.label} gives itself other parameters\nhint: do so outside of its forward")
        trained = zip(own, self.differentiable[len(self.values) :], strict=True)
        if any(is_trained and not tensor.requires_grad for tensor, is_trained in trained):
            raise StateError(f"leaf {self.label} freezes a parameter\nhint: do so outside of its forward")


def _is_other(left: Tensor, copy: Tensor, before: Tensor) -> bool:
    """Tell whether a buffer was written to: also where no version counts it, as in batch norms and by `.data`."""
    return left is not copy or version(copy) > 0 or not hold_the_same(copy, before)


def hold_the_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape hold the same numbers, none of which may be one, too."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


@dataclass(frozen=True, eq=False)
class Ran:
    """What a call has made.

    Attributes:
        output: the structure of what was returned.
        tensors: in it, by name.
        buffers: what is in the module's buffers after it.
        written: the names of those that it has written to.
        inputs: values and parameters that it has read, where its graph of autograd begins.
    """

    output: Tree
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    written: frozenset[str]
    inputs: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """A call of a leaf, as an op of a graph.

    Attributes:
        name: of the op's leaf: what it is, and a number of its own in this process.
        invocation: how it is called.
        output: the structure of what it returns.
        results: the names of the tensors in that.
        written: the buffers that it writes to; their values are results, too.
        forms: of all results, as texts.
        left: attributes of its modules that a call leaves otherwise than it has found them.
        shares: a result may share memory with another, or with what it is given; the op's have memory of their own.
        work: what a call takes, by the sizes of what it is given.
    """

    name: str
    invocation: Invocation
    output: Tree
    results: tuple[str, ...]
    written: tuple[str, ...]
    forms: tuple[str, ...]
    left: tuple[tuple[nn.Module, str], ...] = ()
    shares: bool = False
    work: WorkBySize = NO_WORK

    def __post_init__(self) -> None:
        assert len(self.forms) == len(self.results) + len(self.written), "one for each"
        assert self.forms, "a graph has no op that makes nothing"

    @property
    def label(self) -> str:
        """Return what it is, for people."""
        return self.invocation.label

    def made(self, operands: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Return the results for values, parameters and buffers.

        Raises:
            StateError: they are not what they were when the leaf was captured, but for sizes that are known to change.
        """
        ran = self.invocation.run(operands, seed)
        results = self._results(ran)
        self._check(ran, results)
        return _with_own_memory(results, operands)

    def gradients(
        self, operands: Sequence[Tensor], seed: int, cotangents: Mapping[int, Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        """Return the gradients of some operands by those of results, by their places; zeros where there is none.

        Which there are is noted (`leaves.uses`).

        Raises:
            StateError: as `made`.
        """
        ran = self.invocation.run(operands, seed, wanted)
        results = self._results(ran)
        self._check(ran, results)
        pairs = [(results[place], dy) for place, dy in cotangents.items() if results[place].requires_grad]
        inputs = [ran.inputs[place] for place in wanted]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if pairs:
            roots, given = zip(*pairs, strict=True)
            with torch.enable_grad():
                found = torch.autograd.grad(roots, inputs, given, allow_unused=True)
        note_uses(self.name, (place for place, dx in zip(wanted, found, strict=True) if dx is not None))
        made = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, found, strict=True)]
        return _with_own_memory(made, [*operands, *cotangents.values()])

    def _results(self, ran: Ran) -> list[Tensor]:
        """Return the results in order; those that are missing are left out, which `_check` notices."""
        returned = [ran.tensors[name] for name in self.results if name in ran.tensors]
        return [*returned, *(ran.buffers[name] for name in self.written)]

    def _check(self, ran: Ran, results: Sequence[Tensor]) -> None:
        if tuple(ran.tensors) != self.results or not are_alike(ran.output, self.output):
            raise self._other(f"returned {told_tree(self.output)}, and now {told_tree(ran.output)}")
        if not ran.written.issubset(self.written):
            raise self._other(f"did not write to its buffers {sorted(ran.written - set(self.written))}, and now does")
        shapes = [tensor.shape for tensor in ran.inputs[: len(self.invocation.values)]]
        device = next((tensor.device for tensor in ran.inputs), HOST)
        for place, (tensor, text) in enumerate(zip(results, self.forms, strict=True)):
            form = read_form(text)
            if (tensor.dtype, list(tensor.shape), tensor.device) != (form.dtype, form.shape(shapes), device):
                name = (*self.results, *self.written)[place]
                raise self._other(
                    f"made its result {name!r} as {form.dtype} of shape {form.shape(shapes)} on {device}, and now as "
                    f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}, of inputs of shapes "
                    f"{[list(shape) for shape in shapes]}"
                )

    def _other(self, how: str) -> StateError:
        return StateError(
            f"leaf {self.label} {how}\nhint: let it make tensors whose dtypes, and sizes, follow from the sizes of its "
            'inputs, or use hetu_fx.auto_parallelize(..., capture="eager")'
        )


def _with_own_memory(made: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return what an op has made: whole tensors that share no memory with each other, or with what it was given."""
    taken = meta.example_storages(list(given))
    own = [tensor.detach().contiguous() for tensor in made]
    for place, tensor in enumerate(own):
        own[place] = tensor.clone() if taken & meta.example_storages(tensor) else tensor
        taken |= meta.example_storages(own[place])
    return own


def are_alike(first: Tree, second: Tree) -> bool:
    """Tell whether two outputs have one structure, down to their plain values."""
    return told_tree(first) == told_tree(second)


def told_tree(tree: Tree) -> str:
    """Say what an output consists of."""
    leaves = (f"{leaf.name}={leaf.value!r}" if isinstance(leaf, Constant) else _slot(leaf) for leaf in walk(tree))
    return f"{type(tree).__name__}({', '.join(leaves)})"


def _slot(leaf: Any) -> str:
    return f"tensor {leaf.name!r}" if isinstance(leaf, TensorSlot) else leaf.type_name


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed inside, as others do not notice."""
    own = [] if device.type == HOST.type else [device]
    with torch.random.fork_rng(own, device_type=device.type if own else "cuda"):
        torch.manual_seed(seed)
        yield


def call_seed(random_state: Tensor | None, site: int) -> int:
    """Return the seed of a leaf's random numbers in a step: the same on all replicas, which call it on the same rows.

    Without a state, which graphs have after the passes, always the same.
    """
    seed, step = (0, 0) if random_state is None else random_state.tolist()[:2]
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {site}".encode(), digest_size=7).digest(), "little")


class _Names:
    """The calls of this process by the names of their ops, for as long as somebody keeps them, and the next number."""

    def __init__(self) -> None:
        self.calls: WeakValueDictionary[str, OpaqueCall] = WeakValueDictionary()
        self.numbers = itertools.count()


_names = _Names()


def know(call: OpaqueCall) -> None:
    """Let ops of this name find the call, for as long as somebody keeps it: graphs keep those of their ops."""
    _names.calls[call.name] = call


def call_of_name(name: str) -> OpaqueCall:
    """Return the call of an op's name."""
    found = _names.calls.get(name)
    if found is None:
        raise StateError(f"leaf {name!r} is none of this process, which has captured no model with it")
    return found


def new_name(invocation: Invocation, called: object) -> str:
    """Return a name for an op that calls a leaf: its label, a digest of code and call, and a number of this process."""
    modes = [training for _, training in invocation.modes]
    how = f"{invocation.sizes} {invocation.differentiable} {modes} {invocation.autocasts}"
    told = (*_told_code(called), told_tree(invocation.given), how)
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]
    return f"{invocation.label} {digest}#{next(_names.numbers)}"


def without_number(name: str) -> str:
    """Return what an op's name says on all ranks: not its number, as each process counts for itself."""
    return name.partition("#")[0]


def call_label(name: str) -> str:
    """Return the label in an op's name."""
    return without_number(name).rpartition(" ")[0]


def _told_code(called: object) -> list[str]:
    """Return what the code of a function says, or of the classes of a module and its submodules, up to torch's."""
    kinds = (
        {kind for module in called.modules() for kind in type(module).__mro__} if isinstance(called, nn.Module) else ()
    )
    own = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))]
    functions = [value for kind in own for value in vars(kind).values()] if own else [called]
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    return sorted(f"{code.co_qualname} {code.co_names} {code.co_code.hex()}" for code in codes)
