"""Every command that a page shows is held: its words are those that its program takes, and a row says what runs it.

A command that no row covers fails, and so do a row whose command is on no page and one whose test is not there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetu_fx.cli.main import COMMANDS
from tests.docs.commands import PAGES, ROOT, check_words, commands, names, without_settings

START = ROOT / "docs" / "start.md"
SECONDS = 120


@dataclass(frozen=True)
class Held:
    """What holds a command beside that its words are read: `run` here, `by` a test (below tests/), or `why` neither."""

    run: bool = False
    by: str = ""
    why: str = ""


DOCTOR = Held(by="cli/test_doctor.py::test_this_machine_is_looked_at_and_told_as_lines_and_as_json")
EMULATED = Held(by="hetu_fx_emulate/test_emulate_ranks.py::test_without_quotas_every_rank_is_pinned_and_we_are_not")
INSTALL = Held(why="needs a package index; its extras are looked up")
MEASURE = Held(by="cli/test_measure.py::test_devices_and_blocks_are_measured_and_planned_from_the_files")
PLANNED = Held(by="test_planning_page.py::test_the_page_shows_what_the_commands_print_and_the_tables_that_there_are")
LAUNCHED = Held(
    by="launch/test_elastic_launcher.py::"
    "test_under_the_launcher_unequal_machines_join_and_come_back_and_the_others_stay_in_their_processes"
)
ELASTIC = Held(
    by="launch/test_elastic_machines.py::test_a_machine_joins_another_dies_and_comes_back_and_no_step_is_lost"
)
TORCHRUN = Held(by="integrations/test_launchers.py::test_torchrun_trains_like_one_process")
ALIGN = Held(by="hetu_fx_align/test_command.py::test_honest_dtypes_are_within_and_the_table_has_a_row_per_op_and_way")
ALIGN_FILES = Held(by="hetu_fx_align/test_command.py::test_a_wrong_op_is_named_saved_replayed_and_overridden")
VERIFY = Held(by="cli/test_verify.py::test_plans_train_what_one_device_trains")
VERIFY_ALL = Held(by="cli/test_verify.py::test_all_ranks_of_plans_train_in_this_process_what_one_device_trains")
SEVERAL = Held(why="needs more processes or GPUs than CI has; its programs are read, each is run on fewer elsewhere")

EXAMPLE = Held(by="examples/test_examples.py::test_an_example_trains_in_two_processes_what_it_trains_alone")
LAUNCHED = Held(by="integrations/test_launchers.py::test_accelerate_launch_trains_like_one_process")
ONE_OF_TWO = Held(by="integrations/test_launchers.py::test_a_launch_of_one_process_where_two_were_asked_for_is_told")
SCRIPTS = Held(
    by="scripts/test_data_parallel_scripts.py::test_a_script_comes_out_as_on_one_device_or_is_refused_by_name"
)
BENCHMARK = Held(why="minutes long, of this machine; its module and its options are looked up")
CI = Held(why="CI is this (.ci/run); its target is looked up")

HELD = {
    "python -m benchmarks.scale --part tree": BENCHMARK,
    "python -m benchmarks.scale --part processes": BENCHMARK,
    "python -m benchmarks.large --part unequal": BENCHMARK,
    "python -m benchmarks.large --part even": BENCHMARK,
    "python -m benchmarks.memory_model": BENCHMARK,
    'python -m benchmarks.memory_model --models "llama, several buckets"': BENCHMARK,
    "make package": CI,
    "make smoke TORCH='torch==2.11.*'": CI,
    "make test-all TORCH=torch==2.14.1 VENV=build/venv-2.14.1": Held(
        why="gigabytes, and what CI runs under another torch"
    ),
    "make demo": Held(why="minutes long; its parts are tested in tests/examples/demo, its target is looked up"),
    "python -m examples.demo --quick": Held(why="starts four processes; its parts are tested in tests/examples/demo"),
    "pip install -e '.[hf,ui]'": INSTALL,
    'pip install -e ".[hf,lightning]" peft': INSTALL,
    "pip install 'hetu-fx[completion]'": INSTALL,
    "python train.py": Held(run=True),
    "python examples/text.py": Held(
        by="examples/test_examples.py::test_an_example_trains_in_two_processes_what_it_trains_alone"
    ),
    "torchrun --nproc-per-node 2 examples/text.py": Held(
        by="examples/test_examples.py::test_the_command_of_the_page_starts_an_example"
    ),
    "torchrun --nproc-per-node 2 train.py": TORCHRUN,
    "torchrun --rdzv-backend hetu_fx --rdzv-endpoint 10.0.0.1,10.0.0.2,10.0.0.3 --nnodes 1:8 --nproc-per-node 4 "
    "train.py": ELASTIC,
    "hetu-fx launch --nnodes 1:8 --rdzv-endpoint 10.0.0.1,10.0.0.2,10.0.0.3 --nproc 4 -- train.py": LAUNCHED,
    "hetu-fx launch --nnodes 1:8 --rdzv-endpoint HOST --nproc 4 -- train.py": LAUNCHED,
    "torchrun --rdzv-backend hetu_fx --rdzv-endpoint HOST --nnodes 1:8 --nproc-per-node 4 train.py": ELASTIC,
    "torchrun --nproc-per-node 4 train.py": TORCHRUN,
    "torchrun --nproc-per-node 4 -m hetu_fx.cli verify my_script:make_model --plan auto": SEVERAL,
    "torchrun --nproc-per-node 8 -m hetu_fx.cli doctor --device cuda": SEVERAL,
    "torchrun --nproc-per-node 8 -m hetu_fx.cli measure my_model:example --device cuda": SEVERAL,
    "hetu-fx-align my_script.py:make_model": ALIGN,
    "hetu-fx-align my_script.py:make_model --ways eager,inductor": Held(
        why="compiles each op, minutes; benchmarks.align does; with aot_eager in hetu_fx_align/test_align.py"
    ),
    "hetu-fx-align my_script.py:make_model --ways cpu,cuda --dtype bf16": SEVERAL,
    "hetu-fx-align my_script.py:make_model --save ops --worst 5": ALIGN_FILES,
    "hetu-fx-align my_script.py:make_model --overrides align.json": ALIGN_FILES,
    "hetu-fx-align --replay ops/01-aten.softmax.int.json --ways cpu,cuda": ALIGN_FILES,
    "hetu-fx-align --losses run.jsonl reference.json": Held(
        by="hetu_fx_align/test_command.py::test_losses_of_two_trainings_are_compared"
    ),
    "hetu-fx clean --yes": Held(by="cli/test_main.py::test_what_is_stale_is_listed_and_removed_on_demand_alone"),
    "hetu-fx doctor": DOCTOR,
    "hetu-fx verify my_script.py:make_model": VERIFY,
    "hetu-fx verify my_script.py:make_model --plan data --plan tensor": VERIFY,
    "hetu-fx verify my_script.py:make_model --plan plan.json": VERIFY,
    "hetu-fx verify my_script.py:make_model --plan plan.json --ranks 64": VERIFY_ALL,
    "hetu-fx verify my_script.py:make_model --row-dim x=1 --row-dim mask=none": Held(
        by="cli/test_verify.py::test_rows_are_the_dims_that_the_command_line_names"
    ),
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
    "hetu-fx emulate --set 2=0.1": Held(
        by="hetu_fx_emulate/test_emulate_ranks.py::test_a_running_rank_changes_its_speed"
    ),
    "hetu-fx emulate --speeds 0.8,0.4 -- python train.py": EMULATED,
    "hetu-fx emulate --speeds 1.2,0.4 -- python examples/laptop_and_server.py": EMULATED,
    "hetu-fx launch --nproc 4 -- train.py": Held(by="launch/test_launcher.py::test_workers_that_are_done_end_the_job"),
    "hetu-fx log run.jsonl": Held(by="report/test_run_log.py::test_the_command_sums_a_log_up"),
    "hetu-fx measure --cluster cluster.json": Held(
        by="cli/test_measure.py::test_without_a_model_only_the_devices_are_measured"
    ),
    "hetu-fx measure MODULE:FUNCTION": MEASURE,
    "hetu-fx profile train.py:example": Held(
        by="cli/test_measure.py::test_a_profile_of_a_model_in_a_script_is_written_or_printed"
    ),
    "hetu-fx plan ... --sweep rows=64,256 link=10gbit,100gbit": Held(
        by="cli/test_plan.py::test_a_sweep_says_from_where_on_devices_pay"
    ),
    "hetu-fx plan --help": Held(by="cli/test_plan.py::test_help_lists_the_searches_and_what_can_be_allowed"),
    "hetu-fx plan ... --before plan.json --steps 500": Held(
        by="cli/test_plan.py::test_a_job_with_few_steps_left_stays_and_one_with_many_moves"
    ),
    "hetu-fx plan plan.json --cluster ... --profile ...": Held(
        by="cli/test_plan.py::test_a_plan_by_hand_is_priced_and_told_when_it_does_not_fit"
    ),
    "hetu-fx report run.jsonl": Held(
        by="report/test_page.py::test_the_command_writes_the_page_beside_the_log_or_prints_json"
    ),
    "hetu-fx verify MODULE:FUNCTION --json": VERIFY,
    "torchrun --nproc-per-node 2 -m hetu_fx.cli doctor": Held(
        by="cli/test_doctor.py::test_two_processes_are_started_and_tell_of_clocks_speeds_and_links"
    ),
    "torchrun --nnodes 2 --node-rank R --master-addr HOST --nproc-per-node 4 train.py": SEVERAL,
    "torchrun --nproc-per-node 4 --max-restarts 3 train.py": Held(
        by="test_chaos.py::test_under_torchrun_a_lost_process_costs_no_finished_step"
    ),
    "ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 train.py": TORCHRUN,
    "accelerate launch --num_processes 4 --max_restarts 3 train.py": Held(
        why="accelerate hands it to torchrun, whose row is above"
    ),
    "accelerate launch --num_processes 4 train.py": LAUNCHED,
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 train.py": SEVERAL,
    "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 train.py": LAUNCHED,
    "HETU_FX_PLAN=plan.json accelerate launch --multi_gpu --num_processes 2 --num_machines 1 -m hetu_fx train.py": Held(
        by="integrations/test_plan_by_environment.py::"
        "test_accelerate_launch_trains_an_untouched_script_by_a_plan_file_as_one_process_does"
    ),
    "hetu-fx report run.jsonl --trace trace.json": Held(
        by="report/test_on.py::test_a_step_of_each_variant_is_traced_once_and_the_command_writes_it_for_perfetto"
    ),
    "accelerate launch --cpu train.py": ONE_OF_TWO,
    "accelerate launch --cpu --num_processes 2 train.py": ONE_OF_TWO,
    "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "examples/accelerate_loop.py": EXAMPLE,
    **{
        f"torchrun --nproc-per-node 2 examples/{name}.py": EXAMPLE
        for name in ("vision", "experts", "lora", "trainer", "lightning_loop", "mixed_precision", "mixed_lengths")
    },
    "python examples/plan_ahead.py": EXAMPLE,
    "pip install 'hetu-fx[onnx]'": INSTALL,
    "pip install 'hetu-fx[lightning]'": INSTALL,
    "pip install 'hetu-fx[zoo]'": INSTALL,
    "make test": CI,
    "make test-all": Held(why="more than an hour long; `make test` runs a share of it, its target is looked up"),
    "make checks": CI,
    "make lint": CI,
    "make docs": Held(by="docs/test_pages.py::test_the_site_is_built_without_a_warning"),
    "make parity": Held(why="an hour long; `make test` runs a selection of the same, its target is looked up"),
    'python -m pytest -q -m "not distributed"': Held(why="this very program"),
    "python -m tests.house": Held(by="house/test_house.py::test_a_measure_can_be_listed"),
    "python -m tests.docs.look --site run.jsonl": Held(why="needs a browser; its options are looked up"),
    "python -m tests.chaos --faults 200 --seed 1": Held(
        by="test_chaos.py::test_a_run_with_faults_at_random_moments_is_that_without"
    ),
    "python -m tests.chaos --nodes 3 --faults 100 --seed 1": Held(why="for root, an hour; its options are looked up"),
    "python -m benchmarks.smoke": BENCHMARK,
    "python -m tests.ops": Held(by="ops/test_ops.py::test_an_op_of_torchs_database_trains_as_on_one_device"),
    "python -m tests.ops --write-docs": Held(by="ops/test_ops.py::test_the_table_has_the_worst_of_each_plan"),
    "python -m tests.random_programs --seconds 600 --seed N": Held(
        by="random_programs/test_random_programs.py::test_random_programs_train_as_on_one_device_or_are_refused"
    ),
    "python -m tests.broken_files --faults 2000 --seed N": Held(
        by="broken_files/test_broken_files.py::test_a_broken_file_is_refused_or_gives_the_true_values"
    ),
    "python -m tests.scripts": SCRIPTS,
    "python -m tests.scripts --page docs/scripts.md": SCRIPTS,
    "python -m tests.scripts --area finetuning": SCRIPTS,
    "python -m tests.scripts --area lightning_settings": SCRIPTS,
    "python -m tests.scripts --area trainer_settings --area adapter_settings --area lightning_settings "
    "--area seq2seq_settings --page docs/trainer.md": SCRIPTS,
    "python -m benchmarks.NAME --quick": BENCHMARK,
    "python -m benchmarks.align --write-docs": BENCHMARK,
    "python -m benchmarks.coverage --write-docs": BENCHMARK,
    "python -m benchmarks.zoo --write-docs": BENCHMARK,
    "python -m benchmarks.zoo --way processes --way inductor --write-docs": BENCHMARK,
    "python -m benchmarks.mutants --scripts": BENCHMARK,
    **{
        f"python -m benchmarks.{name}": BENCHMARK
        for name in (
            "compiling",
            "equal",
            "gradient_sync",
            "homes",
            "kept",
            "mixed_length",
            "mutants",
            "overlap",
            "planning",
            "planted",
            "programs",
            "reshard",
            "ring_attention",
            "traces",
            "transport",
            "zoo",
        )
    },
    "python -m benchmarks.straggler": BENCHMARK,
    "python -m benchmarks.switch": BENCHMARK,
}


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
    program, *words = without_settings(shlex.split(command))
    started = {"python": [], "hetu-fx": ["-m", "hetu_fx.cli"]}[program]
    ended = subprocess.run(
        [sys.executable, *started, *words], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_commands_that_pages_name_are_there() -> None:
    assert {name for page in PAGES for name in names(page)} <= {*COMMANDS}


def test_a_command_that_its_program_does_not_take_is_noticed() -> None:
    for command in ("hetu-fx doctor --fast", "torchrun --procs 2 a.py", "make dmo", "pip install -e '.[uy]'", "ls",
                    "python -m tests.scripts --aera a", "A_B=1 accelerate launch --processes 2 a.py"):  # fmt: skip
        with pytest.raises((SystemExit, AssertionError)):
            check_words(shlex.split(command))
