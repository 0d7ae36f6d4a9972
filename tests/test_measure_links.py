from hetu_fx.measure_links import inter_pairs, intra_pairs


def test_pairs_to_time_are_the_slowest_inside_nodes_and_between_neighbours() -> None:
    nodes, speeds = "abacba", [4.0, 1.0, 2.0, 1.0, 3.0, 1.0]
    assert intra_pairs(nodes, speeds) == [(5, 2), (1, 4)]
    assert inter_pairs(nodes, speeds) == [(5, 1), (1, 3)]


def test_of_equal_devices_the_first_are_timed_and_a_lone_one_is_not() -> None:
    assert intra_pairs("aaa", [1.0] * 3) == [(0, 1)]
    assert (intra_pairs("a", [1.0]), inter_pairs("aa", [1.0, 1.0])) == ([], [])
