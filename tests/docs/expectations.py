"""What users of the ecosystem expect, and which tests show that it holds; docs/expectations.md is made from this.

`shown` names tests as FILE::FUNCTION below tests/, entries of `python -m tests.scripts` as "script: NAME", and
benchmarks as "benchmark: NAME". Where it is empty the page says "not yet".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """One expectation, and what shows it."""

    says: str
    shown: tuple[str, ...] = ()


def _of(says: str, *shown: str) -> Expectation:
    return Expectation(says, shown)


EXAMPLES = "examples/test_examples.py::"
HOME = "switching/home/test_ops_ranks.py::"
LAUNCH = "launch/test_launcher.py::"
SAVED = "checkpoint/test_checkpoint.py::"

EXPECTATIONS = (
    _of(
        "one line is added, the script stays otherwise",
        EXAMPLES + "test_an_example_is_short_and_has_one_line_of_hetu_fx",
    ),
    _of("the same script runs on one process without a launcher",
        EXAMPLES + "test_an_example_trains_in_two_processes_what_it_trains_alone"),
    _of("it works under `torchrun` and `accelerate launch`",
        "integrations/test_launchers.py::test_torchrun_trains_like_one_process",
        "integrations/test_launchers.py::test_accelerate_launch_trains_like_one_process"),
    _of("a run on CPUs is a faithful rehearsal, and one process by mistake is told",
        "kinds/test_parity_cuda.py::test_training_on_gpu_and_cpu_together_equals_one_device",
        "cli/test_doctor.py::test_a_launch_that_lacks_something_or_started_one_process_is_told"),
    _of("the loss is that of a single process",
        "end_to_end/test_parity.py::test_training_under_a_plan_equals_one_device"),
    _of("the model keeps its class, `isinstance`, signature and names",
        "end_to_end/checks_errors.py::check_the_model_stays_what_it_is"),
    _of("the optimizer is made before or after",
        "script: makes the model parallel before the optimizer",
        "script: makes the model parallel after the optimizer"),
    _of("any torch optimizer and schedule",
        HOME + "check_optimizers_step_as_on_one_device", HOME + "check_adafactor_runs_whole",
        "script: schedules the rate by the loss of an evaluation (ReduceLROnPlateau)"),
    _of("gradients accumulate without traffic",
        "switching/step/test_variant.py::test_kept_gradients_are_shown_and_come_home_when_they_are_read",
        "script: accumulates within no_sync, as scripts of DistributedDataParallel do"),
    _of("`clip_grad_norm_` gives the norm of the whole model, the same on all ranks",
        HOME + "check_clipping_takes_the_norm_of_the_whole_model"),
    _of("bf16 autocast as configured",
        "script: has an Accelerator of bf16, made first", "script: trains by Trainer in bf16"),
    _of("a scaler of fp16 skips on all ranks or on none",
        HOME + "check_grad_scaler_skips_everywhere", "script: skips the step in which one rank's rows overflow"),
    _of("gathering for metrics gives each sample once",
        "script: gathers predictions for metrics, the last batch cut off where ranks were filled up"),
    _of("an uneven last batch neither hangs nor counts twice",
        "script: has a last batch of fewer rows", "script: has a rank without rows"),
    _of("the learning rate schedule is that of DDP",
        "script: prepares model, optimizer, loader and schedule by accelerate",
        "script: gives Trainer an optimizer and a schedule"),
    _of("a loss weighted by tokens under accumulation",
        "end_to_end/checks_batches.py::check_a_given_count_follows_trainers_arithmetic"),
    _of("Trainer works unmodified: train, evaluate, save, resume, best model",
        "script: evaluates by Trainer after each epoch", "script: saves checkpoints by Trainer and resumes from one",
        "script: keeps few checkpoints by Trainer and loads the best at the end"),
    _of("what `save_pretrained` writes loads on a laptop",
        "script: saves by save_pretrained on the first rank", SAVED + "test_one_file_is_what_hugging_face_reads"),
    _of("tied weights stay tied and are saved once",
        "script: saves and loads a model with tied weights by safetensors",
        "graph/test_capture.py::test_tied_weights_are_one_leaf_with_an_alias"),
    _of("sharded files are named and indexed as the hub does",
        SAVED + "test_shards_and_index_are_those_of_the_hub_library"),
    _of("it loads under another topology",
        "checkpoint/test_checkpoint_ranks.py::check_any_number_of_ranks_goes_on_exactly",
        "end_to_end/checks_state.py::check_a_checkpoint_continues_on_fewer_ranks"),
    _of("full state is resumed: optimizer, random numbers, schedule",
        SAVED + "test_training_goes_on_as_if_never_stopped",
        "script: saves all that a run has on the first rank: model, optimizer, schedule, random state"),
    _of("a crash while saving never loses the previous checkpoint",
        SAVED + "test_a_crash_while_replacing_loses_nothing"),
    _of("a torn checkpoint is skipped, and that is said",
        SAVED + "test_torn_and_damaged_folders_are_refused_and_skipped"),
    _of("saving to disk beside training, with a small stall",
        "script: copies each rank's parts, and has threads write them while it trains on",
        "checkpoint/test_staging.py::test_a_rank_copies_its_part_and_asks_no_other"),
    _of("the latest few are kept, a full disk is handled",
        "script: names checkpoints by accelerate, keeps two, and loads the last",
        SAVED + "test_a_failed_save_leaves_the_old_one"),
    _of("SIGTERM makes a checkpoint and a clean exit of the job",
        "checkpoint/test_job_ends.py::test_a_signal_to_one_rank_saves_on_all_and_the_job_goes_on_as_if_never_ended",
        "checkpoint/test_job_ends.py::test_a_signal_to_the_launcher_reaches_the_processes_which_save"),
    _of("one rank dies: no hang of thirty minutes",
        "comm_ops/test_distributed.py::test_a_dead_or_silent_peer_is_a_comm_error_and_no_hang"),
    _of("survivors go on in their processes",
        LAUNCH + "test_the_others_go_on_in_their_processes_when_one_is_killed"),
    _of("a dead rank can come back", LAUNCH + "test_a_lost_one_comes_back_at_a_steps_end_of_the_others"),
    _of("a step is applied everywhere or nowhere",
        "test_chaos.py::test_a_run_with_faults_at_random_moments_is_that_without"),
    _of("a stopped process is ended, a slow device is avoided",
        LAUNCH + "test_one_that_is_stopped_is_noticed_and_ended",
        "end_to_end/checks_variants.py::check_training_goes_on_until_the_plan_for_a_slow_device_is_made"),
    _of("plans change by sequence length, at little cost and with the same result",
        "end_to_end/checks_variants.py::check_variants_alternate_by_length", "benchmark: switch"),
    _of("planning is cached and reproducible",
        "planner/test_make_plan.py::test_the_same_question_has_the_same_answer",
        "planner/test_make_plan.py::test_the_same_question_is_searched_once"),
    _of("memory and time are estimated before running",
        "plans/test_tables.py::test_every_device_has_its_share_its_memory_of_the_limit_and_how_busy_it_is",
        "benchmark: memory_model"),
    _of("it explains why this plan, and what each rank holds",
        "plans/test_plan.py::test_explain_says_why_or_that_nobody_predicted"),
    _of("what is not supported is named with its line, and there is a way that works",
        "deduction/rules/test_registry.py::test_an_op_without_a_rule_is_whole_and_told_once_with_its_line",
        "graph/test_capture.py::test_error_names_line_reason_and_way_out"),
    _of("an export loads in a process without plans",
        "end_to_end/checks_state.py::check_an_export_runs_in_new_processes"),
    _of("exported files carry no paths of their author",
        "export/test_load.py::test_no_file_names_paths_of_the_machine_that_wrote_it"),
    _of("a timeline opens in Perfetto",
        "show/test_timeline.py::test_the_chrome_trace_starts_at_zero_in_microseconds"),
    _of("waits and settings are configured by the environment, misspelt ones are told",
        "comm_ops/wire/test_common_path.py::test_what_is_asked_counts_more_than_the_environment",
        "cli/test_doctor.py::test_a_misspelt_setting_is_told_with_the_known_one"),
    _of("random numbers follow from a seed, whatever the plan",
        "end_to_end/checks_variants.py::check_dropout_does_not_depend_on_the_plan"),
    _of("an error instead of a hang where ranks take different paths",
        "script: calls backward on rank 0 alone", "script: makes one step more on rank 0 than on the others"),
    _of("a clean exit: no processes, groups or files are left",
        "hetu_fx_emulate/test_emulate_ranks.py::test_a_killed_emulator_leaves_nothing_either",
        "checkpoint/test_snapshots.py::test_a_finished_run_frees_the_memory_and_a_failed_one_does_not"),
    _of("importing it has no effect on others",
        "base/test_frameworks.py::test_importing_the_package_loads_no_integration"),
    _of("a light install that needs no compiler", "test_packaging.py::test_only_our_packages_are_installed"),
    _of("next to no overhead on one device", "benchmark: overhead"),
    _of("numbers of reliability, with the method",
        "test_chaos.py::test_a_report_tells_times_steps_lost_and_what_a_bad_network_costs"),
)  # fmt: skip
