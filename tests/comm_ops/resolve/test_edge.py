"""Prices: bytes decide, or seconds where links are known; what cannot be beaten settles."""

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.cost import EqualLinks
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, StepPrices
from hetu_fx.comm_ops.resolve.resolve import resolve


class Slow(EqualLinks):
    """Links that take a second to start."""

    def bytes_per_second(self, a, b):
        return 8.0

    def latency_seconds(self, a, b):
        return 1.0

    def node_of(self, rank):
        return 0


def edge(source, target, shape=(8,)):
    return ReshardEdge.plain(parse_annotation(source), parse_annotation(target), shape)


def test_without_links_bytes_come_first_then_the_busiest_rank():
    assert StepPrices(itemsize=2).of([edge("[0]", "[1,2] D(2)").move]) == (32, 32.0, 1)
    assert StepPrices(itemsize=2).of([edge("[0,1] D(2)", "[2,3] D(2)").move]) == (32, 16.0, 1)


def test_with_links_seconds_come_first():
    assert StepPrices(Slow(), itemsize=2).of([edge("[0]", "[1]").move]) == (3.0, 16, 1)


def test_a_symbolic_size_counts_as_one():
    assert StepPrices().of([edge("[0]", "[1]", (None, 8)).move]) == StepPrices().of([edge("[0]", "[1]").move])


def test_what_cannot_be_beaten_settles():
    def settles(source, target, topology=None):
        change = edge(source, target)
        return StepPrices(topology).settles(change, resolve(change.source, change.target, change.shape).steps)

    assert settles("[0]", "[0]", Slow())
    assert settles("[0,1] P(2)", "[0,1] D(2)")
    assert not settles("[0,1] P(2)", "[0,1] D(2)", Slow())
    assert settles("[0,1] S(0, 2)", "[2,3] D(2)")
    summands = edge("[0-3] P(4)", "[4,5] D(2)")
    assert not StepPrices().settles(summands, (summands.move,))
