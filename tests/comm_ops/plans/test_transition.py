"""Changes are carried as text."""

import pytest

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.errors import AnnotationError


@pytest.mark.parametrize(("shape", "text"), [((8, None, 3), "8x?x3"), ((), "scalar"), ((0,), "0")])
def test_a_change_reads_back_from_its_text(shape, text):
    change = Transition(Annotation.on((0, 1), Partial(2)), Annotation.on((0, 1), Duplicate(2)), shape)
    assert str(change) == f"[0,1] P(2) -> [0,1] D(2) of {text}"
    assert parse_transition(str(change)) == change


def test_its_ranks_are_those_of_both_ends():
    assert parse_transition("[3] -> [1,0] D(2) of 4").ranks == (0, 1, 3)


@pytest.mark.parametrize("text", ["[0] of 3", "[0] -> [1]", "[0] -> [1] of 3y4", ""])
def test_malformed_text_is_refused(text):
    with pytest.raises(AnnotationError, match="cannot read"):
        parse_transition(text)
