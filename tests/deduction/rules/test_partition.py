"""Unifying factors: equal sizes merge, multiples are refined, contradictions are told and change nothing."""

from __future__ import annotations

from hetu_fx.deduction.rules.partition import Partition
from hetu_fx.deduction.rules.size import Size, integer

ROWS, LENGTH = Size(1, (("s1", 1),), 5), Size(1, (("s2", 1),), 11)


def factors(partition: Partition, *sizes: int | Size) -> list[int]:
    return [partition.new(integer(size) if isinstance(size, int) else size) for size in sizes]


def sizes(partition: Partition, *found: int) -> list[str]:
    return [str(partition.size(atom)) for atom in partition.atoms(found)]


def test_equal_sizes_merge() -> None:
    partition = Partition()
    a, b = factors(partition, 6, 6)
    assert partition.unify([a], [b]) == ()
    assert partition.atoms([a]) == partition.atoms([b])


def test_a_multiple_is_refined_into_the_other_and_the_rest() -> None:
    partition = Partition()
    fused, heads, width = factors(partition, 48, 6, 8)
    assert partition.unify([fused], [heads, width]) == ()
    assert partition.atoms([fused]) == partition.atoms([heads, width])


def test_refinement_reaches_what_was_unified_before() -> None:
    partition = Partition()
    hidden, other, heads, width, groups, repeats = factors(partition, 48, 48, 6, 8, 3, 2)
    partition.unify([hidden], [other])
    partition.unify([other], [heads, width])
    partition.unify([heads], [groups, repeats])
    assert partition.atoms([hidden]) == partition.atoms([groups, repeats, width])


def test_symbolic_products_refine_into_their_symbols() -> None:
    partition = Partition()
    flat, rows, length = factors(partition, ROWS.times(LENGTH), ROWS, LENGTH)
    assert partition.unify([flat], [rows, length]) == ()
    assert sizes(partition, flat) == ["s1", "s2"]


def test_sizes_that_do_not_refine_are_told_and_stay_apart() -> None:
    partition = Partition()
    a, b, c, d, tail, other = factors(partition, 4, 6, 6, 4, 5, 5)
    assert partition.unify([a, b, tail], [c, d, other]) == (a, b, c, d)
    assert partition.atoms([tail]) == partition.atoms([other])


def test_matching_goes_on_from_the_right_where_the_left_is_stuck() -> None:
    partition = Partition()
    other_length = Size(1, (("s3", 1),), 11)
    left, right = factors(partition, LENGTH, 8), factors(partition, other_length, 8)
    assert partition.unify(left, right) == ()
    assert partition.atoms(left) == partition.atoms(right)


def test_symbols_of_different_hints_are_never_the_same() -> None:
    partition = Partition()
    a, b = factors(partition, ROWS, LENGTH)
    assert partition.unify([a], [b]) != ()
    assert partition.atoms([a]) != partition.atoms([b])


def test_a_fixed_size_beside_a_symbol_stays_the_size() -> None:
    partition = Partition()
    a, b = factors(partition, LENGTH, 11)
    assert partition.unify([a], [b]) == ()
    assert partition.size(a).number == 11


def test_a_square_is_refined_into_the_same_factor_twice() -> None:
    partition = Partition()
    square, side, again = factors(partition, 36, 6, 6)
    partition.unify([square], [side, again])
    partition.unify([side], [again])
    assert len(set(partition.atoms([square]))) == 1
    assert sizes(partition, square) == ["6", "6"]
