from dataclasses import replace
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster, Collective, Device, Link
from hetu_fx.errors import ClusterError

DOCUMENT: dict[str, Any] = {
    "format": "hetu_fx.cluster/1",
    "devices": [
        {"rank": 1, "kind": "b", "node": "y", "flops_per_second": 5e9, "memory_bytes": 100, "rate": 2},
        {"rank": 0, "flops_per_second": 10000000000, "memory_bytes": 200},
    ],
    "links": {"intra": {"bytes_per_second": 1e9}},
}


TIMED = {"name": "all_gather", "where": "intra", "num_ranks": 2, "bytes_per_second": 5e8, "latency_seconds": 1e-4}


def test_a_cluster_file_reads_in_order_of_rank_with_defaults() -> None:
    cluster = Cluster.from_json(DOCUMENT)
    assert cluster.devices[0] == Device(0, "cpu", "0", 1e10, 200)
    assert cluster.device(1).speed == 2.5e9
    assert cluster.inter == cluster.intra == Link(1e9, 0.0)


def test_a_written_cluster_reads_back_equal(tmp_path: Any) -> None:
    cluster = Cluster.from_json(DOCUMENT)
    cluster.write(tmp_path / "cluster.json")
    assert Cluster.read(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": []}, r"cluster: unknown key 'device' \(did you mean 'devices'\?\)"),
        ({"format": "hetu_fx.cluster/9"}, "this version reads 'hetu_fx.cluster/1' only"),
        ({"devices": []}, "cluster: a cluster has no devices"),
        ({"devices": [{"rank": 0, "flops": 1}]}, r"devices\[0\]: unknown key 'flops'"),
        ({"devices": [{"rank": 0, "flops_per_second": 0, "memory_bytes": 1}]}, "flops_per_second 0.0\nhint: give"),
        ({"devices": [{"rank": 0, "flops_per_second": 1, "memory_bytes": 1, "rate": -1}]}, "rate -1.0\nhint: give"),
        (
            {"devices": [{"rank": 0, "flops_per_second": 1}]},
            r"'memory_bytes' is missing\nhint: give a whole number",
        ),
        ({"devices": [{"rank": -1, "flops_per_second": 1, "memory_bytes": 1}]}, "device has rank -1"),
        ({"devices": [{"rank": 0, "kind": "T4", "meeting_seconds": -1}]}, "meeting_seconds -1.0\nhint: give a finite"),
        (
            {"collectives": [TIMED | {"where": "near"}]},
            r"collectives\[0\]: .* is timed 'near'\nhint: give one of intra, inter",
        ),
        ({"links": {}}, "cluster: links: 'intra' is missing"),
        ({"links": {"intra": {"bytes_per_second": "1 GB"}}}, 'must be a number, not a string: "1 GB"'),
        ({"links": {"intra": {"bytes_per_second": 1, "latency_seconds": -1}}}, "give a finite number, 0 or more"),
    ],
)
def test_a_bad_cluster_file_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(DOCUMENT | changes)


def test_a_rank_stands_once() -> None:
    device = Device(0, "cpu", "0", 1e9, 1)
    with pytest.raises(ClusterError, match=r"ranks \[0\] stand twice"):
        Cluster((device, replace(device, kind="b")), Link(1e9), Link(1e9))


def test_links_depend_on_the_nodes() -> None:
    cluster = Cluster.on_paper([1e9] * 3, nodes=["a", "a", "b"], intra=Link(2e9, 1e-6), inter=Link(1e8, 1e-3))
    assert (cluster.bytes_per_second(0, 1), cluster.latency_seconds(0, 1)) == (2e9, 1e-6)
    assert (cluster.bytes_per_second(1, 2), cluster.latency_seconds(1, 2)) == (1e8, 1e-3)
    assert cluster.link(0, 2).seconds(1e8) == pytest.approx(1.001)


def test_rates_change_only_the_named_devices() -> None:
    cluster = Cluster.on_paper([2e9, 2e9]).with_rates({1: 4})
    assert [device.speed for device in cluster.devices] == [2e9, 5e8]
    with pytest.raises(ClusterError, match=r"rates for ranks \[7\], but the cluster has ranks \[0, 1\]"):
        cluster.with_rates({7: 1.0})


def test_speeds_can_be_corrected_and_rates_stay() -> None:
    cluster = Cluster.on_paper([2e9, 2e9]).with_rates({1: 4}).with_speeds({1: 8e9})
    assert [device.speed for device in cluster.devices] == [2e9, 2e9]
    with pytest.raises(ClusterError, match=r"speeds for ranks \[7\]"):
        cluster.with_speeds({7: 1.0})


