from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.hap.prices import round_shares
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.to_plan import translations
from hetu_fx.planner.values.tensor_program import TensorProgram
from hetu_fx.plans.plan import Pipeline, Stage
from tests.planner.search.hap.released import P100, V100
from tests.planner.search.hap.small import LINES, feed_forward


def named(rows: int, width: int, inner: int, layers: int) -> TensorProgram:
    """Return feed-forward layers whose factors have one name throughout, and whose rows are known as such."""
    problem = feed_forward(rows, width, inner, layers)
    ops = []
    for op in problem.ops:
        layer = op.name.partition(".")[0]
        names = {"b": "rows", "k": "width", "o": f"inner{layer}"}
        if op.name.endswith("second"):
            names = {"b": "rows", "k": f"inner{layer}", "o": "width"}
        if op.name == "sum":
            names["o"] = "width"
        operands, results = (tuple(tuple(names[f] for f in dims) for dims in of) for of in (op.operands, op.results))
        ops.append(replace(op, operands=operands, results=results))
    tensors = (replace(t, row_dim=0 if t.kind != "parameter" and t.shape else None) for t in problem.tensors)
    return TensorProgram(tuple(tensors), tuple(ops), problem.outputs, problem.blocks)


@pytest.mark.parametrize(
    ("flops", "total", "shares"),
    [
        ((V100, V100, P100, P100), 128, (41, 41, 23, 23)),
        ((1, 1, 1), 4, (1, 1, 2)),
        ((1, 99), 1, (0, 1)),
    ],
)
def test_shares_are_rounded_as_in_the_released_code(
    flops: tuple[int, ...], total: int, shares: tuple[int, ...]
) -> None:
    assert round_shares([each / sum(flops) for each in flops], total) == shares


def test_a_program_that_cuts_rows_becomes_a_data_parallel_plan() -> None:
    problem, cluster = named(4096, 16, 32, 2), Cluster.on_paper([3e6, 1e6])
    result = search(problem, cluster, collectives=LINES)
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.plan.pipelines == (
        Pipeline((Stage((0,)),), share=3),
        Pipeline((Stage((1,)),), share=1),
    )
    assert translation.loss_seconds == pytest.approx(0, abs=1e-9)


def test_a_program_that_cuts_parameters_becomes_a_tensor_parallel_plan() -> None:
    problem, cluster = named(16, 64, 512, 2), Cluster.on_paper([3e5, 1e5])
    result = search(problem, cluster, collectives=LINES)
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.plan.pipelines == (Pipeline((Stage((0, 1), (3, 1)),)),)
    assert translation.plan.split == (("0.up", 0), ("1.up", 0))
    assert translation.seconds == pytest.approx(translation.result.seconds, rel=1e-3)  # of ratios near 3 : 1
    assert translation.loss_seconds >= 0


def test_what_no_plan_can_say_is_named_with_its_seconds() -> None:
    problem, cluster = named(512, 16, 512, 2), Cluster.on_paper([3e7, 1e7])
    large = {"0.up": 400.0, "0.down": 400.0, "1.up": 0.1, "1.down": 0.1}
    tensors = tuple(replace(t, element_bytes=large.get(t.name, 4.0)) for t in problem.tensors)
    problem = replace(problem, tensors=tensors)
    result = search(problem, cluster, collectives=LINES)
    rows = {step.form.cut == "rows" for step in result.program.steps if step.form.cut}
    assert rows == {True, False}
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.loss_seconds == pytest.approx(translation.seconds - result.seconds)
    assert translation.loss_seconds > 1e-3 * result.seconds
    assert f"loses {translation.loss_seconds:.4g} s" in translation.why
