"""Every command that a page shows is held: its words are those that its program takes, and a row says what runs it.

A command that no row covers fails, and so do a row whose command is on no page and one whose test is not there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from hetu_fx.cli import main as cli

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start.md"
PAGES = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECONDS = 120


@dataclass(frozen=True)
class Held:
    """What holds a command beside that its words are read: `run` here, `by` a test (below tests/), or `why` neither."""

    run: bool = False
    by: str = ""
    why: str = ""


DOCTOR = Held(by="cli/test_doctor.py::test_this_machine_is_looked_at_and_told_as_lines_and_as_json")
EMULATED = Held(by="emulate/test_emulate_ranks.py::test_without_quotas_every_rank_is_pinned_and_we_are_not")
INSTALL = Held(why="needs a package index; its extras are looked up")
MEASURE = Held(by="cli/test_measure.py::test_devices_and_blocks_are_measured_and_planned_from_the_files")
PLANNED = Held(by="test_planning_page.py::test_the_page_shows_what_the_commands_print_and_the_tables_that_there_are")
TORCHRUN = Held(by="integrations/test_launchers.py::test_torchrun_trains_like_one_process")
VERIFY = Held(by="cli/test_verify.py::test_plans_train_what_one_device_trains")
SEVERAL = Held(why="needs more processes or GPUs than CI has; its programs are read, each is run on fewer elsewhere")

HELD = {
    "make demo": Held(why="minutes long; its parts are tested in tests/demo, its target is looked up"),
    "pip install -e '.[hf,ui]'": INSTALL,
    'pip install -e ".[hf,lightning]" peft': INSTALL,
    "python train.py": Held(run=True),
    "python examples/text.py": Held(
        by="examples/test_examples.py::test_an_example_trains_in_two_processes_what_it_trains_alone"
    ),
    "torchrun --nproc-per-node 2 examples/text.py": Held(
        by="examples/test_examples.py::test_the_command_of_the_page_starts_an_example"
    ),
    "torchrun --nproc-per-node 2 train.py": TORCHRUN,
    "torchrun --nproc-per-node 4 train.py": TORCHRUN,
    "torchrun --nproc-per-node 4 -m hetu_fx.cli verify my_script:make_model --plan auto": SEVERAL,
    "torchrun --nproc-per-node 8 -m hetu_fx.cli doctor --device cuda": SEVERAL,
    "torchrun --nproc-per-node 8 -m hetu_fx.cli measure my_model:example --device cuda": SEVERAL,
    "hetu-fx doctor": DOCTOR,
    "hetu-fx verify my_script.py:make_model": VERIFY,
    "hetu-fx verify my_script.py:make_model --plan data --plan tensor": VERIFY,
    "hetu-fx verify my_script.py:make_model --plan plan.json": VERIFY,
    "hetu-fx plan --cluster cluster.json --profile profile.json": PLANNED,
    "hetu-fx plan --cluster cluster.json --profile profile.json --search malleus --rate 1=2.5 --without 3": PLANNED,
    "hetu-fx plan --cluster cluster-1.json --profile profile.json": PLANNED,
    "hetu-fx plan --cluster cluster-48.json --profile profile.json --search classes --dtype bf16 --master": PLANNED,
    "hetu-fx plan --cluster cluster-1024.json --profile profile.json --search homogeneous --rows 2048": PLANNED,
    "hetu-fx plan --cluster cluster.json --profile profile.json --forbid uneven recompute --zero 1": PLANNED,
    "hetu-fx simulate --plan plan.json --cluster cluster.json --profile profile.json": PLANNED,
    "hetu-fx measure my_model:example": MEASURE,
    "hetu-fx emulate --speeds 0.8,0.4,0.2,0.2 -- hetu-fx measure my_model:example": SEVERAL,
    "hetu-fx emulate --speeds 0.8,0.4,0.2,0.2 -- python train.py": EMULATED,
    "hetu-fx emulate --speeds 1.2,0.4 -- python train.py": EMULATED,
    "hetu-fx emulate --speeds 0.8,0.4,0.2,0.2 --memory 2G,1G,-,- --nodes 2 --link 200mbit -- COMMAND": EMULATED,
    "hetu-fx exported exported --plan plan.json --model my_module:make_model --json": Held(
        by="export/test_check.py::test_the_command_lists_checks_and_says_it_in_json"
    ),
    "hetu-fx completion bash": Held(run=True),
    "hetu-fx completion fish": Held(run=True),
}


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page: of `sh` blocks all lines, of `console` blocks those behind a $, without comments.

    What stands in brackets may be left out, and is there; `source <(X)` and `X | source` run X.
    """
    for kind, text in BLOCK.findall(page.read_text()):
        marked = kind == "console" and "$ " in text
        for line in text.splitlines():
            if not marked or line.startswith("$ "):
                yield from _parts(line.removeprefix("$ "))


def _parts(line: str) -> Iterator[str]:
    bare, _, comment = line.partition("# ")
    if also := re.search(r"or \w+; fish: (.*)", comment):
        yield from _parts(also[1])
    for part in bare.split("&&"):
        if command := part.split("|")[0].strip().removeprefix("source <(").removesuffix(")"):
            yield re.sub(r" \[(-.*?)\]", r" \1", command)


ALL = {command: page for page in PAGES for command in commands(page)}


@pytest.mark.parametrize("command", ALL, ids=str)
def test_the_words_of_a_command_are_those_that_its_program_takes(command: str) -> None:
    assert command in HELD, f"{ALL[command].name} shows {command!r}: say in HELD what holds it"
    check_words(shlex.split(command))


def test_every_row_is_of_a_command_and_names_a_test_that_is_there() -> None:
    assert HELD.keys() <= ALL.keys()
    for held in HELD.values():
        assert held.run + bool(held.by) + bool(held.why) == 1
        file, _, test = held.by.partition("::")
        assert not held.by or f"def {test}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("command", [command for command, held in HELD.items() if held.run], ids=str)
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    code = re.search(r"^`train.py`:\n\n```python\n(.*?)^```", START.read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    (tmp_path / "train.py").write_text(code[1])
    program, *words = shlex.split(command)
    started = {"python": [], "hetu-fx": ["-m", "hetu_fx.cli"]}[program]
    ended = subprocess.run(
        [sys.executable, *started, *words], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_command_that_its_program_does_not_take_is_noticed() -> None:
    for command in ("hetu-fx doctor --fast", "torchrun --procs 2 a.py", "make dmo", "pip install -e '.[uy]'", "ls"):
        with pytest.raises((SystemExit, AssertionError)):
            check_words(shlex.split(command))


def check_words(words: Sequence[str]) -> None:
    """Fail unless the program takes these words; what is behind `--` is a command of its own."""
    match words:
        case ["hetu-fx", *own]:
            at = own.index("--") if "--" in own else len(own)
            cli.make_parser().parse_args(own[:at])
            if own[at + 1 :] not in ([], ["COMMAND"]):
                check_words(own[at + 1 :])
        case ["torchrun", *own]:
            options = get_args_parser().parse_args(own)
            if options.module:
                assert options.training_script == "hetu_fx.cli"
                check_words(["hetu-fx", *options.training_script_args])
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", "-e", place, *_]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(place.removeprefix(".[").removesuffix("]").split(",")) <= {*project["optional-dependencies"]}
        case ["python", script]:
            assert script == "train.py" or (ROOT / script).is_file()
        case other:
            raise AssertionError(f"no program is known for {other}")
