"""A model on the meta device becomes parallel without any process ever holding it: each rank gets what it owns.

Its parameters first become home tensors that wait for their pieces: a model is captured and planned for without values.
Once it is known who owns what, the pieces come from files, by slices, or from the model's own initialisation. Buffers,
which every rank has whole, come before that, as captures read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hetu_fx.base.device_types import HOST
from hetu_fx.base.frameworks import frameworks
from hetu_fx.base.patches import install_patches
from hetu_fx.base.progress import telling
from hetu_fx.base.torch_private import buffer_slots, mark_parameter, without_weak_references
from hetu_fx.checkpoint.checkpoint import load_checkpoint, read_alike, stored_weights, tied_names
from hetu_fx.checkpoint.folders import find_folder
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.checkpoint.own_init import OwnInit
from hetu_fx.checkpoint.tensor_files import WeightFiles
from hetu_fx.comm_ops.wire.consensus import all_gather_object, from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CheckpointError, StateError
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.parameters import swap_parameter
from hetu_fx.switching.home.tensor import give, make_awaited, mark_written

Weights = str | Path | None
INIT = "init"

Arrive = Callable[[Mapping[str, HomeLayout]], None]
"""Gives all parameters their pieces, under these layouts; collective."""

_HINT = (
    "hint: give weights='FOLDER' of safetensors files, as save_pretrained and model.hetu.save write them, or "
    "weights='init' for the model's own initialisation"
)


def _is_on_meta(model: nn.Module) -> bool:
    """Tell whether a model's parameters have no values.

    Raises:
        StateError: some of them have, or one has no shape.
    """
    parameters = dict(model.named_parameters())
    empty = [name for name, parameter in parameters.items() if parameter.is_meta]
    if empty and len(empty) < len(parameters):
        some = next(name for name in parameters if name not in empty)
        raise StateError(
            f"parameter {empty[0]!r} is on the meta device, but {some!r} is on {parameters[some].device}\n"
            f"hint: make all of the model on the meta device, or none of it"
        )
    if lazy := next((name for name in empty if is_lazy(parameters[name])), None):
        raise StateError(f"parameter {lazy!r} is on the meta device and has no shape\nhint: give its module its sizes")
    return bool(empty)


def _ranks_on_meta(model: nn.Module, weights: Weights, table: GroupTable) -> tuple[bool, ...]:
    """Return, by rank, whether its parameters have no values; collective.

    Raises:
        StateError: on every rank, if there are weights for a rank that has values, or none for rank 0 that has none.
    """
    on_meta = raise_on_all_ranks(table, lambda: _is_on_meta(model))
    ranks = tuple(all_gather_object(table, on_meta))
    if weights is not None and not all(ranks):
        which = "the parameters have" if not any(ranks) else f"the parameters of rank {ranks.index(False)} have"
        raise StateError(
            f"weights={str(weights)!r} is given, but {which} values already\nhint: leave it out, make the model on the "
            f"meta device (with torch.device('meta'): ...), or read them by model.hetu.load"
        )
    if weights is None and ranks[0]:
        name = next(iter(dict(model.named_parameters())))
        raise StateError(f"parameter {name!r} is on the meta device and has no values\n{_HINT}")
    return ranks


class _ValueSource(Protocol):
    """Where a model's values come from. All is collective."""

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse parameters for which there are none, before memory is taken for any."""

    def has(self, name: str) -> bool:
        """Tell whether there is a value for a buffer; known once it was checked."""

    def init(self) -> OwnInit:
        """Return what computes other buffers. Not collective."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill home tensors (this rank's pieces) and plain ones, by their first names."""


