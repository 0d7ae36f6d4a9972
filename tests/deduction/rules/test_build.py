"""The rule language: what a line says about a call, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.deduction.rules.build import parse_line
from hetu_fx.deduction.rules.call import Call, make_call
from hetu_fx.errors import RuleError
from tests.deduction.shards import as_tensor

aten = torch.ops.aten


def call(target: object, *args: object) -> Call:
    return make_call(target, args, {}, target(*args), as_tensor)  # type: ignore[operator]


def test_factors_that_no_result_has_are_reduced() -> None:
    factoring = parse_line("m k, k n -> m n").factor(call(aten.mm.default, torch.ones(3, 4), torch.ones(4, 5)), "each")
    assert factoring.reduced == {"k"}
    assert factoring.linear == (frozenset({0}), frozenset({1}))
    assert factoring.results == ((("m",), ("n",)),)


def test_an_optional_operand_may_be_absent_and_an_additive_one_joins_each_linear_set() -> None:
    line = parse_line("... k, o k, +o? -> ... o")
    x, w, b = torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(5)
    with_bias = line.factor(call(aten.linear.default, x, w, b), "each")
    without = line.factor(call(aten.linear.default, x, w), "each")
    assert (with_bias.additive, with_bias.linear) == ({2}, (frozenset({0, 2}), frozenset({1, 2})))
    assert (without.additive, without.linear) == (frozenset(), (frozenset({0}), frozenset({1})))


def test_leading_dims_are_broadcast_from_the_right() -> None:
    line = parse_line("..., ... -> ...")
    factoring = line.factor(call(aten.add.Tensor, torch.ones(2, 3, 4), torch.ones(3, 1)), "all")
    first, second = factoring.operands
    assert second == (first[1], ())


def test_brackets_keep_factors_whole() -> None:
    line = parse_line("b [k] -> b [k]")
    factoring = line.factor(call(aten.softmax.int, torch.ones(3, 4), -1), "none")
    assert (factoring.whole, factoring.reduced) == ({"k"}, frozenset())


def test_a_whole_factor_of_a_dim_of_size_1_is_left_out() -> None:
    line = parse_line("b [k] -> b [k]")
    factoring = line.factor(call(aten.softmax.int, torch.ones(3, 1), -1), "none")
    assert (factoring.whole, factoring.operands) == (frozenset(), ((("b",), ()),))


def test_sizes_inside_a_product_follow_from_where_they_stand_alone() -> None:
    line = parse_line("b (g a) -> b g a")
    factoring = line.factor(call(aten.reshape.default, torch.ones(3, 8), [3, 2, 4]), "none")
    assert {name: size.number for name, size in factoring.sizes.items()} == {"b": 3, "g": 2, "a": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "one '->'"),
        ("m k -> m -> k", "one '->'"),
        ("m k! -> m", "cannot read '!'"),
        ("m [k -> m", r"'\[' is not closed"),
        ("m ] k -> m", "do not alternate"),
        ("m ... -> m", "'...' stands once, before"),
        ("m -> m?", "belong to operands"),
        ("m (k -> m", r"cannot read '\('"),
    ],
)
def test_malformed_lines_are_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_line(text)


def test_an_operand_of_another_rank_does_not_fit() -> None:
    with pytest.raises(RuleError, match=r"shape \(3\) does not fit rule 'm k -> m'"):
        parse_line("m k -> m").factor(call(aten.neg.default, torch.ones(3)), "none")


def test_a_missing_operand_that_is_not_optional_does_not_fit() -> None:
    with pytest.raises(RuleError, match="does not fit its rule"):
        parse_line("... k, o k, o -> ... o").factor(
            call(aten.linear.default, torch.ones(3, 4), torch.ones(5, 4)), "none"
        )


def test_a_product_of_unknown_sizes_does_not_fit() -> None:
    with pytest.raises(RuleError, match="do not follow from rule"):
        parse_line("(a b) -> (a b)").factor(call(aten.neg.default, torch.ones(6)), "none")


def test_an_unknown_word_for_linear_is_refused() -> None:
    with pytest.raises(RuleError, match="'none', 'all', 'each'"):
        parse_line("... -> ...").factor(call(aten.neg.default, torch.ones(6)), "both")
