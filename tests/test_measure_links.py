from hetu_fx.measure_links import inter_pairs, intra_pairs


def test_pairs_to_time_lie_inside_nodes_and_between_neighbours() -> None:
    nodes = ["a", "b", "a", "c", "b", "a"]
    assert intra_pairs(nodes) == [(0, 2), (1, 4)]
    assert inter_pairs(nodes) == [(0, 1), (1, 3)]
    assert (intra_pairs(["a"]), inter_pairs(["a", "a"])) == ([], [])
