from hetu_fx.cluster.links import inter_pairs, neighbours, settled_limits


def test_neighbours_in_speed_inside_nodes_are_timed_and_no_rank_twice_in_a_round() -> None:
    nodes, speeds = "abacbaa", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0, 3.0]
    assert neighbours(nodes, speeds) == ([(0, 6), (2, 5), (4, 1)], [(6, 2)])


def test_between_nodes_the_fastest_ranks_of_neighbours_are_timed() -> None:
    assert inter_pairs("abacba", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0]) == [(0, 4), (4, 3)]


def test_of_equal_devices_the_first_are_timed_and_a_lone_one_is_not() -> None:
    assert neighbours("aaa", [1.0] * 3) == ([(0, 1)], [(1, 2)])
    assert (neighbours("a", [1.0]), inter_pairs("aa", [1.0, 1.0])) == (([], []), [])


def test_a_rank_reaches_what_it_does_with_the_next_faster_one_and_equal_ones_their_median() -> None:
    timed = {(0, 1): (900.0, 0.0), (1, 2): (300.0, 0.0), (2, 3): (100.0, 0.0), (3, 4): (120.0, 0.0)}
    assert settled_limits(timed, "aaaaa", [4.0, 3.0, 2.0, 1.0, 1.0]) == {0: 900, 1: 900, 2: 300, 3: 110, 4: 110}
