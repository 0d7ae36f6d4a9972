"""Train under a plan as all of its ranks, in one process: for tests, `hetu-fx verify --ranks` and bug reports.

Ranks are threads that take turns (`hetu_fx.comm_ops.wire.threads`), and run what processes run: the runtime, device
graphs, schedules, the bridge, optimizers, changes of variant. Only what carries messages is another. An interpreter of
all ranks' graphs, with communication as moves between dicts, would leave out most of what can be wrong: autograd's
order, what leaves when, buffers that are written too early, bridges, homes. The model is captured once, and what does
not depend on the rank is deduced once; each rank makes its own device graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.local import index
from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.progress import Tell, telling
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import DivergedError, PlanError, ProfileError, StateError
from hetu_fx.graph.bind import Batch, LossCall, as_call, flatten_batch, output_and_loss
from hetu_fx.graph.containers import LOSS, flatten, loss_among, unflatten
from hetu_fx.graph.row_dims import AskedRowDims, RowDims, find_row_dims, slice_rows
from hetu_fx.plans.plan import Plan
from hetu_fx.prepare import check_plans_and_choose_homes, make_runtime
from hetu_fx.program.batch import batch_from_call
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program
from hetu_fx.switching.adapt.rehome import move_homes_near
from hetu_fx.switching.eager.execution import EagerExecution
from hetu_fx.switching.eager.row_mode import RowMode
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.migrate.move_plan import SwitchPlan
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.settings import Settings


@dataclass(frozen=True)
class RankShard:
    """What a rank has of a tensor; without a layout it has all of it."""

    local: Tensor
    layout: HomeLayout | None

    @classmethod
    def of(cls, tensor: Any) -> RankShard:
        """Copy what this rank has of a tensor, a home tensor or a plain one, to the host."""
        if hasattr(tensor, "to_local"):
            return cls(tensor.to_local().detach().to(HOST, copy=True), tensor.home_layout)
        return cls(dense(tensor).detach().to(HOST, copy=True), None)


ROUNDING = 64
"""By how many units in the last place of its largest element a buffer of one replica may differ from another's."""
Pieces = Mapping[str, RankShard]
"""What a rank has of tensors, by name."""


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its elements, as what is compared has them."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def join_pieces(ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    """Return whole tensors by name. What no rank has of one is what `torch.empty` gives.

    Raises:
        DivergedError: ranks have unlike copies of the same elements.
    """
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: _whole(name, {rank: pieces[name] for rank, pieces in enumerate(ranks) if name in pieces})
        for name in names
    }


def _whole(name: str, pieces: Mapping[int, RankShard]) -> Tensor:
    """Put a tensor together from the elements that each rank counts; other ranks' copies must be the same bits.

    Tensors without a layout (buffers) nobody sends: replicas that share work otherwise make them by other sums.
    """
    first = next(iter(pieces.values()))
    whole = first.local if first.layout is None else first.local.new_empty(first.layout.shape)
    for piece in pieces.values():
        for box, part in () if piece.layout is None else piece.layout.counted_chunks:
            whole[index(box)] = piece.local[index(part)]
    has_numbers = not bool(whole.isnan().any())
    for rank, piece in pieces.items():
        expected = whole if piece.layout is None else piece.layout.take(whole)
        is_same = torch.equal if piece.layout is not None else _same_but_for_rounding
        if has_numbers and not is_same(piece.local, expected):
            raise DivergedError(f"rank {rank} has another copy of {name!r} than the rank that counts it")
    return whole


def _same_but_for_rounding(x: Tensor, other: Tensor) -> bool:
    if torch.equal(x, other) or not carries_gradient(x.dtype):
        return torch.equal(x, other)
    most = float(other.abs().max()) * ROUNDING * torch.finfo(x.dtype).eps
    return x.shape == other.shape and float((x - other).abs().max()) <= most


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Tensors = Mapping[str, Tensor]
SGD = partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class Step:
    """One training step: its loss, and gradients by the names of parameters."""

    loss: float
    gradients: Tensors


@dataclass(frozen=True)
class Trained:
    """What a training came to: its steps, parameters and buffers after them, and the changes of homes before steps."""

    steps: Sequence[Step]
    state: Tensors
    moved: Mapping[int, SwitchPlan] = field(default_factory=dict)


@dataclass(frozen=True)
class Lockstep:
    """How a model is trained by all ranks at once.

    Attributes:
        make_optimizer: of the trained parameters; the same numbers on all ranks. None: nothing is updated, and all
            ranks read the same parameters, which takes the memory of one model.
        ranks: how many there are; None: as many as the plans name.
        rows: how many rows of a batch each rank brings, of a smaller one the last ranks fewer; None: all pass the
            whole batch.
        plan_of_step: by which plan, by its place, each step runs; None: all by the first.
        lost_by_step: which devices are lost when each step begins, so that homes go near the plan of each, and what
            lost devices held comes from others; None: none is, and homes stay near the first plan.
        cluster: the links between the ranks, for which messages and homes are planned; None: all are alike.
        devices: on which each rank computes, such as "cpu"; None: all on the host.
        loss_fn: makes the loss of a model that returns none.
        row_dims: which dims of inputs count rows, as for `auto_parallelize`.
        seed: of the random numbers that the model draws.
        eager: how replicas share a batch where the module itself runs on every rank (`capture="eager"`); None: graphs
            run.
        backend: what compiles device graphs, as `compile` of `auto_parallelize`; None: they run as they are.
        seconds: after which training is given up, between two messages; None: never.
    """

    make_optimizer: MakeOptimizer | None = SGD
    ranks: int | None = None
    rows: Sequence[int] | None = None
    plan_of_step: Sequence[int] | None = None
    lost_by_step: Sequence[Collection[int]] | None = None
    cluster: Cluster | None = None
    devices: Sequence[str] | None = None
    loss_fn: Callable[..., Any] | None = None
    row_dims: Mapping[str, int | None] = field(default_factory=dict)
    seed: int = 0
    eager: RowMode | None = None
    backend: Any = None
    seconds: float | None = None

    def capture(self, model: nn.Module, batch: Batch, given: Program | None = None) -> GraphExecution:
        """Capture a copy of a model, which stays as it is: for all ranks, and for several trainings of equal models.

        A program that is `given` is taken for the model's, and nothing captured.
        """
        programs = Programs(self.copied(model), self.loss_fn, row_dims=AskedRowDims(self.row_dims))
        programs.tracer.given = given
        return GraphExecution(programs, batch, self.backend)

    def copied(self, model: nn.Module) -> nn.Module:
        """Copy a model; parameters that nothing updates are parameters of the same memory."""
        shared = model.parameters() if self.make_optimizer is None else ()
        memo = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in shared}
        return copy.deepcopy(model, memo)

    def train(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        plans: Plan | Sequence[Plan],
        captured: GraphExecution | None = None,
    ) -> Trained:
        """Train a copy of a model on these batches, one step each, and return what all ranks together have then.

        Memory that nobody has written has no numbers in it (NaN), so that what does not arrive is seen.

        Raises:
            StateError: the model is not on the host.
            PlanError: a plan does not fit the model, or names more ranks than there are; a batch has more rows than
                ranks bring.
            DivergedError: ranks make calls that do not fit together, wait in vain, or have unlike copies.
            TimeoutError: it takes more than `seconds`.
        """
        with self._running(model, batches, plans, captured) as (ranks, run):
            return join_ranks(run_in_threads(ranks, run.train, self.seconds))

    def train_rank(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        plans: Plan | Sequence[Plan],
        table: GroupTable,
        captured: GraphExecution | None = None,
    ) -> RankTrained:
        """Do what `train` does as one of its ranks, each of which is a process; collective. `join_ranks` takes all.

        Waits are bounded by the timeout of the table, not by `seconds`. Raises as `train` does.
        """
        with self._running(model, batches, plans, captured) as (_, run):
            return run.train(table)

    @contextmanager
    def _running(
        self, model: nn.Module, batches: Sequence[Batch], plans: Plan | Sequence[Plan], captured: GraphExecution | None
    ) -> Iterator[tuple[int, _Run]]:
        """Yield how many ranks there are, and the training, as each of them does it."""
        plans = (plans,) if isinstance(plans, Plan) else tuple(plans)
        ranks = self.ranks or 1 + max(max(plan.devices) for plan in plans)
        if self.rows is not None and len(self.rows) != ranks:
            raise PlanError(
                f"rows are given for {len(self.rows)} ranks, but there are {ranks}\nhint: give one for each"
            )
        if self.devices is not None and len(self.devices) != ranks:
            raise PlanError(
                f"devices are given for {len(self.devices)} ranks, but there are {ranks}\nhint: give each one"
            )
        elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
        if elsewhere:
            raise StateError(
                f"the model is on {sorted(elsewhere)}, and ranks take it from the host\nhint: move it to the host"
            )
        execution = None if self.eager is not None else captured or self.capture(model, batches[0])
        with _unwritten_is_nan(), telling(f"training as {ranks} ranks") as tell:
            own = [execution.programs.batch(*as_call(batch)) for batch in batches] if execution else batches
            yield ranks, _Run(self, model, own, plans, execution, tell)


def train_alone(model: nn.Module, batches: Sequence[Batch], how: Lockstep) -> Trained:
    """Train a copy of a model on one device, as plain PyTorch."""
    model = how.copied(model)
    optimizer = None if how.make_optimizer is None else how.make_optimizer(_trained(model))
    steps = []
    for batch in batches:
        call = None if how.loss_fn is None else LossCall(model.forward, how.loss_fn)
        named = batch if call is None else batch_from_call(call.signature, *as_call(batch))
        output, made = output_and_loss(model, how.loss_fn, named)
        loss = find_loss(output if how.loss_fn is None else made)
        loss.backward()
        gradients = {n: dense(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        if optimizer is not None:
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
            optimizer.step()
        steps.append(Step(float(loss.detach()), gradients))
        model.zero_grad()
    changed = _state(model) if optimizer is not None else dict(model.named_buffers())
    return Trained(steps, {name: tensor.detach() for name, tensor in changed.items()})


def find_loss(output: Any) -> Tensor:
    """Return the loss in what a model returns.

    Raises:
        ProfileError: there is none.
    """
    found = getattr(output, "loss", None)
    tensors = {LOSS: found} if isinstance(found, Tensor) else flatten(output)[1]
    numbers = [name for name, tensor in tensors.items() if tensor.dim() == 0]
    name = loss_among(list(tensors), numbers, [name for name in numbers if tensors[name].requires_grad])
    if name is not None:
        return tensors[name]
    said = f"which output is the loss is not told: {numbers}" if len(numbers) > 1 else "the model returns no loss"
    raise ProfileError(
        f"{said}\nhint: return one number that needs a gradient, name the loss 'loss', return it first, or pass loss_fn"
    )


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what `torch.empty` gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's own tensors to a device; what is tied stays so, as `Module.to` alone does not do on every type."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@dataclass(frozen=True)
class RankTrained:
    """What a rank has after a training: losses by step, gradients by step, and parameters and buffers."""

    losses: list[float]
    gradients: list[Pieces]
    state: Pieces
    moved: dict[int, SwitchPlan]


@dataclass(frozen=True)
class _Run:
    """A training, as every rank of it does it."""

    how: Lockstep
    model: nn.Module
    batches: Sequence[Batch]
    plans: Sequence[Plan]
    execution: GraphExecution | None
    tell: Tell

    def train(self, table: GroupTable) -> RankTrained:
        """Train as the rank of this table; collective."""
        model = move_model(self.how.copied(self.model), self._device(table.rank))
        optimizer = None if self.how.make_optimizer is None else self.how.make_optimizer(_trained(model))
        runtime = self._runtime(model, optimizer, table)
        made = RankTrained([], [], {}, {})
        for number, batch in enumerate(self.batches):
            if number and self.how.lost_by_step is not None:
                plan, lost = self.plans[self._place(number)], self.how.lost_by_step[number]
                made.moved[number] = move_homes_near(runtime, plan, [] if optimizer is None else [optimizer], lost)
            self._step(number, runtime, batch, made)
            self.tell("steps", number + 1, len(self.batches))
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        changed = _state(model) if optimizer is not None else dict(model.named_buffers())
        return replace(made, state={name: RankShard.of(tensor) for name, tensor in changed.items()})

    def _runtime(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, table: GroupTable) -> Runtime:
        settings = Settings(shared=self.how.rows is None, outputs="auto", seed=self.how.seed)
        execution = self.execution or self._as_it_is(model)
        table.know_types([self._device(rank).type for rank in range(table.size)])
        table.connect(self._device(table.rank))
        with using(table):
            table.topology = self.how.cluster
            layouts = raise_on_all_ranks(
                table, lambda: check_plans_and_choose_homes(self.plans, model, execution, self.how.cluster, table)
            )
        return make_runtime(model, optimizer, table, execution, self.plans, layouts, settings)

    def _as_it_is(self, model: nn.Module) -> EagerExecution:
        how, mode = self.how, self.how.eager
        asked, shared = AskedRowDims(how.row_dims), how.rows is None
        made = EagerExecution(model, how.loss_fn, self.batches[0], asked, shared=shared)
        assert mode is not None, "a module that runs as it is has one"
        made.mode_of = lambda plan: mode
        return made

    def _step(self, number: int, runtime: Runtime, batch: Batch, made: RankTrained) -> None:
        """Run a step forward and backward."""
        runtime.variants.pin(tuple(runtime.variants)[self._place(number)])
        args, kwargs = as_call(self._own(runtime.table.rank, batch))
        loss = find_loss(runtime.run(args, kwargs))
        loss.backward()
        made.losses.append(float(loss.detach()))
        gradients = {name: home.grad for name, home in runtime.homes.items() if home.grad is not None}
        made.gradients.append({name: RankShard.of(gradient) for name, gradient in gradients.items()})

    def _place(self, number: int) -> int:
        return 0 if self.how.plan_of_step is None else self.how.plan_of_step[number]

    def _own(self, rank: int, batch: Batch) -> Batch:
        """Return what a rank passes of a batch: its rows of inputs that have some, and all of others."""
        tree, tensors = flatten_batch(batch)
        dims = self._row_dims(batch) if self.how.rows is not None else {}
        own = {name: self._rows(rank, x, dims[name]) if name in dims else x for name, x in tensors.items()}
        made: Batch = unflatten(tree, {name: tensor.to(self._device(rank)) for name, tensor in own.items()})
        return made

    def _row_dims(self, batch: Batch) -> RowDims:
        """Return which dims count rows; by the sizes alone where the graph has a fixed number of rows."""
        found = {} if self.execution is None else self.execution.programs.find(batch, training=True).row_dims
        return found or find_row_dims(flatten_batch(batch)[1], AskedRowDims(self.how.row_dims))

    def _rows(self, rank: int, tensor: Tensor, dim: int) -> Tensor:
        assert self.how.rows is not None, "ranks bring rows of their own"
        rows = tensor.size(dim)
        if rows > sum(self.how.rows):
            raise PlanError(f"a batch has {rows} rows, but ranks bring {list(self.how.rows)}\nhint: give more rows")
        stop = min(rows, sum(self.how.rows[: rank + 1]))
        return slice_rows(tensor, dim, range(min(stop, sum(self.how.rows[:rank])), stop))

    def _device(self, rank: int) -> torch.device:
        return HOST if self.how.devices is None else torch.device(self.how.devices[rank])


def join_ranks(ranks: Sequence[RankTrained]) -> Trained:
    """Return what ranks, given in their order, have together.

    Raises:
        DivergedError: their losses differ.
    """
    steps = []
    for number in range(len(ranks[0].losses)):
        loss = _same([rank.losses[number] for rank in ranks], f"the loss of step {number}")
        steps.append(Step(loss, join_pieces([rank.gradients[number] for rank in ranks])))
    return Trained(steps, join_pieces([rank.state for rank in ranks]), ranks[0].moved)


def _same(values: Sequence[float], what: str) -> float:
    if len(set(map(str, values))) > 1:
        raise DivergedError(f"{what} differs between ranks: {list(values)}")
    return values[0]
