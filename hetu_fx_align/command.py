"""`hetu-fx-align SCRIPT:FUNCTION`: a model's ops in two ways and in an up-cast reference, as a table and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetu_fx.base.progress import telling
from hetu_fx.cli.given import check_folder, load_function, local_device
from hetu_fx.errors import AlignError, HetuFxError
from hetu_fx.show.table import table_text

if TYPE_CHECKING:
    from hetu_fx_align.report import Report
    from hetu_fx_align.way import Way

_HEADER = ("op", "class", "sizes", "module", "way", "what", "error", "cosine", "allowed", "verdict")
SHOWN = 12
_LONGEST = 40  # letters of sizes


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of `hetu-fx-align`."""
    parser = argparse.ArgumentParser("hetu-fx-align", description=__doc__)
    parser.usage = (
        "hetu-fx-align SCRIPT.py:FUNCTION [--ways fp32,bf16] [options]\n"
        "       hetu-fx-align --replay FILE [--ways fp32,bf16]\n"
        "       hetu-fx-align --losses LOSSES REFERENCE"
    )
    parser.add_argument(
        "model", nargs="?", metavar="SCRIPT:FUNCTION", help="returns (model, batch); the model returns its loss"
    )
    parser.add_argument(
        "--ways",
        default="fp32,bf16",
        metavar="A,B",
        help="eager, inductor, aot_eager, fp64, fp32, fp16, bf16, cpu, cuda, or SCRIPT.py:FUNCTION that returns a Way "
        "(default: %(default)s)",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="cast model and batch to bf16, fp16, fp32 or fp64 first")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument(
        "--tolerance", action="append", default=[], metavar="OP=T", help="relative, for an op; may be repeated"
    )
    parser.add_argument("--worst", type=int, default=SHOWN, metavar="N", help="ops of the table (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save the inputs of the ops of the table")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one op alone that --save has saved (.json)")
    parser.add_argument("--overrides", type=Path, metavar="FILE", help="write what to do with ops that are not within")
    parser.add_argument("--losses", type=Path, nargs=2, metavar="FILE", help="compare two trainings: lists or logs")
    parser.add_argument("--steps", type=int, default=300, help="losses that are compared (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetu-fx-align`; the status is 0 where all is within what is allowed, else 1, or 2 for an explained error."""
    try:
        return _run(make_parser().parse_args(arguments))
    except HetuFxError as error:
        print(f"hetu-fx-align: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if sum(given is not None for given in (options.model, options.replay, options.losses)) != 1:
        raise AlignError("nothing to align\nhint: give one of SCRIPT:FUNCTION, --replay FILE and --losses FILE FILE")
    if options.losses is not None:
        return _losses(options)
    report = _replayed(options) if options.replay is not None else _aligned(options)
    print(json.dumps(report.to_json(), indent=2) if options.json else as_text(report, options.worst))
    return 0 if report.is_within else 1


def _losses(options: argparse.Namespace) -> int:
    from hetu_fx_align.losses import compare_losses, read_losses

    found = compare_losses(*map(read_losses, options.losses), steps=options.steps)
    told = (
        f"{'alike' if found.is_alike else 'NOT alike'}: the losses of {found.steps} steps differ by "
        f"{found.mean_relative_error:.3%} in the mean (limit {found.limit:.1%}), most in step {found.worst_step}: "
        f"{found.worst_relative_error:.3%}"
    )
    print(json.dumps(found.to_json(), indent=2) if options.json else told)
    return 0 if found.is_alike else 1


def _replayed(options: argparse.Namespace) -> Report:
    from hetu_fx_align.report import replay
    from hetu_fx_align.saved import read_call

    return replay(read_call(options.replay), _ways(options.ways), _tolerances(options.tolerance))


def _aligned(options: argparse.Namespace) -> Report:
    import torch

    from hetu_fx_align.report import align_model, save_worst

    if options.overrides is not None:
        check_folder("--overrides", options.overrides, AlignError)
    ways, tolerances = _ways(options.ways), _tolerances(options.tolerance)
    torch.manual_seed(0)
    made: tuple[Any, Any] = load_function(options.model)()
    model, batch = _placed(*made, options)
    with telling("aligning ops") as tell:
        report = align_model(model, batch, ways, tolerances, tell)
    if options.save is not None:
        save_worst(report, options.save, options.worst)
    if options.overrides is not None:
        report.overrides.write(options.overrides)
    return report


def _placed(model: Any, batch: Any, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its batch on the device, in the dtype that is asked for."""
    import torch

    from hetu_fx.base.torch_private import tree_map_only
    from hetu_fx_align.way import Way, dtype_named

    dtype = None if options.dtype is None else dtype_named(options.dtype)
    place = Way("", dtype=dtype, device=local_device(options.device))
    return model.to(place.device, dtype), tree_map_only(torch.Tensor, place.tensor, batch)


def _ways(text: str) -> tuple[Way, ...]:
    """Return the ways of a list: by name, or made by a function."""
    from hetu_fx_align.way import Way, way_named

    def one(name: str) -> Way:
        if ":" not in name:
            return way_named(name)
        made: Any = load_function(name)()
        if not isinstance(made, Way):
            raise AlignError(f"{name} returns {type(made).__name__}, no hetu_fx_align.way.Way\nhint: let it return one")
        return made

    return tuple(map(one, text.split(",")))


def _tolerances(given: Sequence[str]) -> dict[str, float]:
    from hetu_fx.transforms.rewrites.op_overrides import find_op

    found = {}
    for text in given:
        name, equals, number = text.partition("=")
        try:
            found[str(find_op(name, "--tolerance"))] = float(number)
        except ValueError:
            raise AlignError(
                f"--tolerance {text!r} has no number\nhint: write it like aten.linear.default=1e-4"
            ) from None
        if not equals or not found[name] >= 0:
            raise AlignError(f"--tolerance {text!r} must be 0 or more\nhint: write it like aten.linear.default=1e-4")
    return found


def as_text(report: Report, worst: int) -> str:
    """Return the table of the worst ops, and a line for each way's run of the whole model."""
    rows = [_row(op, verdict) for op in report.to_json()["ops"][:worst] for verdict in op["ways"]]
    return "\n".join([table_text(_HEADER, rows), report.summary(), *map(_whole, report.to_json()["whole"])])


def _row(op: dict[str, Any], verdict: dict[str, Any]) -> list[str]:
    found = next(iter(verdict["findings"]), None)
    numbers = ["", "", "", ""]
    if found is not None:
        numbers = [found["what"], _error(found["error"]), f"{found['cosine']:.6f}", f"{found['allowed']:.1e}"]
    sizes = op["shapes"] if len(op["shapes"]) <= _LONGEST else f"{op['shapes'][: _LONGEST - 3]}..."
    told = f"{verdict['verdict']}: {verdict['says']}" if verdict["says"] else verdict["verdict"]
    return [op["op"], op["class"], sizes, op["module"] or "(model)", verdict["way"], *numbers, told]


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.8g}"


def _error(error: float | None) -> str:
    return "infinite" if error is None else f"{error:.1e}"


def _whole(run: dict[str, Any]) -> str:
    """Say in a line how a way does in a whole forward and backward."""
    if run["says"]:
        return f"{run['way']}: cannot run the whole model: {run['says']}"
    line = f"{run['way']}: loss {_loss(run['loss'])}, in float64 {_loss(run['reference'])}"
    if not run["first"]:
        return f"{line}; no module drifts"
    drift = run["first"][0]
    what = "output" if drift["direction"] == "forward" else "gradient"
    return (
        f"{line}; the {what} of module {drift['module'] or '(model)'} drifts first, by {_error(drift['error'])} "
        f"({drift['allowed']:.1e} allowed): {drift['op']} at {drift['line']}"
    )
