"""What torch's words about a trace mean to who wrote the model, and what to do about it.

Torch says "Could not guard on data-dependent expression Eq(u0, 1)" where Python reads values; nobody has
written a `u0`.
"""

from __future__ import annotations

import dis
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_tb

from hetu_fx.errors import HetuFxError
from hetu_fx.graph import meta

_RAISE = dis.opmap["RAISE_VARARGS"]
_TORCH_THAT_CHECKS = ("distributions", "nn", "functional.py", "__init__.py")
"""What of torch raises for its users, and not for the trace."""


@dataclass(frozen=True)
class Meaning:
    """What an error means.

    Attributes:
        words: what the forward does, after "it".
        cure: what to do instead, as a command.
    """

    words: str
    cure: str


READS_VALUES = Meaning(
    "it reads numbers from tensors and goes on by them, which a graph does not have when it is made: bool(), int(), "
    "range() or a size of what a tensor holds",
    "choose between values by torch.where, pass sizes and lengths as Python numbers, and count by "
    "one_hot(x, num_classes).sum(0) in the place of bincount",
)
_NUMPY = Meaning(
    "it makes an array of numpy, or a list, of a tensor, which has no values when a graph is made",
    "compute it by ops of torch, or outside of the forward",
)
TRANSFORMS = Meaning(
    "it calls a transform of torch.func (grad, vmap, jacrev, ...), which a trace does not see through",
    "take derivatives by torch.autograd.grad(..., create_graph=True), and write vmap as ops over one more dim",
)
_UNSEEN = Meaning(
    "it uses a tensor that its trace has not seen made: by code that is not of torch, or in an earlier call",
    "make it in the forward, by ops of torch, of inputs, parameters and buffers",
)
_NO_FAKE = Meaning(
    "it calls an op of which torch does not know what shapes it makes",
    "register that (torch.library.register_fake), or use other ops",
)
_NEEDS_NONE = Meaning(
    "it takes a derivative by or of a tensor that needs no gradient in the forward, as inputs do not",
    "call requires_grad_() on it in the forward",
)
_RECOMPUTES = Meaning(
    "it calls a module once more while it takes a derivative, as torch.utils.checkpoint does",
    "leave torch.utils.checkpoint out, and let the plan recompute",
)
_FIXED = Meaning(
    "its code holds for some sizes only",
    "name the dims that count rows (row_dims), or compare sizes outside of the forward",
)
_OTHER = Meaning("torch.export cannot follow what it does there", "rewrite the line")

_COUNTED = {
    "one_hot": Meaning("it calls one_hot without the number of classes, which the labels tell", "give num_classes"),
}
"""Functions whose result is as large as values tell, by their names."""

_MEANINGS = {
    r"functorch|GradTrackingTensor|BatchedTensor|TensorWrapper|vmap": TRANSFORMS,
    r"'Tensor' object has no attribute 'constant'": TRANSFORMS,
    r"numpy|tolist": _NUMPY,
    r"_export_root": _RECOMPUTES,
    r"ensors does not require grad": _NEEDS_NONE,
    r"constant's list|is not tracked with proxy": _UNSEEN,
    r"^UnsupportedOperator|fake impl|[Mm]eta kernel|'Meta' backend|UnsupportedFakeTensor": _NO_FAKE,
    r"^GuardOnDataDependent|^DataDependent|^DynamicOutputShape|^PendingUnbacked|data-dependent": READS_VALUES,
    r"value out of a tracing tensor": READS_VALUES,
    r"unbacked|\b(?:zuf|u)\d+\b|got FakeTensor|int.* FakeTensor": READS_VALUES,
    r"[Cc]onstraints? violat|^ConstraintViolation|specializ|\bs\d+\b|SymInt|SymFloat|SymBool": _FIXED,
    r"FakeTensor|SymNode|[Pp]roxy|torch\._|TORCH_LOGS|file an issue": _OTHER,
}  # fmt: skip
"""By what its type and text have in them; the first that fits."""


def explain_trace_error(error: BaseException) -> Meaning | None:
    """Return what an error of a trace means, where its own words would not tell; None where they do."""
    if isinstance(error, HetuFxError) or is_of_the_forward(error):
        return None
    counted = next((_COUNTED[name] for name in _called(error) if name in _COUNTED), None)
    if counted is not None:
        return counted
    said = f"{type(error).__name__}: {error}"
    return next((meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, said)), None)


def _called(error: BaseException) -> Iterator[str]:
    """Yield the names of torch's functions that were running, which a mode of the trace has seen called."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == "__torch_function__":
            yield getattr(frame.f_locals.get("func"), "__name__", "")


def is_of_the_forward(error: BaseException) -> bool:
    """Tell whether the forward, or what of torch checks for its users, raises an error by a statement."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or isinstance(error, HetuFxError):
        return False
    code = last.tb_frame.f_code
    in_torch, inside = code.co_filename.startswith(meta.TORCH_FOLDER), code.co_filename.removeprefix(meta.TORCH_FOLDER)
    checks = not in_torch or inside.split(os.sep)[0] in _TORCH_THAT_CHECKS
    return checks and code.co_code[last.tb_lasti] == _RAISE