def test_a_device_found_faster_moves_memory_and_runs_ops_as_much_faster() -> None:
    device = Device(0, "cpu", "0", 1e9, 1, memory_bytes_per_second=4e9, op_seconds=2e-6)
    found = Cluster((device,), Link(1e9), Link(1e9)).with_speeds({0: 2e9}).devices[0]
    assert (found.memory_bytes_per_second, found.op_seconds) == (8e9, 1e-6)
    assert found.flops_per_byte == device.flops_per_byte


def test_devices_lose_to_a_meeting_what_the_latest_loses_now() -> None:
    cluster = Cluster.on_paper([1e9] * 3, meeting_seconds=[1e-3, 2e-3, 0.0])
    assert cluster.meeting_seconds((0, 1)) == 2e-3
    assert cluster.meeting_seconds((1,)) == 0.0
    assert cluster.with_rates({0: 4.0}).meeting_seconds((0, 1)) == 4e-3


def test_of_more_devices_that_come_at_any_moment_the_last_comes_later() -> None:
    cluster = Cluster.on_paper([1e9] * 5, meeting_seconds=[1e-3] * 4 + [0.0])
    assert cluster.meeting_seconds((0, 1, 2, 3)) == pytest.approx(1.8e-3)
    assert cluster.meeting_seconds((0, 1, 2, 4)) == cluster.meeting_seconds((0, 1, 2)) == pytest.approx(1.5e-3)
    assert Cluster.on_paper([1e9] * 1000, meeting_seconds=[1e-3] * 1000).meeting_seconds(range(1000)) < 3e-3


def test_what_a_meeting_costs_is_kept_in_the_file_and_need_not_be_there() -> None:
    given = DOCUMENT["devices"][0] | {"meeting_seconds": 0.002}
    cluster = Cluster.from_json(DOCUMENT | {"devices": [given]})
    assert cluster.device(1).meeting_seconds == 0.002
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert "meeting_seconds" not in Cluster.from_json(DOCUMENT).to_json()["devices"][0]


def test_what_a_step_takes_besides_is_kept_in_the_file_and_grows_with_the_rate() -> None:
    given = DOCUMENT["devices"][0] | {"step_seconds": 0.02}
    cluster = Cluster.from_json(DOCUMENT | {"devices": [given]})
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.with_rates({1: 2.0}).device(1).step_now == 0.04
    assert "step_seconds" not in Cluster.from_json(DOCUMENT).to_json()["devices"][0]


def test_collectives_that_were_timed_are_kept_in_the_file() -> None:
    cluster = Cluster.from_json(DOCUMENT | {"collectives": [TIMED]})
    assert cluster.collectives == (Collective("all_gather", "intra", 2, 5e8, 1e-4),)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert "collectives" not in Cluster.from_json(DOCUMENT).to_json()


def test_collectives_are_timed_in_the_largest_node_and_between_nodes() -> None:
    assert Cluster.on_paper([1e9] * 4, nodes="abba").groups == {"intra": (0, 3), "inter": (0, 1, 2, 3)}
    assert Cluster.on_paper([1e9] * 2).groups == {"intra": (0, 1)}
    assert Cluster.on_paper([1e9] * 2, nodes="ab").groups == {"inter": (0, 1)}
    assert Cluster.on_paper([1e9]).groups == {}


def test_without_leaves_the_rest() -> None:
    cluster = Cluster.on_paper([1e9] * 3).without([1])
    assert cluster.ranks == (0, 2)
    with pytest.raises(ClusterError, match="no device of rank 1"):
        cluster.device(1)


def test_on_paper_wants_one_entry_per_device() -> None:
    with pytest.raises(ClusterError, match="2 speeds, but"):
        Cluster.on_paper([1.0, 2.0], nodes=["a"])


def test_str_is_a_table() -> None:
    expected = """
device  kind   node  speed      rate  memory  meeting
0       paper  0     2 GFLOP/s  1     1 MB    500 us
1       paper  0     1 GFLOP/s  2     1 MB    4 ms
links: intra 1 GB/s, 10 us; inter 1 GB/s, 10 us
"""
    cluster = Cluster.on_paper(
        [2e9, 1e9], memory_bytes=10**6, intra=Link(1e9, 1e-5), meeting_seconds=[5e-4, 2e-3]
    ).with_rates({1: 2.0})
    assert str(cluster) == expected.strip()
    known = replace(cluster.devices[1], step_seconds=0.01, bytes_per_second=5e8)
    header, _, row, _ = str(replace(cluster, devices=(cluster.devices[0], known))).splitlines()
    assert header.endswith("host   sends")
    assert row.endswith("20 ms  500 MB/s")


