"""The numbers that HAP's published rules and measured bandwidths lead to, in the units of its released code."""

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.op_forms import RELEASED
from hetu_fx.planner.search.hap.prices import Collectives, RatioPrices
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.synthesised_program import HapResult, synthesise
from hetu_fx.planner.search.hap.tensor_states import Limits
from hetu_fx.planner.values.tensor_program import TensorProgram
from tests.planner.search.hap.released import FOUR_EQUAL, P100, SET_H, SET_L, TWO_AND_TWO, V100, encoder, mlp

PROPORTIONAL = (0.321134, 0.321134, 0.178866, 0.178866)


def found(problem: TensorProgram, cluster: Cluster = TWO_AND_TWO, collectives: Collectives = SET_H) -> HapResult:
    return search(problem, cluster, collectives=collectives, rules=RELEASED)


def cuts(result: HapResult) -> set[str | None]:
    return {step.form.cut for step in result.program.steps}


def test_one_layer_is_cut_by_features_without_exchange() -> None:
    result = found(mlp(1))
    flops = 9 * 16384 * 768 * 768 + 12 * 12_582_912
    assert (
        result.seconds == pytest.approx(flops / (2 * V100 + 2 * P100), rel=1e-12) == pytest.approx(0.007251, rel=1e-4)
    )
    assert not result.transfers
    assert cuts(result) == {"f"}


@pytest.mark.parametrize(("layers", "seconds"), [(2, 0.016976), (4, 0.033948)])
def test_more_layers_are_cut_by_rows_and_sum_up_gradients(layers: int, seconds: float) -> None:
    result = found(mlp(layers))
    assert result.seconds == pytest.approx(seconds, abs=5e-7)
    assert cuts(result) == {"b"}
    assert {str(transfer.change) for transfer in result.transfers} == {"all-reduce"}
    assert sum(transfer.bytes for transfer in result.transfers) == layers * (768 * 768 + 768)
    assert result.ratios[0] == pytest.approx(PROPORTIONAL, abs=5e-7)


def test_a_small_batch_gathers_between_feature_cuts_at_even_ratios() -> None:
    result = found(mlp(2, 8, 16))
    assert result.rounds[0] == (pytest.approx(0.000413, abs=5e-7), pytest.approx(0.000391, abs=5e-7))
    assert result.seconds == pytest.approx(0.000391, abs=5e-7)
    assert result.ratios[0] == pytest.approx((0.25,) * 4)
    assert [str(transfer) for transfer in result.transfers] == [
        "all-gather of linear0",
        "reduce-scatter of linear0 (gradient)",
    ]


def test_a_larger_batch_flips_from_gathering_to_an_all_to_all() -> None:
    gathers, exchanges = found(mlp(2, 32, 16)), found(mlp(2, 64, 16))
    assert gathers.rounds[0][0] == pytest.approx(1.650e-3, abs=5e-7)
    assert gathers.ratios[0] == pytest.approx((0.25,) * 4)
    assert {str(t.change) for t in gathers.transfers} == {"all-gather", "reduce-scatter"}
    assert {str(t.change) for t in exchanges.transfers} == {"all-to-all", "all-reduce"}
    assert exchanges.ratios[0] == pytest.approx(PROPORTIONAL, abs=5e-7)


def test_an_encoder_layer_is_cut_by_rows() -> None:
    result = found(encoder())
    assert result.seconds == pytest.approx(0.075353, abs=5e-7)
    assert cuts(result) == {"n"}
    assert result.ratios[0] == pytest.approx(PROPORTIONAL, abs=5e-7)


def test_an_encoder_layer_on_equal_devices_is_cut_evenly() -> None:
    result = found(encoder(), FOUR_EQUAL, SET_L)
    assert result.seconds == pytest.approx(0.031656, abs=5e-7)
    assert result.ratios[0] == pytest.approx((0.25,) * 4)


def test_even_shares_of_unequal_devices_cost_what_was_worked_out() -> None:
    problem = encoder()
    speeds = tuple(device.speed for device in TWO_AND_TWO.devices)
    prices = RatioPrices(speeds, SET_H, ((0.25,) * 4,))
    expansion = Expansion(problem, prices, RELEASED, Limits(num_devices=4))
    program = synthesise(expansion).program
    assert {step.form.cut for step in program.steps} == {"n"}
    assert program.seconds(speeds, prices.ratios) == pytest.approx(0.099411, abs=5e-7)
