"""A log becomes one page that needs nothing from elsewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cli.main import main
from hetu_fx.plans.plan import Plan
from hetu_fx.report.page import html_page

NOT_KNOWN = {"plans": [], "cluster": None, "profile": None}
START = {"event": "start", "format": "hetu_fx.log/2", "processes": 2, "variants": ["a<b"], **NOT_KNOWN}


def step(number: int, variant: str = "a<b", predicted: float | None = 0.5) -> dict[str, Any]:
    times = {"loss": 1 / number, "seconds": 1.0 * number, "predicted_seconds": predicted, "compute_seconds": [0.4, 0.2]}
    return {"event": "step", "step": number, "variant": variant, "longest": 8, "rows": [3, 1], **times}


PLAN = {"event": "plan", "step": 1, "name": "new", "plan": Plan.data_parallel([0, 1], [3, 1]).to_json()}
SWITCH = {"event": "switch", "step": 2, "from": "a<b", "to": "new"}
LOG = [START, step(1), PLAN, SWITCH, step(2, "new", None)]


class Seen(HTMLParser):
    """Collects tags, and what they point to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_steps_processes_plans_and_changes_are_shown() -> None:
    page = html_page(LOG, "run")
    seen = Seen(page)
    assert seen.tags.count("rect") == 2
    assert seen.tags.count("line") == 1
    assert "process 1" in page
    assert "Plan &#x27;new&#x27;" in page
    assert "&#x27;a&lt;b&#x27; -&gt; &#x27;new&#x27;" in page


def test_a_page_has_no_links_and_no_script_and_names_are_escaped() -> None:
    seen = Seen(html_page(LOG, "<script>"))
    assert seen.links == []
    assert "script" not in seen.tags


def test_a_log_without_steps_is_a_page_too() -> None:
    assert "<svg" not in html_page([START], "run")


def test_the_command_writes_the_page_beside_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    assert main(["report", str(log)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