def device_of(**changes: Any) -> Device:
    return Cluster.from_json(DOCUMENT | {"devices": [{"rank": 0} | changes]}).devices[0]


def test_a_kind_that_is_publicly_known_needs_no_figures_and_is_marked_as_an_estimate() -> None:
    found = device_of(kind="A100-80G")
    assert (found.flops_per_second, found.memory_bytes, found.source) == (312e12, 80 << 30, "estimate")
    assert device_of(kind="A100-80G", dtype="fp32").flops_per_second == 19.5e12
    partly = device_of(kind="a100", memory_bytes=7)
    assert (partly.memory_bytes, partly.source) == (7, "estimate")


def test_the_table_says_which_chip_a_short_name_means() -> None:
    devices = [{"rank": 0, "kind": "A100"}, {"rank": 1, "kind": "L4"}]
    lines = str(Cluster.from_json(DOCUMENT | {"devices": devices})).splitlines()
    assert "A100 (as A100-80G)" in lines[1]
    assert "as" not in lines[2].split()


@pytest.mark.parametrize("memory", ["24G", "24 GiB", 24 << 30, float(24 << 30)])
def test_memory_is_read_as_people_write_it(memory: object) -> None:
    found = device_of(flops_per_second=1e12, memory_bytes=memory)
    assert found.memory_bytes == 24 << 30
    assert isinstance(found.memory_bytes, int)


@pytest.mark.parametrize("memory", ["24Q", 1.5, "", None, "1.2.3G", "9" * 400, 1e300])
def test_memory_that_is_no_size_is_refused(memory: object) -> None:
    with pytest.raises(ClusterError, match='must be a whole number of bytes, or text such as "24G"'):
        device_of(flops_per_second=1e12, memory_bytes=memory)


def test_figures_that_are_given_are_taken_for_any_kind() -> None:
    found = device_of(kind="A100-80G", flops_per_second=1e12, memory_bytes=5)
    assert (found.flops_per_second, found.source) == (1e12, "given")


def test_an_estimate_stays_one_when_written_and_is_named_in_the_table(tmp_path: Any) -> None:
    cluster = Cluster.from_json(DOCUMENT | {"devices": [{"rank": 0, "kind": "T4"}, {"rank": 1, "kind": "H20"}]})
    cluster.write(tmp_path / "cluster.json")
    assert Cluster.read(tmp_path / "cluster.json") == cluster
    assert str(cluster).endswith("estimates from public figures of their kinds: devices 0, 1")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"kind": "H10"}, r"devices\[0\]: kind 'H10' is not in the table .*\nhint: give flops_per_second and mem"),
        ({"kind": "T4", "dtype": "bf16"}, "chip T4 has no figure for dtype 'bf16'"),
        ({"flops_per_second": 1, "memory_bytes": 1, "source": "guessed"}, "has source 'guessed'"),
        ({"flops_per_second": 1, "memory_bytes": 1, "dtype": "bf16"}, "'dtype' picks a public figure"),
    ],
)
def test_kinds_without_figures_are_refused_with_the_way_out(device: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        device_of(**device)


def test_the_top_speed_of_a_kind_is_that_of_its_fastest_device_now() -> None:
    cluster = Cluster.on_paper([4e9, 8e9, 2e9], kinds=["a", "a", "b"])
    assert (cluster.top_speed("a"), cluster.top_speed("b")) == (8e9, 2e9)
    assert cluster.with_rates({1: 4.0}).top_speed("a") == 4e9


def test_a_link_carries_no_more_than_what_both_ends_send_and_receive() -> None:
    cluster = Cluster.on_paper((1.0,) * 4, nodes=("a", "a", "a", "b"), intra=Link(8e9, 1e-6), inter=Link(1e9, 1e-5))
    slow = replace(
        cluster, devices=(*cluster.devices[:2], replace(cluster.devices[2], bytes_per_second=2e9), cluster.devices[3])
    )
    assert slow.link(0, 1) == slow.intra
    assert slow.link(0, 2) == slow.link(2, 0) == Link(2e9, 1e-6)
    assert slow.link(2, 3) == slow.inter
    assert Cluster.from_json(slow.to_json()) == slow
    assert str(slow).splitlines()[3].endswith("2 GB/s")