class _FileValues:
    """Values in safetensors files: a rank reads the slices that it owns, cast to the model's dtypes. Made by all ranks.

    Args:
        path: a folder, or a file in one.
        model: whose.
        seed: of what buffers may draw that no file has.
        table: the ranks.

    Raises:
        CheckpointError: there is nothing at the path.
    """

    def __init__(self, path: Path, model: nn.Module, seed: int, table: GroupTable) -> None:
        self.init = partial(OwnInit, model, seed)
        self.folder, self._file = (path.parent, path.name) if path.is_file() else (path, "")
        raise_on_all_ranks(table, lambda: _check_is_there(path))
        self._table = table
        names = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
        self._stored = read_alike(self.folder, lambda opened: frozenset(WeightFiles(opened, self._file).index), table)
        tied, others = tied_names(model), self._stored - names
        renamed = {other: own for one in frameworks() for other, own in one.stored_names(model, others).items()}
        self._aliases = {**{other: tied.get(own, own) for other, own in renamed.items()}, **tied}
        self._known = names | self._aliases.keys()

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse files that lack a parameter, or have one twice or of another shape; headers alone are read."""
        read_alike(self.folder, partial(self._check, parameters), self._table)
        others = sorted(self._stored - self._known)
        if others and self._table.rank == 0:
            warnings.warn(
                f"{self.folder} holds {len(others)} tensors that the model does not have, such as {others[0]!r}: they "
                f"are not read",
                stacklevel=6,
            )

    def _check(self, parameters: Mapping[str, Tensor], opened: OpenFolder) -> None:
        stored_weights(opened, parameters, self._aliases, file=self._file, foreign=True)

    def has(self, name: str) -> bool:
        """Tell whether the files hold a buffer."""
        return not self._stored.isdisjoint({name, *(other for other, own in self._aliases.items() if own == name)})

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors; raises CheckpointError on all ranks."""
        load_checkpoint(self.folder, tensors, aliases=self._aliases, file=self._file, foreign=True, table=self._table)


def _check_is_there(path: Path) -> None:
    if not path.is_file() and not find_folder(path).is_dir():
        raise CheckpointError(
            f"there are no weights at {path.absolute()}\nhint: give a folder or a file of this machine; "
            f"huggingface_hub.snapshot_download brings those of a hub"
        )


class _InitValues:
    """Values that the model's own initialisation gives; a rank runs the modules of which it owns something."""

    def __init__(self, model: nn.Module, seed: int, table: GroupTable) -> None:
        self._init, self._table = OwnInit(model, seed), table

    def init(self) -> OwnInit:
        """Return it."""
        return self._init

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse parameters that no module gives a value."""
        raise_on_all_ranks(self._table, lambda: self._init.check(parameters))

    def has(self, name: str) -> bool:
        """Buffers are computed by their modules anyway."""
        return False

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors; raises StateError on all ranks."""
        raise_on_all_ranks(self._table, lambda: self._fill(tensors))

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        def owned(name: str) -> bool:
            tensor = tensors[name]
            return not isinstance(tensor, HomeTensor) or tensor.local.numel() > 0

        with closing(self._init.values(tensors, owned)) as values, torch.no_grad():
            for name, whole in values:
                tensor = tensors[name]
                if isinstance(tensor, HomeTensor):
                    tensor.local.copy_(tensor.home_layout.take(whole))
                else:
                    tensor.copy_(whole)
                del whole  # before the next ones are made
        mark_written([tensor for tensor in tensors.values() if isinstance(tensor, HomeTensor)])


@contextmanager
def awaiting_values(
    model: nn.Module, weights: Weights, device: torch.device, seed: Callable[[], int], table: GroupTable
) -> Iterator[Arrive | None]:
    """Let a model on the meta device be one on `device` whose parameters wait for their values; collective.

    Yields what gives them their values, which the block has to call. None where it need not: the model has values, or
    has them from now on, as its rank is alone; or rank 0 has them, of which the others get theirs when they are cut.
    Whatever fails inside leaves the model on the meta device, as it was.

    Args:
        model: stays the same object, with the same parameters.
        weights: a folder of safetensors files, one such file, or "init".
        device: where this rank computes.
        seed: gives that of the initialisation, the same on all ranks; collective.
        table: the ranks.

    Raises:
        HetuFxError: on every rank, before anything is changed: there are no weights, or they do not fit.
    """
    on_meta = _ranks_on_meta(model, weights, table)
    if not any(on_meta):
        yield None
        return
    for framework in frameworks() if on_meta[table.rank] else ():
        framework.tie(model)
    parameters = dict(model.named_parameters())
    with ExitStack() as undo:
        if weights is None:
            _await_first(model, parameters, device, table, undo)
            yield None
        else:
            values = _values_of(model, weights, seed(), table)
            values.check(parameters)
            _give_buffers(model, values, device, table, undo)
            raise_on_all_ranks(table, lambda: _await(model, parameters, device, undo, alone=table.size == 1))
            yield _arrival(parameters, values, table)
        undo.pop_all()


def _values_of(model: nn.Module, weights: Weights, seed: int, table: GroupTable) -> _ValueSource:
    if weights == INIT:
        return raise_on_all_ranks(table, lambda: _InitValues(model, seed, table))
    return _FileValues(Path(str(weights)), model, seed, table)


