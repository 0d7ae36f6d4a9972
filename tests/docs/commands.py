"""The commands that pages show, and whether their programs take their words."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from hetu_fx.cli import main as cli
from hetu_fx_align.command import make_parser as make_align_parser

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES = sorted([*map(ROOT.joinpath, NAMED), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = ("hetu-fx", "hetu-fx-align", "torchrun", "accelerate", "python", "pip", "make")
SETS = re.compile(r"[A-Z_]+=\S+")
"""What stands before a command, and sets a variable of its environment."""


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page: of `sh` blocks all lines, of `console` blocks those behind a $, and those in text.

    Without comments. What stands in brackets may be left out, and is there; `source <(X)` and `X | source` run X. In
    text a command has words besides its name: `hetu-fx plan` is a name, `torchrun` too.
    """
    text = page.read_text()
    for kind, block in BLOCK.findall(text):
        marked = kind == "console" and "$ " in block
        for line in block.splitlines():
            if not marked or line.startswith("$ "):
                yield from _parts(line.removeprefix("$ "))
    for span in INLINE.findall(FENCED.sub("", text)):
        yield from (part for part in _parts(" ".join(span.split())) if _is_command(part.split()))


def names(page: Path) -> Iterator[str]:
    """Yield the commands of hetu-fx that a page names."""
    yield from re.findall(r"`hetu-fx ([\w-]+)[^`]*`", FENCED.sub("", page.read_text()))


def _is_command(words: Sequence[str]) -> bool:
    own = without_settings(words)
    least = 3 if own[:1] in (["hetu-fx"], ["accelerate"]) else 2
    return bool(own) and own[0] in PROGRAMS and len(own) >= least


def without_settings(words: Sequence[str]) -> list[str]:
    """Return a command without variables that are set before it."""
    return list(words[next((at for at, word in enumerate(words) if not SETS.fullmatch(word)), len(words)) :])


def _parts(line: str) -> Iterator[str]:
    bare, _, comment = line.partition("# ")
    if also := re.search(r"or \w+; fish: (.*)", comment):
        yield from _parts(also[1])
    for part in bare.split("&&"):
        if command := part.split("|")[0].strip().removeprefix("source <(").removesuffix(")"):
            yield re.sub(r" \[(.*?)\]", r" \1", command.removeprefix(".venv/bin/"))


def check_words(words: Sequence[str]) -> None:
    """Fail unless the program takes these words; what is behind `--` is a command of its own.

    A capital letter stands for a number.
    """
    match [re.sub(r"^[A-Z]$", "1", word) for word in without_settings(words)]:
        case ["hetu-fx", name, "--help"]:
            assert name in cli.COMMANDS
        case ["hetu-fx", *own]:
            at = own.index("--") if "--" in own else len(own)
            cli.make_parser().parse_args(own[:at])
            behind = own[at + 1 :]
            if behind not in ([], ["COMMAND"]) and own[0] != "launch":
                check_words(behind)
        case ["hetu-fx-align", *own]:
            make_align_parser().parse_args(own)
        case ["torchrun", *own]:
            options = get_args_parser().parse_args(own)
            if options.module:
                assert options.training_script == "hetu_fx.cli"
                check_words(["hetu-fx", *options.training_script_args])
        case ["accelerate", "launch", *own]:
            launch_command_parser().parse_args(own)
        case ["make", target, *given]:
            assert all(map(SETS.fullmatch, given))
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", "-e", place, *_]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extras_of(place) <= {*project["optional-dependencies"]}
        case ["pip", "install", place]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert place.startswith(project["name"])
            assert extras_of(place) <= {*project["optional-dependencies"]}
        case ["python", "-m", "pytest", *_] | ["python", "-m", "benchmarks.NAME", "--quick"]:
            pass  # this very program, and any of many
        case ["python", "-m", module, *own]:
            assert {word for word in own if word.startswith("--")} <= options_of(module), f"{module} has no such option"
        case ["python", script]:
            assert script == "train.py" or (ROOT / script).is_file()
        case other:
            raise AssertionError(f"no program is known for {other}")


def extras_of(place: str) -> set[str]:
    """Return the extras of what pip installs: `.[hf,ui]`."""
    return set(place.partition("[")[2].removesuffix("]").split(","))


@cache
def options_of(module: str) -> set[str]:
    """Return the options that the sources of a module of this repository name."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    shared = ["--quick"] if module.startswith("benchmarks.") else []
    return {*re.findall(r'"(--[a-z-]+)"', file.read_text()), *shared}
