"""The command line: `hetu-fx COMMAND`. Parses, calls one function, prints, gives the exit status.

Whatever needs torch is imported by the command that needs it, so that --help and emulate start quickly.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from hetu_fx.base.words import bytes_text
from hetu_fx.cli.doctor import add_doctor, call_doctor, call_env
from hetu_fx.cli.given import check_folder, load_function
from hetu_fx.cli.measure import add_measure, add_profile, call_measure, call_profile
from hetu_fx.cli.plan import add_plan, call_plan, more_of_plan
from hetu_fx.cli.simulate import add_simulate, call_simulate
from hetu_fx.cli.verify import add_verify, call_verify
from hetu_fx.errors import EnvironmentProblem, HetuFxError
from hetu_fx.launch.job import NO_RUN_ID, LaunchSpec, NodesSpec
from hetu_fx_emulate.command import add_emulate, call_emulate

IDLE_MINUTES = 10.0


def _add_clean(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx clean`."""
    parser.add_argument("--yes", action="store_true", help="remove what is stale (default: only list it)")
    parser.add_argument(
        "--idle",
        type=float,
        default=IDLE_MINUTES,
        metavar="MINUTES",
        help="a job is stale once no process of it lives and nothing was written for this time (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _call_clean(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx clean`."""
    from hetu_fx.checkpoint.snapshot_folders import job_folders

    found = job_folders()
    stale = [one for one in found if not one.is_used and one.idle_seconds >= 60 * options.idle]
    states = {one.path: "removed" if options.yes and one.remove() else "stale" for one in stale}
    rows = [
        {
            "folder": str(one.path),
            "bytes": one.num_bytes,
            "idle_seconds": round(one.idle_seconds),
            "state": states.get(one.path, "in use" if one.is_used else "recent"),
        }
        for one in found
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for one, row in zip(found, rows, strict=True):
        print(f"{row['state']:8} {bytes_text(one.num_bytes):>10} idle {one.idle_seconds / 60:.0f} min  {one.path}")
    if not found:
        print("no job has snapshots in this node's memory")
    elif stale and not options.yes:
        print("hint: hetu-fx clean --yes removes what is stale; its jobs can then resume from checkpoints only")
    return 0


def _add_exported_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx exported`."""
    parser.add_argument("folder", type=Path, help="what model.hetu.export wrote")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="tell whether this plan is one of the exported")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="tell whether the model that this makes has changed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_exported(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx exported`; the status is 1 where files are damaged or the export is stale."""
    import torch

    from hetu_fx.export.load import check_exported
    from hetu_fx.plans.plan import Plan

    plan = None if options.plan is None else Plan.read(options.plan)
    make = None if options.model is None else load_function(options.model)
    with torch.device("meta"):  # so that it takes no memory
        model = None if make is None else make()
    found = check_exported(options.folder, model=model, plan=plan)
    print(json.dumps(found.to_json(), indent=2) if options.json else found.explain())
    return 0 if found.is_good else 1


ERROR_STATUS = 2
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: `help` in one line, `add` declares its options, `call` runs it and gives the status.

    `rest` is what stands behind `--` on the command line. `more` returns the end of its --help.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None] | None
    call: Callable[[argparse.Namespace, Sequence[str]], int]
    more: Callable[[], str] = str


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _call_passes(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx passes`: all graph passes in their order, as their docstrings tell them."""
    from hetu_fx.transforms.passes import PASSES

    told = {graph_pass.name: inspect.getdoc(graph_pass) or "" for graph_pass in PASSES}
    if options.json:
        print(json.dumps([{"name": name, "does": does} for name, does in told.items()], indent=2))
        return 0
    for name, does in told.items():
        print(f"{name}\n{textwrap.indent(does, '    ')}\n")
    return 0


def _add_completion(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx completion`."""
    parser.usage = "source <(hetu-fx completion bash)"
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed, for that shell to read")


def _call_completion(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx completion`."""
    try:
        import shtab
    except ImportError as problem:
        message = "completion needs shtab, which is not installed\nhint: pip install 'hetu-fx[completion]'"
        raise EnvironmentProblem(message) from problem
    print(shtab.complete(make_parser(), options.shell))
    return 0


def _add_log(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx log`."""
    parser.add_argument("file", type=Path, help="what model.hetu.log wrote")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _call_log(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx log`."""
    from hetu_fx.report.read import read_log
    from hetu_fx.report.summary import summary_text, to_json

    log = read_log(options.file)
    print(json.dumps(to_json(log), indent=2) if options.json else summary_text(log))
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx report`."""
    parser.add_argument("file", type=Path, help="what model.hetu.log wrote")
    parser.add_argument("--out", type=Path, metavar="HTML", help="the page to write (default: next to the log)")
    parser.add_argument("--json", action="store_true", help="print what the page would say as JSON; write no page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write steps as a Chrome trace too, for Perfetto")


def _call_report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx report`."""
    from hetu_fx.base.documents import write_atomically
    from hetu_fx.report.page import html_page, report_json
    from hetu_fx.report.read import read_log
    from hetu_fx.report.run import read_run, timelines
    from hetu_fx.show.timeline import write_trace

    if options.trace is not None:
        check_folder("--trace", options.trace, EnvironmentProblem)
    log = read_log(options.file)
    if options.trace is not None:
        write_trace(options.trace, timelines(read_run(log)))
    if options.json:
        print(json.dumps(report_json(log), indent=2))
        return 0
    page = options.out or options.file.with_suffix(".html")
    write_atomically(page, html_page(log, f"hetu_fx: {options.file.name}"))
    print(page)
    return 0


def _add_launch(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx launch`."""
    parser.usage = "hetu-fx launch --nproc N [--nnodes 1:3 --rdzv-endpoint HOST:PORT] [options] -- SCRIPT [ARGUMENTS]"
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="processes on this machine")
    parser.add_argument(
        "--min-nproc", type=int, metavar="M", help="continue with as few when some are lost (default: N)"
    )
    parser.add_argument(
        "--max-losses",
        type=int,
        default=100,
        metavar="L",
        help="give up after this number of lost processes (default: %(default)g)",
    )
    rejoin = "replace a lost process after this time; it joins at a step's end (default: only where too few are left)"
    for name, default, what in (
        ("stopped", 10.0, "end a process that sends no heartbeat for so long (default: %(default)g)"),
        ("stuck", 600.0, "end a process that others wait for in a collective for so long (default: %(default)g)"),
        ("grace", 30.0, "time to leave their groups when one fails, or to end after SIGTERM (default: %(default)g)"),
        ("rejoin", None, rejoin),
    ):
        option = "--grace" if name == "grace" else f"--{name}-after"
        parser.add_argument(option, dest=f"{name}_seconds", type=float, default=default, metavar="SECONDS", help=what)
    parser.add_argument(
        "--nnodes", metavar="MIN[:MAX]", help="machines of the job, which may differ (default: this one)"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST[:PORT],...",
        help="where they meet; the machine of the first that lives serves it",
    )
    parser.add_argument("--rdzv-id", default=NO_RUN_ID, metavar="NAME", help="the job's name (default: %(default)s)")
    parser.add_argument("--rdzv-conf", default="", metavar="NAME=SECONDS,...", help="what the rendezvous waits for")
    parser.add_argument("--events", type=Path, metavar="FILE", help="log starts, losses and joins as lines of JSON")


def _call_launch(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx launch`; the status is the script's."""
    from hetu_fx.launch import worker

    rendezvous = options.rdzv_endpoint, options.rdzv_id, options.rdzv_conf
    nodes = None if options.nnodes is None else NodesSpec.of(options.nnodes, *rendezvous)
    names = {field.name for field in fields(LaunchSpec)} - {"command", "nodes"}
    given = {name: getattr(options, name) for name in names}
    least = options.nproc if options.min_nproc is None else options.min_nproc
    return worker.run(LaunchSpec(tuple(rest), **{**given, "min_nproc": least, "nodes": nodes}))


COMMANDS = {
    "emulate": Command("run a command on unequal emulated devices of this machine", add_emulate, call_emulate),
    "measure": Command("measure devices, links and a model's blocks, for plan", add_measure, call_measure),
    "profile": Command("count what a step of a model costs, for plan; runs nothing", add_profile, call_profile),
    "plan": Command("make a plan for devices that need not be there, or show one", add_plan, call_plan, more_of_plan),
    "simulate": Command("run a step of a plan on paper: timeline, memory, links", add_simulate, call_simulate),
    "verify": Command("train a model under plans and on one device, and compare", add_verify, call_verify),
    "doctor": Command("say what is wrong with the installation, the machine or the job", add_doctor, call_doctor),
    "launch": Command("run a script in several processes; lost ones do not end the others", _add_launch, _call_launch),
    "clean": Command("list and remove snapshots in memory of jobs that no longer run", _add_clean, _call_clean),
    "log": Command("say what the log of a run holds: variants, times, changes", _add_log, _call_log),
    "report": Command("write the log of a run as one HTML page", _add_report, _call_report),
    "passes": Command("list all graph passes in their order", _add_json, _call_passes),
    "env": Command("show versions, backends and what this machine can emulate", _add_json, call_env),
    "completion": Command("print a script by which a shell completes commands", _add_completion, _call_completion),
    "exported": Command(
        "what an export holds, whether it is whole, and whether stale", _add_exported_options, run_exported
    ),
}


class _CommandParser(argparse.ArgumentParser):
    """A parser whose --help ends with what is only found out when it is asked for."""

    more: Callable[[], str] = str

    def format_help(self) -> str:
        """Return the help."""
        return super().format_help() + self.more()


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser("hetu-fx", description="Automatic parallelization for PyTorch.")
    parser.add_argument("--version", action="version", version=f"hetu-fx {metadata.version('hetu-fx')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.help)
        own.more = command.more
        if command.add is not None:
            command.add(own)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give its exit status, 2 for an error that is explained."""
    own, rest = _split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    try:
        options = make_parser().parse_args([_with_dashes(word) for word in own])
        status = COMMANDS[options.command].call(options, rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has read enough: the interpreter must not flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except HetuFxError as error:
        print(f"hetu-fx: {error}", file=sys.stderr)
        return ERROR_STATUS


def _split_at_dashes(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the command line at the first `--`: what is behind it is somebody else's."""
    if "--" not in words:
        return words, ()
    at = list(words).index("--")
    return words[:at], words[at + 1 :]


def _with_dashes(word: str) -> str:
    """Spell an option with dashes: --only_rank=0 means --only-rank=0."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
