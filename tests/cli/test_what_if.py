"""What changes between two plans is told line by line."""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.cli.what_if import changes, diff
from hetu_fx.plans.plan import Pipeline, Plan, Stage


def grid(pipelines: int, stages: int) -> Plan:
    """Return equal pipelines of stages of a device and a block."""
    made = (tuple(Stage((i * stages + j,), blocks=1) for j in range(stages)) for i in range(pipelines))
    return Plan(tuple(Pipeline(own, micro_batches=8) for own in made))


def test_diff_names_what_changes() -> None:
    front = Pipeline((Stage((0, 1), (2, 1), 3), Stage((2,), blocks=1)), share=3, micro_batches=2)
    before = Plan((front, Pipeline((Stage((3,), blocks=4),))))
    after = replace(before, zero=0, pipelines=before.pipelines[:1])
    assert diff(before, after) == (
        "- pipelines[1]: 1 row: [3]x4\n"
        "  zero: 1 -> 0\n"
        "  pipelines[0]: 3 rows in 2: [0,1 2:1]x3 > [2]x1 -> 1 row in 2: [0,1 2:1]x3 > [2]x1"
    )
    assert diff(before, before) == "no difference"


def test_changes_of_many_devices_are_few_lines() -> None:
    assert changes(grid(32, 32), grid(16, 32)) == [
        ("pipelines", "32 x 1 row in 8: 32 x [1 device]x1", "16 x 1 row in 8: 32 x [1 device]x1"),
        ("devices", "0-1023", "0-511"),
    ]
    assert diff(grid(2, 8), grid(2, 8)) == "no difference"
