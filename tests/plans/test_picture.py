"""A plan as notebooks show it: who has which share, readable alone, of thousands of devices too."""

from __future__ import annotations

import re
from dataclasses import replace

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.show.markup import CLASS, STYLE
from tests.base.seen_html import Seen
from tests.plans.test_tables import of_many, priced

STAGES = (Stage((0, 2), (3, 1), blocks=3), Stage((4,), blocks=1))
PLAN = Plan((Pipeline(STAGES, share=3, micro_batches=2), Pipeline((Stage((5,)),))), name="<a>")


def cells(html: str) -> list[list[str]]:
    """Return the text of every cell of a table's body."""
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<tbody>")[2])
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def test_a_given_plan_shows_the_shares_of_every_device() -> None:
    html = PLAN._repr_html_()
    assert cells(html) == [
        ["0", "2", "0", "3", "0", "75 %", "75 %"],
        ["0", "2", "0", "3", "2", "75 %", "25 %"],
        ["0", "2", "1", "1", "4", "75 %", "100 %"],
        ["1", "1", "0", "even", "5", "25 %", "100 %"],
    ]
    assert [float(width) for width in re.findall(r"width:([\d.]+)%;background:#e08a2e", html)] == [75, 25, 100, 100]
    assert "memory" not in html
    assert "plan &#x27;&lt;a&gt;&#x27;" in html


def test_a_plan_that_was_made_shows_memory_of_what_there_is_who_waits_and_who_is_left_out() -> None:
    seconds = (("compute", 0.75), ("idle", 0.25))
    cost = DeviceCost(0, seconds, (("parameters", 2_000_000),), 8_000_000)
    html = replace(Plan.single(), predicted=Prediction(0.5, (cost,), left_out=(1, 2)))._repr_html_()
    assert cells(html)[0][-2:] == ["2 of 8 MB (25 %)", "75 %"]
    assert "predicted step 500 ms" in html
    assert "left out: 2 of 3 devices, 1, 2" in html


def test_it_needs_nothing_from_elsewhere_and_leaves_the_rest_of_the_notebook_as_it_is() -> None:
    html = PLAN._repr_html_()
    seen = Seen(html)
    assert (seen.tags["table"], seen.links) == (1, [])
    assert not any(word in html for word in ("<script", "url(", "@import", "http"))
    selectors = re.findall(r"(?:^|[{}])\s*([^@{}]+)\{", STYLE)
    assert all(part.strip().startswith(f".{CLASS}") for each in selectors for part in each.split(","))


def test_of_many_devices_like_ones_stand_in_one_row() -> None:
    assert len(cells(priced(of_many(32, 32))._repr_html_())) == 1
    assert cells(of_many(512, 2)._repr_html_()) == [["0-511", "8", "0, 1", "1", "0-1023", "0.2 %", "100 %"]]
