"""How a model takes sequences of mixed lengths: packed into rows, filled up, or only beside others of their length."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hetu_fx.base.frameworks import label_inputs, position_input
from hetu_fx.batches.packing import IGNORED, Filling, fill_rows
from hetu_fx.errors import BatchError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import input_tensors
from hetu_fx.graph.graph import Leaf
from hetu_fx.planner.dispatch.assignment import Batching, Request
from hetu_fx.program.captures import Programs
from hetu_fx.program.packing_safety import why_not_packed, why_not_padded, why_whole_rows
from hetu_fx.program.program import Program
from hetu_fx.switching.step.assigned_rows import Sequences
from hetu_fx.transforms.rewrites.counts import ROWS

_SHORTEST = 16  # tokens at least of the longest row, so that parts of it differ
_PROBE = 4  # tokens of the rows whose labels are counted


@dataclass(frozen=True)
class SequenceOptions:
    """What inputs of sequences mean; the names are those of the frameworks that are known.

    Attributes:
        labels: inputs that are ignored where they are `IGNORED`.
        positions: the model's argument for positions that restart in each sequence.
        packs: whether sequences may share rows; None: where attention has masks that follow from the positions.
        multiple: rows have a multiple of so many tokens.
        tokens: of a micro-batch at most, where neither the plan nor its pipelines have a `max_length`; None: as many
            as the longest sequence of the batch.
    """

    labels: tuple[str, ...] = field(default_factory=label_inputs)
    positions: str = field(default_factory=position_input)
    packs: bool | None = None
    multiple: int = 1
    tokens: int | None = None


@dataclass(frozen=True, eq=False)
class SequenceForm:
    """How batches of one form run: the program of their rows, what fills these, and how they may be batched.

    With `whole_rows` attention costs what all pairs of a row's tokens do.
    """

    program: Program
    filling: Filling
    batching: Batching
    multiple: int
    whole_rows: bool

    def sample(self, sequences: Sequences, width: int) -> Mapping[str, Tensor]:
        """Return the inputs of two rows of so many tokens, of zeros."""
        return input_tensors(self.program.graph, _sample_rows(sequences, self.filling, width))

    def request(self, lengths: tuple[int, ...], tokens: int | None) -> Request:
        """Return what is asked of a policy for sequences of these lengths."""
        return Request(lengths, self.batching, self.multiple, tokens, self.whole_rows)


def form_of_sequences(
    programs: Programs, sequences: Sequences, options: SequenceOptions, training: bool
) -> SequenceForm:
    """Find out how the model takes these sequences; captures it where that has not been done.

    Raises:
        BatchError: it cannot be trained on rows of unequal lengths.
        CaptureError: it cannot be captured.
    """
    plain = Filling({name: IGNORED for name in options.labels})
    takes_positions = options.positions in programs.signature.parameters
    reason = f"the model's forward takes no {options.positions!r}"
    if takes_positions and options.packs is not False and options.positions not in sequences.inputs:
        filling = replace(plain, positions=options.positions)
        program = programs.find(_sample_rows(sequences, filling), training)
        reason = "" if options.packs else why_not_packed(*_known_of(program), options.positions)
        if not reason:
            return _checked(_together(program, filling, options), sequences, options)
    if options.packs:
        raise BatchError(f"sequences cannot be packed as asked for by packs=True: {reason}\nhint: leave packs out")
    program = programs.find(_sample_rows(sequences, plain), training)
    return _checked(_apart(program, plain, options, reason), sequences, options)


def _together(program: Program, filling: Filling, options: SequenceOptions) -> SequenceForm:
    """Return the form of a model whose rows have several sequences each."""
    whole = why_whole_rows(*_known_of(program))
    if whole:
        warnings.warn(f"packed rows pay attention for all pairs of their tokens, as {whole}", stacklevel=2)
    return SequenceForm(program, filling, Batching.PACKED, options.multiple, whole_rows=bool(whole))


def _apart(program: Program, filling: Filling, options: SequenceOptions, why: str) -> SequenceForm:
    """Return the form of a model whose rows have one sequence each; they are filled up if it does not see that."""
    seen = why_not_padded(*_known_of(program))
    if options.packs is None:
        alike = f", and as {seen}, only beside others of the same length" if seen else ""
        warnings.warn(f"sequences are not packed, as {why}: each has a row of its own{alike}", stacklevel=2)
    return SequenceForm(program, filling, Batching.ALIKE, 1 if seen else options.multiple, whole_rows=True)


def _known_of(program: Program) -> tuple[Any, Any, Any]:
    return program.graph, program.factors, program.flow


def longest_row(sequences: Sequences) -> int:
    """Return the tokens of the rows that the model is captured with."""
    return max(_SHORTEST, *sequences.lengths)


def _sample_rows(sequences: Sequences, filling: Filling, width: int | None = None) -> dict[str, Any]:
    """Return a batch of two rows of one sequence, of zeros, with the other arguments as they are."""
    width = width or longest_row(sequences)
    zeros = {name: (parts[0].new_zeros((width, *parts[0].shape[1:])),) for name, parts in sequences.inputs.items()}
    return {**fill_rows(zeros, ((0,), (0,)), width, filling), **sequences.others}


def _checked(form: SequenceForm, sequences: Sequences, options: SequenceOptions) -> SequenceForm:
    """Return the form with what its loss does with the first label of a sequence.

    Raises:
        BatchError: the model or its loss does not do the same for a sequence, whatever else is in the batch.
    """
    if not form.program.loss_name:
        raise BatchError(
            "sequences of mixed lengths run in micro-batches, so the loss must come from the model\n"
            "hint: pass labels, or loss_fn=... to hetu_fx.auto_parallelize"
        )
    fixed = [leaf.name for leaf in form.program.inputs if _has_fixed_length(leaf, sequences)]
    if fixed:
        raise BatchError(
            f"the captured graph takes inputs {fixed} of one length only, so that sequences cannot run at their own\n"
            f"hint: pad them to that length"
        )
    if form.program.mixes_rows:
        raise BatchError(
            "rows of a batch meet in the model (or their number is fixed), so that sequences cannot be spread over "
            "micro-batches\nhint: pad them to batches of one length"
        )
    if ROWS in form.program.counts:
        raise BatchError(
            "the loss is a mean over rows, of which sequences have unequal lengths, so that it would depend on who "
            f"shares a row\nhint: let it be a mean over the labels {list(options.labels)} that are not {IGNORED}"
        )
    unused = replace(form.filling, first_unused=tuple(name for name in options.labels if name in sequences.inputs))
    is_unused = _counts(form, sequences, form.filling) == _counts(form, sequences, unused)
    return replace(form, filling=unused if is_unused else form.filling)


def _has_fixed_length(leaf: Leaf, sequences: Sequences) -> bool:
    return leaf.name in sequences.inputs and not meta.is_symbolic(meta.shape(leaf.node)[1])


def _counts(form: SequenceForm, sequences: Sequences, filling: Filling) -> tuple[float, ...]:
    """Return what the loss counts in rows that have a label for every token but those that are for nothing."""
    return form.program.prologue(replace(form, filling=filling).sample(sequences, _PROBE))
