"""Write an exported program as ONNX, by torch's own exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from hetu_fx.errors import ExportError

NEEDED = ("onnx", "onnxscript")
_MOST_INSIDE = 1 << 30  # bytes of weights in the file itself: protobuf takes no file of 2 GiB


def check_onnx_is_there() -> None:
    """Raise ExportError where packages are missing that torch needs to write ONNX."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"onnx=True needs {' and '.join(missing)}, which cannot be imported here\nhint: pip install 'hetu-fx[onnx]'"
        )


def write_onnx(
    exported: torch.export.ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Write a program to a file; weights of more than a gibibyte are in another beside it, `<path>.data`.

    Raises:
        ExportError: torch has no ONNX for it.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in exported.state_dict.values())
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _quiet("torch.onnx"):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                exported, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False
            )
            assert program is not None, "with dynamo=True there is a program"
            program.save(str(path), external_data=size > _MOST_INSIDE)
    except Exception as error:
        raise ExportError(f"the inference graph cannot be written as ONNX: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
