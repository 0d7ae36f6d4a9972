"""What every rank has one of: of the process, or of the rank that a thread works for."""

import threading

from hetu_fx.base.per_rank import PerRank, as_rank


def test_a_process_has_one_in_all_its_threads():
    own, found = PerRank(list), []
    own().append(1)
    thread = threading.Thread(target=lambda: found.append(own()))
    thread.start()
    thread.join()
    assert found[0] is own()


def test_ranks_that_are_threads_have_their_own_and_keep_it():
    own, of_one, of_other = PerRank(list), {}, {}
    own().append("process")
    with as_rank(of_one):
        own().append("one")
        with as_rank(of_other):
            assert own() == []
        assert own() == ["one"]
    with as_rank(of_one):
        assert own() == ["one"]
    assert own() == ["process"]
