import pytest

from hetu_fx.errors import BatchError
from hetu_fx.switching.step.policy import BatchFacts, Health, VariantFacts, choose

SHORT = VariantFacts("short", 512, 1.0, devices=(0, 1))
LONG = VariantFacts("long", None, 2.0, devices=(0, 1))


def test_the_fastest_variant_that_fits_runs() -> None:
    assert choose([LONG, SHORT], BatchFacts(512, 8)) == "short"
    assert choose([LONG, SHORT], BatchFacts(513, 8)) == "long"


def test_no_variant_that_fits_is_an_error_with_the_limits() -> None:
    with pytest.raises(BatchError, match=r"longest sequence is 600 \(max_length by variant: \{'short': 512\}\)"):
        choose([SHORT], BatchFacts(600, 8))


def test_without_predictions_the_tightest_fit_runs() -> None:
    by_hand = [
        VariantFacts("any"),
        VariantFacts("a", 512),
        VariantFacts("b", 512),
        VariantFacts("c", 2048, 0.1),
    ]
    assert choose(by_hand, BatchFacts(100, 8)) == "a"
    assert choose(by_hand, BatchFacts(1000, 8)) == "c"
    assert choose(by_hand, BatchFacts(4000, 8)) == "any"


def test_the_first_of_equals_runs() -> None:
    assert choose([VariantFacts("x", None, 1.0), VariantFacts("y", None, 1.0)], BatchFacts(1, 1)) == "x"


def test_a_slow_device_slows_the_variants_that_use_it() -> None:
    without = VariantFacts("without", None, 1.5, devices=(0,))
    both = VariantFacts("both", None, 1.0, devices=(0, 1))
    assert choose([both, without], BatchFacts(1, 1), Health({1: 1.4})) == "both"
    assert choose([both, without], BatchFacts(1, 1), Health({1: 1.6})) == "without"


def test_a_variant_planned_for_a_straggler_is_left_when_it_recovers() -> None:
    usual = VariantFacts("usual", None, 1.0, devices=(0, 1))
    careful = VariantFacts("careful", None, 1.3, devices=(0, 1), planned_rates={1: 2.0})
    assert choose([usual, careful], BatchFacts(1, 1), Health({1: 2.0})) == "careful"
    assert choose([usual, careful], BatchFacts(1, 1)) == "usual"
