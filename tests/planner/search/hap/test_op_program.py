import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.op_program import HapProgram, best_ratios
from hetu_fx.planner.search.hap.search import program_bytes
from hetu_fx.planner.search.hap.synthesised_program import synthesise
from hetu_fx.planner.search.hap.tensor_states import Bytes
from tests.planner.search.hap.small import drawn, expansion, feed_forward

SEEDS = st.integers(0, 10_000)


def on_a_grid(program: HapProgram, speeds: tuple[float, ...], steps: int) -> float:
    """Return the least seconds over all ratios that are multiples of 1 / steps, segments apart."""
    counts = itertools.product(range(steps + 1), repeat=len(speeds) - 1)
    shares = [(*row, steps - sum(row)) for row in counts if sum(row) <= steps]
    vectors = [tuple(share / steps for share in row) for row in shares]
    tables = itertools.product(vectors, repeat=program.num_segments)
    return min(program.seconds(speeds, table) for table in tables)


@settings(max_examples=20)
@given(SEEDS, st.integers(1, 5), st.sampled_from([(3e8, 1e8), (2e8, 1e8, 1e8), (4e5, 1e5)]))
def test_no_ratios_on_a_grid_are_faster(seed: int, num_ops: int, speeds: tuple[float, ...]) -> None:
    problem = drawn(seed, num_ops)
    program = synthesise(expansion(problem, speeds)).program
    seconds = program.seconds(speeds, best_ratios(program, speeds))
    steps = {(1, 2): 200, (2, 2): 60, (1, 3): 40, (2, 3): 10}[program.num_segments, len(speeds)]
    assert seconds <= on_a_grid(program, speeds, steps) * (1 + 1e-6)


def test_work_that_all_devices_do_is_made_up_for_by_the_ratios() -> None:
    speeds = (3e5, 1e5)
    problem = feed_forward(rows=16, width=64, inner=512)
    given = expansion(problem, speeds)
    program = synthesise(given).program
    stage = program.stages[0]._replace(cut_flops=(4e5,), whole_flops=1e5)
    program.__dict__["stages"] = (stage,)
    kept, dropped = (best_ratios(program, speeds, drops_constants=drops)[0] for drops in (False, True))
    assert dropped == pytest.approx((0.75, 0.25))
    assert kept == pytest.approx((0.875, 0.125))  # 4.5e5 / 3e5 = 1.5e5 / 1e5


def test_ratios_leave_room_for_what_a_device_holds() -> None:
    speeds = (3e5, 1e5)
    program = synthesise(expansion(feed_forward(), speeds)).program
    held = Bytes(copied=10.0, spread=(100.0,))
    shares = best_ratios(program, speeds, held=held, memory_bytes=(50.0, 100.0))[0]
    assert shares == pytest.approx((0.4, 0.6))
    with pytest.raises(PlanError, match="no ratios of 2 devices fit"):
        best_ratios(program, speeds, held=held, memory_bytes=(50.0, 60.0))


def test_bytes_of_a_program_are_those_of_its_layouts() -> None:
    problem = feed_forward(rows=16, width=64, inner=512)
    program = synthesise(expansion(problem, (3e5, 1e5))).program
    weights, rows = 4.0 * 64 * 512, 4.0 * 16
    held = program_bytes(program, problem)
    assert held.spread == (4 * 2 * weights + 2 * rows * 512,)  # parameters with their states; hidden and active
    assert held.copied == rows * 64 + 4  # summands of the last value and of the loss
    assert held.on_device(1, ((0.75, 0.25),)) == held.copied + held.spread[0] / 4


def test_segments_keep_the_same_ratios_where_a_shift_between_them_costs_more_than_it_gains() -> None:
    speeds = (2e8, 1e8, 1e8)
    program = synthesise(expansion(drawn(267, 4), speeds)).program
    assert {transfer.follows for transfer in program.transfers} == {(0,), (0, 1)}
    one, other = best_ratios(program, speeds)
    assert one == other
