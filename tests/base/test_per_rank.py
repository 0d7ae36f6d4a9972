"""What every rank has one of: of the process, or of the rank that a thread works for."""

import threading

from hetu_fx.base.per_rank import as_rank, own


class Things(list):
    """What each has one of."""


def test_a_process_has_one_in_all_its_threads():
    found: list[Things] = []
    own(Things).append(1)
    thread = threading.Thread(target=lambda: found.append(own(Things)))
    thread.start()
    thread.join()
    assert found[0] is own(Things)


def test_ranks_that_are_threads_have_their_own_and_keep_it():
    of_one, of_other = {}, {}
    own(Things)[:] = []
    own(Things).append("process")
    with as_rank(of_one):
        own(Things).append("one")
        with as_rank(of_other):
            assert own(Things) == []
        assert own(Things) == ["one"]
    with as_rank(of_one):
        assert own(Things) == ["one"]
    assert own(Things) == ["process"]
