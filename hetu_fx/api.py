"""The user's side: `auto_parallelize`, the `forward` of what it returns, and copies of that.

The `forward` of a parallel model: ours, which runs it in parallel, and what a script puts in its place later. A
script's forward that leads to ours (autocast around it, a log of its outputs) runs as it is, as ours runs inside it.
Any other is what the model computes from then on: ours takes its place, and has it captured.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from hetu_fx.base.frameworks import frameworks
from hetu_fx.base.patches import PLAN_VARIABLE, substitute_of
from hetu_fx.base.torch_private import CALL
from hetu_fx.check.checker import Checker
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph.bind import LossCall
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.handle import Handle
from hetu_fx.prepare import Plans, Preparation, check_arguments, given_overrides, prepare
from hetu_fx.program.batch import batch_from_call
from hetu_fx.program.structure import told_hook
from hetu_fx.switching.adapt.rehome import HomesFollow, Rehoming
from hetu_fx.switching.adapt.tried import TryPlan
from hetu_fx.switching.home.parameters import check_assigned_dtypes
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.settings import Options, Settings
from hetu_fx.switching.step.execution import Execution

Parallelize = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
"""Makes a copy parallel as the model was when it was copied, for a batch like this one; collective."""


class RestoreOriginal:
    """What a parallel model carries in its `__dict__` beside what it had before.

    Args:
        model: before anything is attached.

    Attributes:
        look: called before the model is copied or pickled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = dict(model.__dict__)
        self._names: Collection[str] = ()
        self.look: Callable[[], None] = lambda: None

    def has(self, name: str, value: Any) -> None:
        """Know that the model itself has something else under a name now; None: nothing."""
        self._before.pop(name, None)
        if value is not None:
            self._before[name] = value

    def is_attached(self, model: nn.Module) -> None:
        """Know what has been attached since."""
        before = self._before
        self._names = [name for name, value in model.__dict__.items() if value is not before.get(name, self)]
        self._before = {name: before[name] for name in self._names if name in before}

    def detach_from(self, model: nn.Module) -> None:
        """Take off what was attached to the model."""
        for name in self._names:
            model.__dict__.pop(name, None)
        model.__dict__.update(self._before)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Take off within a block what was attached to the model."""
        self.look()
        now = {name: model.__dict__[name] for name in self._names if name in model.__dict__}
        self.detach_from(model)
        try:
            yield
        finally:
            model.__dict__.update(now)


_waiting: WeakKeyDictionary[nn.Module, RestoreOriginal] = WeakKeyDictionary()


def attach_copying(model: nn.Module, plain: RestoreOriginal, recipe: Callable[[], Parallelize]) -> None:
    """Let a parallel model be copied and pickled; the last that is attached to it.

    Args:
        model: the model, with all else that is attached.
        plain: was made before anything was attached.
        recipe: called when the model is copied.
    """

    def deep_copy(itself: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with plain.of(itself):
            made = copy.deepcopy(itself, memo)
        _attach_later(made, recipe())
        return made

    def reduced(itself: nn.Module, protocol: Any) -> Any:
        with plain.of(itself):
            told = tuple(itself.__reduce_ex__(protocol))
            return *told[:2], *(dict(part) if isinstance(part, dict) else part for part in told[2:])

    object.__setattr__(model, "__deepcopy__", MethodType(deep_copy, model))
    object.__setattr__(model, "__reduce_ex__", MethodType(reduced, model))
    plain.is_attached(model)


def _attach_later(made: nn.Module, parallelize: Parallelize, *, is_first: bool = False) -> None:
    """Have a model made parallel when it is first called, as that takes all ranks and a batch.

    A copy of it is made parallel as `parallelize` does. `is_first`: it is no copy, and frameworks leave it alone.
    """
    told = "this model" if is_first else "this copy of a parallel model"

    def forward(itself: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        as_it_was(itself)
        parallelize(itself, args, kwargs)
        return itself.forward(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if vars(made).get("forward") is not waiting:
            raise StateError(
                f"the forward of {told} was replaced before its first call, which makes it parallel\nhint: call it "
                f"first, or replace the forward before {'hetu_fx.auto_parallelize' if is_first else 'copying'}"
            )
        return getattr(type(made), CALL)(made, *args, **kwargs)

    plain = RestoreOriginal(made)
    waiting = MethodType(torch.compiler.disable(forward), made)
    object.__setattr__(made, "forward", waiting)
    object.__setattr__(made, CALL, torch.compiler.disable(call))
    for framework in frameworks() if is_first else ():
        framework.adopt(made)
    attach_copying(made, plain, lambda: parallelize)
    _waiting[made] = plain


def is_parallel(model: object) -> bool:
    """Tell whether a model is parallel, or becomes so at its first call."""
    return hasattr(model, "hetu") or model in _waiting


def as_it_was(model: nn.Module) -> None:
    """Take off a model what would make it parallel at its first call; nothing from any other."""
    plain = _waiting.pop(model, None)
    if plain is not None:
        plain.detach_from(model)


_DEEPEST = 12  # wrappers, and what they consist of, around each other
_LIBRARIES = ("torch", "hetu_fx")  # whose functions name nothing of a script's
_HINT = (
    "hint: assign it to the model's class, or before hetu_fx.auto_parallelize. A wrapper must keep the forward that it "
    "finds in the model, and call it"
)


class Forwards:
    """Puts ours in a model's `forward`, and looks at each call whether it still is there.

    Args:
        model: the user's, which has its own forward.
        runtime: runs it.
        plain: is told of another forward, as copies have it too.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plain: RestoreOriginal) -> None:
        self.model, self.runtime, self.plain = model, runtime, plain
        self._ours: list[Callable[..., Any]] = []
        self._found: Callable[..., Any] | None = None
        self._is_wrapped = self._is_running = False
        self._runs = 0
        self._put(vars(model).get("forward"))
        # `nn.Module.__call__` finds it as an attribute, as it finds `forward`.
        object.__setattr__(model, CALL, torch.compiler.disable(self._call))

    def look(self) -> None:
        """Take in what a script has put in the place of the forward that was there.

        Raises:
            StateError: it has no signature.
        """
        found = vars(self.model).get("forward")
        if found is self._found:
            return
        make = substitute_of(found)
        if make is not None:
            found = make(cast(FunctionType, getattr(found, "__func__", found)))
            object.__setattr__(self.model, "forward", found)
        if self._leads_to_ours(found):
            self._found = found
            self._is_wrapped = getattr(found, "__func__", found) not in self._ours
        else:
            self._put(found)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.look()
        runs = self._runs
        made = getattr(type(self.model), CALL)(self.model, *args, **kwargs)
        if self._is_wrapped and self._runs == runs:
            raise StateError(
                f"{_told(self._found)} was put in the parallel model's 'forward' and taken for a wrapper of the one "
                f"before, but has not called it: nothing ran in parallel\n{_HINT}"
            )
        return made

    def _put(self, own: Callable[..., Any] | None) -> None:
        """Put ours in the model, for the forward that a script has put there (None: its class's)."""
        original = own or MethodType(type(self.model).forward, self.model)
        signature = _signature(original)
        run = torch.compiler.disable(self._run)  # torch.compile around the model would trace the runtime

        @functools.wraps(original)
        def forward(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return run(own, args, kwargs)

        # A method, without a trail to the original: what others wrap it in they can take off, and find this below.
        del forward.__dict__["__wrapped__"]
        forward.__signature__ = _as_method(signature)  # type: ignore[attr-defined]
        self._ours.append(forward)
        self._is_wrapped = False
        self._found = MethodType(forward, self.model)
        object.__setattr__(self.model, "forward", self._found)
        self.plain.has("forward", own)

    def _run(self, own: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_running and not self.runtime.whole.is_open:
            raise StateError(f"{_told(self._found)} calls the parallel model inside its own forward\n{_HINT}")
        self._runs += 1
        self.runtime.execution.become(own)
        self._is_running = True
        try:
            return self.runtime.run(args, kwargs)
        finally:
            self._is_running = False

    def _leads_to_ours(self, found: Any) -> bool:
        """Tell whether ours is among what a function refers to, and what these refer to."""
        seen, level = dict[int, Any](), [found]
        for _ in range(_DEEPEST):
            if any(value is ours for value in level for ours in self._ours):
                return True
            seen.update((id(value), value) for value in level)
            level = [value for value in chain(*map(self._referred, level)) if id(value) not in seen]
        return False

    def _referred(self, value: Any) -> Iterator[Any]:
        match value:
            case FunctionType():
                yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
                yield from vars(value).values()
                yield from value.__defaults__ or ()
                if str(value.__globals__.get("__name__")).partition(".")[0] not in _LIBRARIES:
                    for space in (value.__globals__, vars(self.model)):
                        yield from (space[name] for name in value.__code__.co_names if name in space)
            case MethodType():
                yield from (value.__func__, value.__self__)
            case functools.partial():
                yield from (value.func, *value.args, *value.keywords.values())
            case list() | tuple():
                yield from value
            case dict():
                yield from value.values()
            case nn.Module() | type() | ModuleType() | torch.Tensor():
                return
            case _:
                yield from getattr(value, "__dict__", {}).values()
                yield vars(type(value)).get("__call__")  # which may refer to more


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _told(forward: Any) -> str:
    return told_hook(getattr(forward, "__func__", forward))


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{_told(forward)} was put in the parallel model's 'forward', but has no signature that Python can read\n"
            f"hint: put a function there that names its arguments"
        ) from error


def _as_method(bound: inspect.Signature) -> inspect.Signature:
    """Return the signature that a function must have to show this one once it is bound."""
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return bound.replace(parameters=[itself, *bound.parameters.values()])


M = TypeVar("M", bound=nn.Module)

IMPORT_SECONDS = 0.0
"""What importing this module has taken, with all that it needs: `hetu_fx` says so, which imports it."""


def auto_parallelize(
    model: M,
    batch: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    plan: Plans = "auto",
    cluster: Cluster | str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    data: Literal["per_rank", "global"] = "per_rank",
    outputs: Literal["auto", "all", "loss"] = "auto",
    compile: Any = None,
    capture: Literal["graph", "eager"] = "graph",
    seed: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    row_dims: Mapping[str, int | None] | None = None,
    check: Literal["auto"] | bool = "auto",
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    options: Options | None = None,
    **old: Any,
) -> M:
    """Make `model` run in parallel on all processes of the job, and return the same object.

    Collective: every process calls it with the same model (equal parameters), and a batch of the same form.

    Args:
        model: any module; its class, forward's signature and parameter names stay. Its parameters become home
            parameters: tensors of the same shape of which each process owns a part.
        batch: one example batch: a mapping of keyword arguments, or a tuple. None: that of the first call, in which the
            model becomes parallel; until then it has no `model.hetu`.
        plan: "auto", a Plan, several plans (variants; the one that fits a batch's longest sequence and is predicted
            fastest runs it), the path of a plan file, or one of "data", "tensor", "pipeline": all ranks as equal
            replicas, as one tensor parallel group, or as the stages of one pipeline. HETU_FX_PLAN in the environment
            is a path, or such a word, in the place of "auto".
        cluster: what the devices are; None measures them now.
        optimizer: an optimizer made before this call; its parameters stay the same objects, and state that it has
            already is cut to this process's part, and moves with the parameters (`model.hetu.switch_home`).
        loss_fn: for a model that returns no loss: called with the output and what it names of the batch (all of it
            where it takes `**batch`). Names that forward does not have are the loss's alone, after forward's:
            `auto_parallelize(model, (x, y), loss_fn=nn.CrossEntropyLoss())`, then `model(x, y).loss`; in
            evaluation `model(x)` returns the output alone.
        data: "per_rank": each process passes its own rows (the global batch is all of them, in rank order);
            "global": every process passes the same whole batch.
        outputs: which outputs other than the loss come back: "all", or "loss" never, or "auto": in evaluation, and in
            training where each replica is one device that has them anyway (one process, data parallel with rows of
            each rank's own). One that does not come back says so when it is used.
        compile: None runs device graphs eagerly; "aot_eager", "inductor", or a compiler of GraphModules.
        capture: "graph" captures the model as a graph, from which every plan can be made. "eager" is for models that
            cannot be captured: the module itself runs on every device, data parallel with uneven shares. See below.
        seed: of dropout and other random ops; None takes process 0's torch seed.
        process_group: the processes to use; None: all.
        row_dims: which dim of an input counts the rows of the batch, where it is not dim 0, or None for an input
            without rows: `{"x": 1, "mask": None}`. Names are those of forward's arguments; one of a tuple or mapping
            stands for all tensors in it, or they are named one by one ("state.0"). Of inputs that are not named, dim 0
            counts rows where it is as large as the batch. Outputs have rows where the graph has them.
        check: "auto" tries every plan before it trains: the model, cut small, takes one step as all ranks of the plan
            in one process, in float64, and must give the loss, gradients and buffers of the module on one device. At
            most 10 seconds, once for each model, plan and version; `model.hetu.checks` says what was found, or why a
            plan was not checked. False leaves it out, as does HETU_FX_CHECK=0 in the environment; True tries whatever
            the environment says. With capture="eager", False also says that the module works row by row.
        weights: for a model whose parameters are on the meta device (made inside `with torch.device("meta")`): a folder
            of safetensors files, or one such file or index, of which each rank reads what it owns, cast to the model's
            dtypes; or "init": the model's own initialisation, from `seed`, the same under every plan and on any number
            of ranks. Buffers that no file holds are computed by their modules. See docs/large.md.
        device: on which this rank is to hold such a model; None: the accelerator of its local rank, else the host.
        options: what few scripts need to say; see `hetu_fx.Options`.
        **old: those options as arguments, as before (DeprecationWarning).

    The loss of a model that makes it is the output named "loss", or the only number that needs a gradient, wherever it
    stands, or a number that comes first.

    With capture="eager" a plan's pipelines must each be one stage of one device and one micro-batch
    (`Plan.data_parallel`). Each device runs its own rows where the check has shown that this gives what one device
    gives, or check=False says so: the loss is a mean over rows, or a sum, and rows do not meet. Otherwise each device
    runs the module on all rows, which gives what one device gives and takes as long; a warning says why, and
    plan="auto" takes one device. Inputs whose dim 0 is as large as the first one's in `batch` have rows; by rows,
    outputs other than the loss must have one entry per row in dim 0, buffers that the forward writes in training
    (running statistics) stay each device's own until an evaluation, a save or a change of plan takes over those of the
    plan's first device, and dropout draws from torch's own generator on each device. There is nothing to export. See
    docs/eager.md.

    Raises:
        HetuFxError: on every process; says what, where, the values and a hint.
    """
    asked = Options.given(options, old)
    if isinstance(model, nn.Module):
        as_it_was(model)
    if hasattr(model, "hetu"):
        raise StateError(
            "this model is parallel already\nhint: use model.hetu.add_variant(plan) to give it another plan"
        )
    if data not in ("per_rank", "global"):
        raise BatchError(f"data={data!r} is not known\nhint: use 'per_rank' or 'global'")
    preparation = Preparation(
        model,
        () if batch is None else batch,
        os.environ.get(PLAN_VARIABLE) or plan if plan == "auto" else plan,
        cluster,
        optimizer,
        loss_fn,
        Settings(data == "global", outputs, seed, asked),
        process_group,
        capture,
        compile,
        AskedRowDims(row_dims or {}),
        works_by_rows=check is False,
        weights=weights,
        device=device,
    )
    check_arguments(preparation)
    checks = _wants_checks(check)
    if batch is None:
        _attach_later(model, _later(preparation, checks, warm=asked.warm), is_first=True)
    else:
        _make_parallel(preparation, checks, warm=asked.warm)
    return model


def _later(wanted: Preparation, checks: bool, *, warm: bool = False) -> Parallelize:
    """Return what makes a model parallel in its first call, without a hold on the model."""
    wanted = replace(wanted, model=nn.Identity())

    def parallelize(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        batch = batch_from_call(LossCall(model.forward, wanted.loss_fn).signature, args, kwargs)
        _make_parallel(replace(wanted, model=model, batch=batch), checks, warm=warm)

    return parallelize


def _make_parallel(wanted: Preparation, checks: bool, *, warm: bool = False) -> None:
    runtime, adaptation = prepare(wanted, make_try_plan if checks else None)
    runtime.note_prepared({"import": IMPORT_SECONDS})
    rehoming = Rehoming(runtime, adaptation, [] if wanted.optimizer is None else [wanted.optimizer])
    # In this order: what a plan for new rates is made for, which devices are left, and then where homes are to be.
    runtime.watch(adaptation, rehoming, HomesFollow(runtime, adaptation, rehoming))
    runtime.when_idle(adaptation.stand_by)
    handle = Handle(runtime, adaptation, rehoming)
    plain = RestoreOriginal(wanted.model)
    _attach(wanted.model, runtime, handle, plain)
    attach_copying(wanted.model, plain, partial(_recipe, wanted, runtime, checks))
    if warm:
        handle.warm(wanted.batch)


def _recipe(wanted: Preparation, runtime: Runtime, checks: bool) -> Parallelize:
    """Return what makes a copy of the model parallel as the model is now, without a hold on the model."""
    names = sorted(runtime.variants, key=lambda name: name != runtime.current)
    plans = tuple(runtime.variants[name].plan for name in names)
    settings, options = runtime.settings, runtime.settings.options
    if options.align is not None:  # the file may be gone when a copy is made
        settings = replace(settings, options=replace(options, align=given_overrides(options.align)))
    settled = replace(wanted, batch=(), plan=plans, cluster=None, optimizer=None, weights=None, device=None)
    settled = replace(settled, settings=settings)
    return _later(settled, checks)


def _attach(model: nn.Module, runtime: Runtime, handle: Handle, plain: RestoreOriginal) -> None:
    """Make calls of the model run on the runtime; class, signature and names stay."""
    plain.look = Forwards(model, runtime, plain).look
    object.__setattr__(model, "no_sync", runtime.no_sync)
    object.__setattr__(model, "load_state_dict", MethodType(_load_state_dict, model))
    object.__setattr__(model, "hetu", handle)
    for framework in frameworks():
        framework.adopt(model)


def _load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load as the model's class does; parameters stay in their homes where they are to be replaced."""
    if assign:
        check_assigned_dtypes(model, state_dict)
    return type(model).load_state_dict(model, state_dict, strict=strict)


VARIABLE = "HETU_FX_CHECK"


def _wants_checks(asked: Literal["auto"] | bool) -> bool:
    """Tell whether plans are tried: as asked, or as the environment says where nobody has.

    Raises:
        StateError: something else was asked.
    """
    if asked not in ("auto", True, False):
        raise StateError(f"check={asked!r} is not known\nhint: use 'auto', True or False")
    return os.environ.get(VARIABLE, "1") != "0" if asked == "auto" else bool(asked)


def make_try_plan(wanted: Preparation, execution: Execution[Any], world: int) -> TryPlan:
    """Return what tries plans of a model that is about to become parallel."""
    return Checker(
        wanted.model, wanted.loss_fn, wanted.batch, execution, world=world, shared=wanted.settings.shared
    ).try_plan
