"""A stage's work recorded for inputs that repeat, and replayed: CUDA graphs.

Starting an op takes the host some microseconds, which is longer than a GPU computes where ops are small. A record of a
stage's forward and backward is started by one call each. It reads and writes the same memory at each replay: parameters
are where they were, other inputs are copied to where it reads them, and what it makes is copied out at once. So a
record is one of such sizes, dtypes and parameters' addresses; other calls run as they are.

Records of a rank have their memory from one pool, so that they take as much as the largest of them and not their sum:
while one waits for its backward, whatever else is called runs as it is.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST, DeviceType, device_type_record
from hetu_fx.base.per_rank import own
from hetu_fx.base.torch_private import foreach_copy, keeps_graph
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.graph.calls import draws
from hetu_fx.graph.leaves.leaf_ops import LEAF, told_op
from hetu_fx.transforms.lowering.graph_traffic import communications
from hetu_fx.transforms.rewrites.counter_rng import DROPOUT, UNIFORM
from hetu_fx.transforms.specialize.device_graph import DeviceGraph

Run = Callable[..., Sequence[Tensor]]

CALLS_BEFORE = 3
"""Calls of a kind that run as they are before it is recorded: libraries make what they keep, lengths show."""
MOST_RECORDS = 8
"""That a stage keeps at a time; each has gradients of its own."""
MOST_COUNTED = 1_000
_TOLD_BY_VALUES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


def hindrance(device: DeviceGraph, kind: DeviceType) -> str | None:
    """Return why a graph cannot be recorded on a type of devices; None: it can."""
    if kind.graphs is None:
        return f"devices of type {kind.name!r} record nothing"
    if any(True for _ in communications(device)):
        return "it communicates with other ranks"
    return next((why for node in device.graph.nodes if (why := _why_not(node)) is not None), None)


def _why_not(node: fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    if draws(node) or node.target in (DROPOUT, UNIFORM):
        return f"{node.target} draws random numbers, by what the host knows"
    if node.target is LEAF:
        return f"{told_op(node)} is called as it is, by the host"
    if any(tag in getattr(node.target, "tags", ()) for tag in _TOLD_BY_VALUES):
        return f"the host waits for what {node.target} finds"
    device = node.kwargs.get("device")
    if device is not None and torch.device(str(device)).type == HOST.type:
        return f"{node.target} works on the host"
    return None


class RecordedCalls:
    """Runs a stage's function, from the fourth call of a kind on as a record of it.

    Args:
        run: the function: it writes to none of its inputs, and makes tensors.
        in_place: which inputs are to be read where they are, as parameters are; the others are copied.
        device: where it runs, of a type that records.
    """

    def __init__(self, run: Run, in_place: Sequence[bool], device: torch.device) -> None:
        self._run, self._device = run, device
        self._in_place = [i for i, here in enumerate(in_place) if here]
        self._copied = [i for i, here in enumerate(in_place) if not here]
        self._seen: Counter[Hashable] = Counter()
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run it, or replay it."""
        pool = _pool()
        key = None if pool.is_lent else self._key(inputs)
        record = None if key is None else self._record(key, inputs)
        if record is None:
            return self._run(*inputs)
        if not torch.is_grad_enabled():
            return record.forward(inputs)
        return _Replay.apply(record, pool.lend(), *inputs)  # type: ignore[no-any-return, no-untyped-call]

    def _key(self, inputs: Sequence[Any]) -> Hashable | None:
        """Return what calls must have in common to be one record; None: there is none for such calls."""
        copied = [_form(inputs[i]) for i in self._copied]
        if None in copied:
            return None
        here = [inputs[i] for i in self._in_place]
        return _surroundings(), *copied, *map(Tensor.data_ptr, here), *map(_KIND, here)

    def _record(self, key: Hashable, inputs: Sequence[Any]) -> _Record | None:
        found = self._records.get(key)
        if found is not None:
            self._records.move_to_end(key)
            return found
        if len(self._seen) >= MOST_COUNTED:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] <= CALLS_BEFORE:
            return None
        if len(self._records) >= MOST_RECORDS:
            self._records.popitem(last=False)
        made = self._records[key] = _Record(self._run, inputs, frozenset(self._copied), self._device)
        return made


_KIND = attrgetter("dtype", "requires_grad")


def _surroundings() -> Hashable:
    """Return what else says which kernels run; what is made in inference mode stays in it."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


def _form(given: Any) -> Hashable | None:
    """Return what an input that is copied must have in common with that of a record; None: it cannot be copied."""
    if isinstance(given, Tensor):
        if given.device.type == HOST.type and given.dim():
            return None
        return given.shape, given.stride(), given.dtype, given.requires_grad
    return (type(given), given) if given is None or isinstance(given, (bool, int, float)) else None


class _Pool:
    """The memory of a rank's records: one at a time has something in it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._users = weakref.WeakSet[Any]()
        self._loan: weakref.ref[_Loan] | None = None

    def handle(self, graphs: Any, user: _Record) -> Any:
        """Return it, as the device's type wants it; a new one where all records are gone, and the last with them."""
        if not self._users:
            self._handle = graphs.graph_pool_handle()
        self._users.add(user)
        return self._handle

    @property
    def is_lent(self) -> bool:
        """Whether a forward's results wait there for the backward; not where all that could call it is gone."""
        loan = None if self._loan is None else self._loan()
        return loan is not None and not loan.is_over

    def lend(self) -> _Loan:
        """Let a forward's results wait there."""
        loan = _Loan()
        self._loan = weakref.ref(loan)
        return loan