def _arrival(parameters: Mapping[str, nn.Parameter], values: _ValueSource, table: GroupTable) -> Arrive | None:
    """Return what gives parameters their values; of a rank alone they have them now, and it is None."""
    if table.size > 1:
        return partial(_arrive, parameters, values, table)
    with telling("loading the weights"):
        values.fill(parameters)
    return None


def _await_first(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
    table: GroupTable,
    undo: ExitStack,
) -> None:
    """Let parameters of a rank without values wait for those of rank 0; buffers get theirs now. Collective."""
    held = dict(model.named_buffers())
    stored = from_first(table, {name: buffer.detach().to(HOST) for name, buffer in held.items() if not table.rank})
    if any(parameter.is_meta for parameter in parameters.values()):
        _put_buffers(model, {name: stored[name].to(device) for name in held}, undo)
    raise_on_all_ranks(
        table,
        lambda: _await(model, {n: p for n, p in parameters.items() if p.is_meta}, device, undo, alone=False),
    )


def _await(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device, undo: ExitStack, *, alone: bool
) -> None:
    """Let parameters be home tensors without pieces; of a rank alone plain ones, whose values come right away."""
    swapped: list[tuple[str, nn.Parameter, Tensor]] = []
    undo.callback(_swap, model, swapped)
    install_patches("torch")
    with without_weak_references(model):
        for name, parameter in parameters.items():
            other: Tensor
            if alone:
                other = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            else:
                other = make_awaited(parameter, partial(_refuse, name), device, requires_grad=parameter.requires_grad)
                mark_parameter(other)
            swap_parameter(name, parameter, other)
            swapped.append((name, parameter, other))


def _swap(model: nn.Module, pairs: Iterable[tuple[str, nn.Parameter, Tensor]]) -> None:
    with without_weak_references(model):
        for name, parameter, other in pairs:
            swap_parameter(name, parameter, other)


def _refuse(name: str) -> NoReturn:
    raise StateError(f"parameter {name!r} has no value yet: weights come once a plan says who owns what")


def _arrive(
    parameters: Mapping[str, nn.Parameter], values: _ValueSource, table: GroupTable, layouts: Mapping[str, HomeLayout]
) -> None:
    for name, parameter in parameters.items():
        assert isinstance(parameter, HomeTensor), "it waits for its piece"
        piece = torch.empty(layouts[name].local_shape, dtype=parameter.dtype, device=parameter.device)
        give(parameter, piece, layouts[name])
    with using(table), telling("loading the weights"):
        values.fill(parameters)


def _give_buffers(
    model: nn.Module, values: _ValueSource, device: torch.device, table: GroupTable, undo: ExitStack
) -> None:
    """Give buffers the values of the files, else those that they have, else those that their modules compute."""
    held = dict(model.named_buffers())
    stored = {name: torch.empty_like(buffer, device=device) for name, buffer in held.items() if values.has(name)}
    if stored:
        values.fill(stored)
    lost = [name for name, buffer in held.items() if buffer.is_meta and name not in stored]
    computed = raise_on_all_ranks(table, partial(_computed, model, values, lost))
    kept = {name: buffer for name, buffer in held.items() if name not in stored and name not in computed}
    _put_buffers(model, {name: buffer.to(device) for name, buffer in {**kept, **computed}.items()} | stored, undo)


def _put_buffers(model: nn.Module, made: Mapping[str, Tensor], undo: ExitStack) -> None:
    by_identity = {id(buffer): made[name] for name, buffer in model.named_buffers()}
    for module in model.modules():
        slots = buffer_slots(module)
        undo.callback(slots.update, dict(slots))
        slots.update({name: by_identity[id(buffer)] for name, buffer in slots.items() if buffer is not None})


def _computed(model: nn.Module, values: _ValueSource, names: Collection[str]) -> dict[str, Tensor]:
    """Return buffers as their modules compute them; tensors that are no buffers, nothing gives a value."""
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            if isinstance(held, Tensor) and held.is_meta:
                raise StateError(
                    f"attribute {name!r} of module {path!r} is a tensor on the meta device, and nothing gives it a "
                    f"value\nhint: make it a buffer (register_buffer), or make it in forward"
                )
    if not names:
        return {}
    init = values.init()
    init.check(names)
    with closing(init.values(names, lambda name: True)) as made:
        return dict(made)
