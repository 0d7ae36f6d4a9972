import random
from collections.abc import Iterator, Sequence

import pytest

from hetu_fx.planner.search.malleus.layers import Kinds
from hetu_fx.planner.search.malleus.search import ExchangeGoal, Placement, Placer, _merit, different_pairs, exchanges
from tests.planner.search.malleus.models import ample, kinds


def all_different_pairs(bins: Sequence[Kinds]) -> Iterator[tuple[int, int]]:
    """Look at every pair."""
    seen = set[tuple[Kinds, ...]]()
    for i in range(len(bins)):
        for j in range(i + 1, len(bins)):
            pair = tuple(sorted((bins[i], bins[j])))
            if pair not in seen:
                seen.add(pair)
                yield i, j


@pytest.mark.parametrize("seed", range(20))
def test_pairs_of_different_pipelines_are_found_while_some_are_exchanged(seed: int) -> None:
    drawn, some = random.Random(seed), [kinds(1.0), kinds(2.0), kinds(2.0, 1.0)]
    first = [drawn.choice(some) for _ in range(9)]
    found = []
    for ways in (different_pairs, all_different_pairs):
        bins, exchanged = list(first), random.Random(seed)
        found.append([])
        for i, j in ways(bins):
            found[-1].append((i, j))
            if exchanged.random() < 0.3:
                bins[i], bins[j] = kinds(3.0), exchanged.choice(some)
    assert found[0] == found[1]


def test_no_exchange_that_is_better_is_out_of_reach() -> None:
    drawn, ruled_out = random.Random(0), list[bool]()
    for _ in range(60):
        placer = Placer(ample(drawn.randint(4, 12), drawn.randint(6, 40), 3))
        bins = [kinds(*sorted(drawn.choices([1.0, 1.9, 3.6], k=drawn.randint(1, 3)), reverse=True)) for _ in range(3)]
        best = placer._micro_batches([placer.filler.fill(own) for own in bins])
        for one, other in exchanges(bins[0], bins[1]) if best is not None else ():
            pair = placer.filler.fill(one), placer.filler.fill(other)
            placed = placer._micro_batches([*pair, placer.filler.fill(bins[2])])
            ruled_out.append(not reach(best).allows(*pair))
            assert not ruled_out[-1] or placed is None or _merit(placed) >= _merit(best)
    assert sum(ruled_out) > len(ruled_out) / 2


def reach(best: Placement | None) -> ExchangeGoal:
    assert best is not None
    return ExchangeGoal.of(best.pipelines, sum(best.micro_batches), best.seconds, (0, 1))
