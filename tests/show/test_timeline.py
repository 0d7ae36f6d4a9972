import json
from pathlib import Path

import pytest

from hetu_fx.errors import StateError
from hetu_fx.show.timeline import Counter, Event, Timeline, chrome_trace, write_trace


def example() -> Timeline:
    return Timeline(
        (
            Event(1, "backward 0", 0.004, 0.006, "backward"),
            Event(0, "forward 0", 0.001, 0.003, "forward"),
            Event(0, "send 0", 0.002, 0.004, "send"),
        ),
        "step",
    )


def test_events_are_kept_by_device_and_start() -> None:
    assert [(e.device, e.name) for e in example().events] == [
        (0, "forward 0"),
        (0, "send 0"),
        (1, "backward 0"),
    ]
    assert example().devices == (0, 1)


def test_overlapping_events_are_busy_once() -> None:
    timeline = example()
    assert timeline.seconds == pytest.approx(0.005)
    assert timeline.busy_seconds(0) == pytest.approx(0.003)
    assert timeline.idle_share(1) == pytest.approx(0.6)


def test_an_empty_timeline_has_no_time() -> None:
    assert (Timeline(()).seconds, Timeline(()).idle_share(0), Timeline(()).devices) == (0.0, 0.0, ())


def test_an_event_cannot_end_before_it_starts() -> None:
    with pytest.raises(StateError, match=r"event 'x' of device 3 ends at 1\.0 s, before it starts at 2\.0 s"):
        Event(3, "x", 2.0, 1.0)


def test_the_chrome_trace_starts_at_zero_in_microseconds(tmp_path: Path) -> None:
    example().write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["step", "device 0", "device 1"]
    last = events[-1]
    assert (last["name"], last["tid"], last["cat"], last["ph"]) == ("backward 0", 1, "backward", "X")
    assert (last["ts"], last["dur"]) == (pytest.approx(3000), pytest.approx(2000))


def test_a_notebook_shows_lanes_with_their_style() -> None:
    html = example()._repr_html_()
    assert html.count("<rect") == 3
    assert ".hetu-fx .lane" in html


def test_several_timelines_are_processes_of_one_trace_on_one_clock(tmp_path: Path) -> None:
    later = Timeline((Event(0, "step 7", 0.011, 0.021, facts={"loss": 0.5}),), "measured")
    write_trace(tmp_path / "trace.json", [example(), later])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "step", 1: "measured"}
    (step,) = (e for e in events if e["ph"] == "X" and e["pid"] == 1)
    assert (step["ts"], step["dur"]) == (pytest.approx(10_000), pytest.approx(10_000))
    assert step["args"] == {"loss": 0.5}


def test_perfetto_finds_in_each_event_what_its_kind_must_have() -> None:
    counter = Counter(None, "link", ((0.001, 0.5),))
    for event in chrome_trace([Timeline(example().events, "step", (counter,)), Timeline(())])["traceEvents"]:
        assert event["ph"] in "MCX"
        assert isinstance(event["pid"], int)
        assert {"M": {"args"}, "C": {"ts", "args"}, "X": {"ts", "dur", "tid", "cat"}}[event["ph"]] <= event.keys()
        assert all(event[key] >= 0 for key in ("ts", "dur") if key in event)


def test_counters_stand_in_the_chrome_trace() -> None:
    counter = Counter(1, "memory", ((0.001, 5.0), (0.002, 7.0)))
    timeline = Timeline(example().events, "step", (counter,))
    found = [e for e in chrome_trace([timeline])["traceEvents"] if e["ph"] == "C"]
    assert [(e["name"], e["ts"], e["args"]) for e in found] == [
        ("memory of device 1", pytest.approx(0), {"memory": 5.0}),
        ("memory of device 1", pytest.approx(1000), {"memory": 7.0}),
    ]


@pytest.mark.parametrize("values", [((2.0, 1.0), (1.0, 1.0)), ((0.0, float("nan")),)])
def test_a_counter_has_finite_values_in_order(values: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(StateError, match="counter 'memory of device 2' has values"):
        Counter(2, "memory", values)
