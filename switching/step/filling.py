"""Rows of unequal lengths: a rank fills its own up to the longest of all, and gets outputs of its own length back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from sympy import sympify
from torch import Tensor, nn

from hetu_fx.base.frameworks import paddings
from hetu_fx.batches.packing import Filling
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import BatchError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.graph.row_dims import other_dims
from hetu_fx.program.filling_safety import Difference, pad_input, way_of_filling
from hetu_fx.program.program import Program, evaluate
from hetu_fx.switching.step.batches import MicroBatchRows, ReadBatch, dims_besides_rows
from hetu_fx.switching.step.rows import RowPlan


class Fillings:
    """What fills up the inputs of one model's programs, and what trace that leaves: found out when it is first needed.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: WeakKeyDictionary[Program, tuple[Filling, tuple[Difference, ...]]] = WeakKeyDictionary()

    def filled(self, batch: ReadBatch, facts: StepFacts, *, wants_values: bool) -> ReadBatch:
        """Return a batch with the sizes that ranks have agreed on.

        Raises:
            BatchError: on every rank, where sizes differ and the program would not do the same for filled rows.
        """
        _check_sizes_are_open(batch, facts)
        filling, found = self._of(batch.program)
        relevant = [one for one in found if wants_values or one.kind is not OutputKind.VALUE]
        if facts.unequal_sizes and relevant:
            raise BatchError(
                f"ranks bring inputs of unequal sizes (the largest are {_named(batch, facts)}), and filled up to one "
                f"size the model would do something else: {relevant[0].text}\n"
                f"hint: pass what masks the padding (attention_mask) if the model takes it, or pad all ranks' batches "
                f'of a step to the same size in the collator (padding="max_length", or pad_to_multiple_of with a '
                f"multiple that all stay below)"
            )
        differs = bool(facts.unequal_sizes) and any(one.kind is OutputKind.VALUE for one in found)
        return replace(_with_sizes(batch, facts, filling), changes_values=differs)

    def _of(self, program: Program) -> tuple[Filling, tuple[Difference, ...]]:
        if program not in self._known:
            self._known[program] = way_of_filling(program, paddings(self._model), self._model.get_buffer)
        return self._known[program]


def _check_sizes_are_open(batch: ReadBatch, facts: StepFacts) -> None:
    shapes = {leaf.name: meta.shape(leaf.node) for leaf in batch.program.inputs}
    dims = dims_besides_rows(batch.tensors, batch.program.row_dims)
    sizes = [sympify(meta.expression(shapes[name][dim])) for name, dim in dims]
    fixed = [batch.facts.size_names[place] for place in facts.unequal_sizes if sizes[place].is_number]
    if fixed:
        why = "; ".join(batch.program.graph.notes) or "loops over a size fix it, as comparisons do"
        raise BatchError(
            f"{', '.join(fixed)} is not the same on all ranks, but the model's forward fixes it ({why})\n"
            f"hint: pad all ranks' batches of a step to the same size in the collator"
        )


def _named(batch: ReadBatch, facts: StepFacts) -> str:
    return ", ".join(f"{name}: {size}" for name, size in zip(batch.facts.size_names, facts.sizes, strict=True))


def _with_sizes(batch: ReadBatch, facts: StepFacts, filling: Filling) -> ReadBatch:
    shapes = _shapes(batch.program, batch.tensors, facts.sizes)
    tensors = {name: pad_input(tensor, shapes[name], name, filling) for name, tensor in batch.tensors.items()}
    bindings = batch.program.bind(tensors)
    sizes_of = facts.sizes_of if facts.unequal_sizes else ()
    return replace(batch, tensors=tensors, bindings=bindings, brought=batch.bindings, sizes_of=sizes_of)


def _shapes(program: Program, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs with other sizes than they have, in the order of `sizes_besides_rows`."""
    rest, shapes = iter(sizes), {}
    for name, tensor in tensors.items():
        others = {dim: next(rest) for dim in other_dims(tensor, program.row_dims.get(name))}
        shapes[name] = tuple(others.get(dim, size) for dim, size in enumerate(tensor.shape))
    return shapes


def narrow_to_own_rows(batch: ReadBatch, cut: MicroBatchRows, rows: RowPlan) -> MicroBatchRows:
    """Return a micro-batch of a filled batch with the largest sizes that the ranks of its own rows have brought."""
    last = cut.first_row + cut.rows
    brought = [
        sizes
        for sizes, owned in zip(batch.sizes_of, rows.owned, strict=True)
        if max(owned.start, cut.first_row) < min(owned.stop, last)
    ]
    if not brought:
        return cut
    shapes = _shapes(batch.program, cut.tensors, tuple(map(max, zip(*brought, strict=True))))
    tensors = {name: tensor[tuple(map(slice, shapes[name]))].contiguous() for name, tensor in cut.tensors.items()}
    try:
        bindings = batch.program.bind(tensors)
    except BatchError:  # the graph holds for the sizes of all ranks, and not for these
        return cut
    return replace(cut, tensors=tensors, bindings={**cut.bindings, **bindings})


def filled_share(narrow: Sequence[MicroBatchRows], cuts: Sequence[MicroBatchRows]) -> float:
    """Return which share of the elements of some micro-batches others have that were made of them."""
    some, others = (sum(t.numel() for cut in made for t in cut.tensors.values()) for made in (narrow, cuts))
    return some / others if others else 1.0


def as_brought(batch: ReadBatch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs with the sizes that follow from the inputs as this rank has brought them."""
    if batch.brought is None:
        return dict(values)
    graph, cut = batch.program.graph, dict(values)
    for leaf, node in graph.outputs_of(OutputKind.VALUE):
        for dim, size in enumerate(meta.shape(node) if leaf.name in cut else ()):
            before, now = (evaluate((meta.expression(size),), sizes)[0] for sizes in (batch.brought, batch.bindings))
            if before != now:
                cut[leaf.name] = cut[leaf.name].narrow(dim, 0, before)
    return cut