class _Loan:
    """What a graph of autograd holds for as long as its backward may come."""

    def __init__(self) -> None:
        self.is_over = False
        self.times = 0


_pool = partial(own, _Pool)


class _Record:
    """A function's forward, and its backward if gradients are wanted, recorded for inputs like these."""

    def __init__(self, run: Run, inputs: Sequence[Any], copied: frozenset[int], device: torch.device) -> None:
        kind = device_type_record(device)
        assert kind.graphs is not None, "asked before: see `hindrance`"
        self._graphs = kind.graphs()
        self._copied = [i for i in sorted(copied) if isinstance(inputs[i], Tensor)]
        self._inputs = [_own(given, device if i in copied else None) for i, given in enumerate(inputs)]
        self._forward, made = self._recorded(lambda: list(run(*self._inputs)))
        self._needed = [i for i, given in enumerate(self._inputs) if isinstance(given, Tensor) and given.requires_grad]
        roots = [one for one in made if one.requires_grad]
        self._results = [one.detach() for one in made]
        self.differentiable = [one.requires_grad for one in made]
        self._cotangents = [torch.zeros_like(one) for one in roots]
        self._backward, self._gradients = None, list[Tensor | None]()
        if roots:
            self._backward, self._gradients = self._recorded(lambda: self._gradients_of(roots))

    def _recorded(self, work: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
        graph = self._graphs.CUDAGraph()
        pool = _pool().handle(self._graphs, self)
        try:
            with self._graphs.graph(graph, pool=pool):
                made = work()
        except RuntimeError as error:
            raise EnvironmentProblem(f"a step cannot be recorded: {error}\nhint: leave cuda_graphs out") from error
        return graph, made

    def _gradients_of(self, roots: Sequence[Tensor]) -> list[Tensor | None]:
        needed = [self._inputs[i] for i in self._needed]
        return list(torch.autograd.grad(roots, needed, self._cotangents, allow_unused=True))

    def forward(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return what it makes of inputs, in memory of their own."""
        with torch.no_grad():
            for i in self._copied:
                self._inputs[i].copy_(inputs[i], non_blocking=True)
            self._forward.replay()
            return tuple(_copies(self._results))

    def backward(self, cotangents: Sequence[Tensor | None], *, again: bool) -> list[Tensor | None]:
        """Return the gradients of all inputs, None for those that need none, in memory of their own.

        Args:
            cotangents: of what the last forward has made.
            again: a backward of the same forward has been, which overwrites what it reads.
        """
        if again:
            self._forward.replay()
        given = (one for one, is_root in zip(cotangents, self.differentiable, strict=True) if is_root)
        for kept, one in zip(self._cotangents, given, strict=True):
            kept.zero_() if one is None else kept.copy_(one)
        assert self._backward is not None, "autograd asks only where something needs a gradient"
        self._backward.replay()
        found: list[Tensor | None] = [None] * len(self._inputs)
        there = [(i, one) for i, one in zip(self._needed, self._gradients, strict=True) if one is not None]
        for (i, _), copied in zip(there, _copies([one for _, one in there]), strict=True):
            found[i] = copied
        return found


def _own(given: Any, device: torch.device | None) -> Any:
    """Return what a record reads: the input's memory, or memory of its own where a device is given."""
    if not isinstance(given, Tensor):
        return given
    made = given.detach() if device is None else given.detach().to(device, copy=True)
    return made.requires_grad_(given.requires_grad)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    made = [torch.empty_like(tensor) for tensor in tensors]
    foreach_copy(made, tensors)
    return made


class _Replay(torch.autograd.Function):
    """A record's forward; its backward is the record's."""

    @staticmethod
    def forward(ctx: Any, record: _Record, loan: _Loan, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.record, ctx.loan = record, loan
        ctx.set_materialize_grads(False)
        made = record.forward(inputs)
        pairs = zip(made, record.differentiable, strict=True)
        ctx.mark_non_differentiable(*(one for one, is_differentiable in pairs if not is_differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        loan = ctx.loan
        if loan.is_over:
            raise RuntimeError("backward goes through this a second time\nhint: pass retain_graph=True to the first")
        gradients = ctx.record.backward(cotangents, again=loan.times > 0)
        loan.times += 1
        loan.is_over = not keeps_graph()
        return (None, None, *gradients)
