from html.parser import HTMLParser
from pathlib import Path

from hetu_fx.plans.schedule import Phase
from hetu_fx.show.lanes import WORK, lanes_html, write_html
from hetu_fx.show.timeline import Counter, Event, Timeline

STEP = Timeline(
    (Event(0, "forward 0", 1.0, 2.0, "forward"), Event(3, "<b> & co", 2.0, 4.0, "send")),
    "a <step>",
    (Counter(3, "memory", ((1.0, 5.0), (3.0, 10.0))),),
)


class Reader(HTMLParser):
    """Collects the tags of a page, its text, and whether every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_every_event_is_a_box_at_its_time_with_its_name() -> None:
    page = Reader(lanes_html(STEP))
    boxes = [attrs for tag, attrs in page.tags if tag == "rect"]
    assert page.open == []
    assert [(box["x"], box["width"]) for box in boxes] == [("0.0", "333.3"), ("333.3", "666.7")]
    assert "<b> & co: 2 s from 1 s" in page.texts


def test_counters_are_steps_under_their_device() -> None:
    (curve,) = [attrs["points"] for tag, attrs in Reader(lanes_html(STEP)).tags if tag == "polyline"]
    assert curve is not None
    points = [tuple(map(float, point.split(","))) for point in curve.split()]
    assert [left for left, _ in points] == [0.0, 666.7, 666.7, 1000.0]
    heights = [height for _, height in points]
    assert heights[0] == heights[1] == heights[2] + 10
    assert heights[2] == heights[3]


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_html(STEP, tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    assert lanes_html(STEP) in text
    assert "a <step>" in Reader(text).texts
    assert not [tag for tag, attrs in Reader(text).tags if tag in ("script", "link", "img") or "href" in attrs]


def test_an_empty_timeline_is_a_page_too() -> None:
    assert Reader(lanes_html(Timeline(()))).open == []


def test_all_phases_of_a_schedule_are_work_and_messages_are_none() -> None:
    assert set(Phase) < WORK
    assert not WORK & {"send", "gather", "gradients", "communication", "group creation"}
