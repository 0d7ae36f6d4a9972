import random

from hetu_fx.planner.values.line import Line, uppermost


def test_the_uppermost_lines_are_as_high_as_all_and_none_of_them_can_be_left_out() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        lines = [Line(rng.randint(0, 9), rng.randint(-3, 9)) for _ in range(rng.randint(1, 12))]
        found = uppermost(lines)
        assert set(found) <= set(lines)
        for x in (0.0, 0.5, 1.0, 3.0, 1e6):
            assert max(line(x) for line in found) == max(line(x) for line in lines)
        steep = [line.slope for line in found]
        assert steep == sorted(set(steep))


def test_times_multiplies_both_parts() -> None:
    assert Line(1.0, 2.0).times(3.0) == Line(3.0, 6.0)
