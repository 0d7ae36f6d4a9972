"""The report of a run: its sections, in order, as one HTML page that needs nothing from elsewhere, and as JSON.

Words are never inside pictures, which are stretched to the width of the window: so they stay as large as the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any

from hetu_fx.base.words import bytes_text, seconds_text
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.planner.values.device_memory import TERMS
from hetu_fx.planner.values.gathered_op import GATHERED_OP, remarks
from hetu_fx.planner.values.gathered_op import HEADER as GATHERED_HEADER
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import DeviceCost
from hetu_fx.report.run import LoggedRun, read_run
from hetu_fx.report.summary import CHANGES, HEADER, entry_text, summaries, variant_row
from hetu_fx.report.updates import Entry
from hetu_fx.show.charts import PLACES, Scale, assign_colours, boxes, curve, finite, levels, places, plot, shares
from hetu_fx.show.lanes import COLORS, OTHER, colours, events_lane
from hetu_fx.show.markup import COLOURS, bar, cells_table, keys, note, number, page, table
from hetu_fx.show.timeline import Event, Timeline

MOST_PLANS = 8
"""More plans than these stand in the log, and not on the page."""

MOST_CHANGES = 300
"""So many of the last changes stand on the page."""

UNKNOWN = (
    "Nobody has told what the devices are, so nothing was predicted: give auto_parallelize a cluster, or plan='auto', "
    "which measures them."
)


def cluster(run: LoggedRun) -> dict[str, Any] | None:
    """Return the devices and links that plans were made for, as their file has them; None where nobody knows."""
    return None if run.cluster is None else run.cluster.to_json()


def _cluster_html(run: LoggedRun) -> str:
    """Return their table."""
    return note(UNKNOWN) if run.cluster is None else _text(str(run.cluster))


def plans(run: LoggedRun) -> dict[str, Any]:
    """Return all plans by variant, as their files have them."""
    return {name: plan.to_json() for name, plan in run.plans.items()}


def _plans_html(run: LoggedRun) -> str:
    """Return the plans of variants that have trained, as pictures and in words."""
    shown = run.shown[:MOST_PLANS]
    left = len(run.plans) - len(shown)
    told = "".join(_plan(name, run.plans[name]) for name in shown)
    return told + note(f"{left} more are in the log, whose variants have not trained.") * bool(shown and left)


def _plan(name: str, plan: Plan) -> str:
    return f"<h3>{escape(name)}</h3>{plan.html()}{_text(plan.explain())}"


def changes(run: LoggedRun) -> list[dict[str, Any]]:
    """Return all changes while it ran, of plans, variants, homes, graphs and health, as the log has them."""
    return [dict(entry) for entry in run.log if entry["event"] in CHANGES]


def _changes_html(run: LoggedRun) -> str:
    """Return a line for each of the last ones."""
    found = changes(run)
    left = len(found) - MOST_CHANGES
    told = note(f"The last {MOST_CHANGES} of {len(found)} changes; hetu-fx log lists all.") * (left > 0)
    return told + _text("\n".join(map(entry_text, found[-MOST_CHANGES:]))) if found else ""


def _gathered_ops_by_variant(run: LoggedRun) -> dict[str, Any]:
    """Return the ops of each variant that gather because no rule splits them, each with what would avoid it."""
    return {
        name: [{**GATHERED_OP.write(one), "cure": one.cure} for one in found] for name, found in run.gathered.items()
    }


def _gathered_html(run: LoggedRun) -> str:
    """Return a table for each of these variants."""
    return "".join(
        f"<h3>{escape(name)}</h3>{table(GATHERED_HEADER, [one.cells for one in found])}"
        f"{''.join(map(note, remarks(found)))}"
        for name, found in run.gathered.items()
    )


def _text(lines: str) -> str:
    return f'<pre tabindex="0">{escape(lines)}</pre>'


_COLOUR, _BAND = "#4a7fd0", "#4a7fd040"


def _losses_data(run: LoggedRun) -> list[dict[str, Any]]:
    """Return step and loss of every step that has one; null where that is no finite number."""
    known = [entry for entry in run.steps if entry["loss"] is not None]
    shown = {id(entry) for entry in finite(known, lambda entry: entry["loss"])}
    return [{"step": entry["step"], "loss": entry["loss"] if id(entry) in shown else None} for entry in known]


def _losses_html(run: LoggedRun) -> str:
    """Return a curve, the first and the last loss, and those of evaluations."""
    known = [entry for entry in _losses_data(run) if entry["loss"] is not None]
    if not known:
        return note("The log has no loss: the model returns none, or an older release has written it.") * bool(
            run.steps
        )
    values = [entry["loss"] for entry in known]
    scale = Scale(min(values), max(values))
    picture = curve(places(values), scale, _COLOUR)
    ends = (f"step {known[0]['step']}: {number(values[0])}", f"step {known[-1]['step']}: {number(values[-1])}")
    shown = plot(picture, f"{number(scale.high)}", *ends, f"lowest {number(scale.low)}")
    return _legend(len(values)) + shown + _remarks(run, len(values))


def _legend(steps: int) -> str:
    """Return what the line is, and of many steps the band around it."""
    if steps <= PLACES:
        return keys({}, {"loss": _COLOUR})
    return keys({"least to most of neighbouring steps": _BAND}, {"loss, their median": _COLOUR})


def _remarks(run: LoggedRun, known: int) -> str:
    lost = sum(entry["loss"] is not None for entry in run.steps) - known
    seen = finite(run.evaluations, lambda entry: entry["loss"])
    remarks = [f"{lost} losses are no finite numbers."] * bool(lost)
    if seen:
        last = seen[-1]
        remarks.append(f"Last loss without training: {number(last['loss'])}, after step {last['step']}.")
    return "".join(map(note, remarks))


_COLOURS = {term: COLOURS[index % len(COLOURS)] for index, term in enumerate(TERMS)}
_MEASURED = (
    "Measured: the most that torch has had of a GPU; of a CPU the whole process, with Python, libraries and data. "
    "Predicted is what the model takes of it."
)


def _memory_data(run: LoggedRun) -> dict[str, Any]:
    """Return the predicted bytes by variant, device and term, with the limit, and the measured peak by process."""
    predicted = {name: [_device_memory(cost) for cost in _costs(run, name)] for name in run.shown}
    return {"predicted": predicted, "peak_bytes": run.peak_bytes}


def _costs(run: LoggedRun, name: str) -> tuple[DeviceCost, ...]:
    predicted = run.plans[name].predicted
    return () if predicted is None else predicted.devices


def _device_memory(cost: DeviceCost) -> dict[str, Any]:
    whole = {"bytes": cost.total_bytes, "limit_bytes": cost.limit_bytes}
    return {"device": cost.rank, **whole, "terms": dict(cost.bytes)}


def _memory_html(run: LoggedRun) -> str:
    """Return a table for each variant, or of what was measured alone."""
    tables = [f"<h3>{escape(name)}</h3>{_memory_table(run, name)}" for name in run.shown if _costs(run, name)]
    if not (tables or any(run.peak_bytes)):
        return ""
    if not tables:
        rows = [[f"process {rank}", bytes_text(count)] for rank, count in enumerate(run.peak_bytes)]
        return cells_table(["", "measured peak"], rows) + note(_MEASURED)
    return keys({term: _COLOURS[term] for term in _terms(run)}) + "".join(tables) + note(_MEASURED)


def _terms(run: LoggedRun) -> list[str]:
    """Return the terms that any device has anything of."""
    found = {term for name in run.shown for cost in _costs(run, name) for term, count in cost.bytes if count}
    return [term for term in TERMS if term in found]


def _memory_table(run: LoggedRun, name: str) -> str:
    header = ["device", "needs", "limit", "of it", "measured peak", "predicted", *_terms(run)]
    return cells_table(header, _rows(run, name))


def _rows(run: LoggedRun, name: str) -> Iterator[list[str]]:
    costs, terms = _costs(run, name), _terms(run)
    most = max(cost.total_bytes for cost in costs)
    peaks = dict(enumerate(run.peak_bytes))
    for cost in costs:
        held = dict(cost.bytes)
        drawn = bar([(f"{t}: {bytes_text(held.get(t, 0))}", held.get(t, 0), _COLOURS[t]) for t in terms], most)
        share = f"{cost.total_bytes / cost.limit_bytes:.1%}" if cost.limit_bytes else ""
        limit, peak = (bytes_text(count) if count else "" for count in (cost.limit_bytes, peaks.get(cost.rank)))
        parts = (bytes_text(held.get(term, 0)) for term in terms)
        yield [str(cost.rank), bytes_text(cost.total_bytes), limit, share, peak, drawn, *parts]


HIGHEST = 2.0
"""A picture is this many times the median high at most, so that steps that make graphs leave room to the others."""


def variants(run: LoggedRun) -> list[dict[str, Any]]:
    """Return what each variant took."""
    return [asdict(summary) for summary in summaries(run.log)]


def _variants_html(run: LoggedRun) -> str:
    """Return the same as a table."""
    found = summaries(run.log)
    return table(HEADER, map(variant_row, found)) if found else ""


def _steps_data(run: LoggedRun) -> list[dict[str, Any]]:
    """Return variant, seconds, predicted seconds and rows of every step."""
    names = ("step", "variant", "seconds", "predicted_seconds", "rows", "longest")
    return [{name: entry.get(name) for name in names} for entry in run.steps]


def _steps_html(run: LoggedRun) -> str:
    """Return a box for each step, or for each few where there are many."""
    if not run.steps:
        return ""
    colours = assign_colours([entry["variant"] for entry in run.steps])
    seconds = [entry["seconds"] for entry in run.steps]
    scale = Scale(0.0, min(max(seconds), HIGHEST * median(seconds)) or 1.0)
    groups = places(run.steps)
    picture = boxes([_box(group, colours) for group in groups], scale) + levels(list(map(_predicted, groups)), scale)
    ends = f"step {run.steps[0]['step']}", f"step {run.steps[-1]['step']}"
    beyond = sum(value > scale.high for value in seconds)
    lines = {"predicted": "currentColor"} if any(entry["predicted_seconds"] for entry in run.steps) else {}
    remarks = [f"Higher than the picture: {beyond} steps, the longest of {number(max(seconds))} s."] * bool(beyond)
    return keys(colours, lines) + plot(picture, f"{number(scale.high)} s", *ends) + "".join(map(note, remarks))


def _box(group: Sequence[Entry], colours: Mapping[str, str]) -> tuple[float, str, str]:
    """Return the median seconds of neighbours, the colour of most of them, and what is said of them."""
    counts = Counter(entry["variant"] for entry in group)
    middle = median(entry["seconds"] for entry in group)
    first, last = group[0]["step"], group[-1]["step"]
    where = f"step {first}" if len(group) == 1 else f"steps {first} to {last}, median"
    return middle, colours[counts.most_common(1)[0][0]], f"{where}: {number(middle)} s, {shares(counts)}"


def _predicted(group: Sequence[Entry]) -> float | None:
    known = [entry["predicted_seconds"] for entry in group if entry["predicted_seconds"] is not None]
    return median(known) if known else None


_COMPUTE = colours([Event(0, "", 0.0, 0.0, "compute")])
_HEADER = ("device", "predicted compute", "measured", "ratio", "predicted idle", "measured not computing")


def _timeline_data(run: LoggedRun) -> dict[str, Any]:
    """Return what was predicted and measured of each variant's step, and of each device."""
    return {name: _variant_data(run, name) for name in run.shown}


def _variant_data(run: LoggedRun, name: str) -> dict[str, Any]:
    computed = dict(enumerate(run.compute_seconds(name)))
    ranks = sorted({*run.plans[name].devices, *computed})
    return {
        "predicted_seconds": _predicted_seconds(run, name),
        "measured_seconds": run.seconds(name),
        "devices": [_device(run, name, rank, computed.get(rank)) for rank in ranks],
    }


def _predicted_seconds(run: LoggedRun, name: str) -> float | None:
    """Return the seconds that the log tells, as all of the page does; without, those of the step on paper."""
    told = next((entry["predicted_seconds"] for entry in reversed(run.settled(name))), None)
    return run.on_paper[name].seconds if told is None and name in run.on_paper else told


def _device(run: LoggedRun, name: str, rank: int, measured: float | None) -> dict[str, Any]:
    """Return the seconds that a device was predicted to compute, to idle, and that it has computed; None: unknown."""
    predicted = run.plans[name].predicted
    terms = next((dict(d.seconds) for d in predicted.devices if d.rank == rank), {}) if predicted else {}
    idle = run.on_paper[name].timeline.idle_share(rank) if name in run.on_paper else None
    return {
        "device": rank,
        "predicted_compute_seconds": terms.get("compute"),
        "measured_compute_seconds": measured,
        "predicted_idle_share": idle,
    }


def _timeline_html(run: LoggedRun) -> str:
    """Return lanes of devices for each variant, a predicted and a measured one, on one scale, and the numbers."""
    if not run.shown:
        return note(UNKNOWN) * bool(run.steps and run.cluster is None)
    predicted = [event for step in run.on_paper.values() for event in step.timeline.events]
    measured = [event for step in run.traced.values() for event in step.events]
    return keys({**colours(predicted), **colours(measured), **_COMPUTE}) + "".join(_variant(run, n) for n in run.shown)


def _variant(run: LoggedRun, name: str) -> str:
    told = _variant_data(run, name)
    predicted, measured = told["predicted_seconds"], told["measured_seconds"]
    step, traced = run.on_paper.get(name), run.traced.get(name)
    drawn = [made.seconds for made in (step, traced) if made is not None]
    whole = max(predicted or 0.0, measured or 0.0, *drawn, 0.0) or 1.0
    lanes = [lane for device in told["devices"] for lane in _lanes(step, traced, device, whole)]
    title = f"{name}: predicted {_known(predicted)}, measured {_known(measured)}"
    ends = f'<div class="axis"><span>0</span><span>{seconds_text(whole)}</span></div>'
    pictures = f'<div class="lanes" tabindex="0">{"".join(lanes)}</div><div class="lane"><span></span>{ends}</div>'
    rows = table(_HEADER, [_timeline_row(device, measured) for device in told["devices"]])
    return f"<h3>{escape(title)}</h3>{pictures}{rows}"


def _known(seconds: float | None) -> str:
    return "not known" if seconds is None else seconds_text(seconds)


def _lanes(step: Simulation | None, traced: Timeline | None, device: dict[str, Any], whole: float) -> Iterator[str]:
    """Yield what a device was predicted to do, and what it did: in the step that was traced, or in a median one."""
    rank = device["device"]
    if step is not None:
        yield events_lane(f"device {rank}", step.timeline.of(rank), step.timeline.start_seconds, whole)
    measured = () if traced is None else traced.of(rank)
    label = f"device {rank}" if step is None else "measured"
    if measured:
        yield events_lane(label, measured, 0.0, whole, " more")
    elif device["measured_compute_seconds"] is not None:
        computes = Event(rank, "computes in all", 0.0, device["measured_compute_seconds"], "compute")
        yield events_lane(label, [computes], 0.0, whole, " more")


def _timeline_row(device: dict[str, Any], measured: float | None) -> list[str]:
    """Return the cells of a device's row under `_HEADER`."""
    expected, found = device["predicted_compute_seconds"], device["measured_compute_seconds"]
    idle = device["predicted_idle_share"]
    ratio = number(found / expected) if found and expected else ""
    rest = "" if found is None or not measured else f"{max(0.0, 1 - found / measured):.0%}"
    times = ("" if seconds is None else seconds_text(seconds) for seconds in (expected, found))
    return [str(device["device"]), *times, ratio, "" if idle is None else f"{idle:.0%}", rest]


KINDS: Mapping[str, str] = {
    "gather": "parameters from their homes",
    "send": "activations and their gradients, between stages",
    "communication": "inside stages",
    "gradients": "gradients to their homes",
}
"""What kinds of the simulator's messages are."""

MOST_LINKS = 200
"""So many links stand on the page, those that carry most."""


def _traffic_data(run: LoggedRun) -> dict[str, Any]:
    """Return the bytes of a step of each variant, by kind and by link (sender, receiver)."""
    return {name: {"by_kind": by_kind(step), "by_link": _links(step)} for name, step in run.on_paper.items()}


def by_kind(step: Simulation) -> dict[str, float]:
    """Return the bytes by what they are."""
    found = dict.fromkeys(KINDS, 0.0)
    for (kind, _, _), count in step.sent_bytes.items():
        found[kind] = found.get(kind, 0.0) + count
    return {kind: count for kind, count in found.items() if count}


def _links(step: Simulation) -> list[dict[str, Any]]:
    return [{"sender": a, "receiver": b, "bytes": count} for (a, b), count in step.link_bytes.items()]


def _traffic_html(run: LoggedRun) -> str:
    """Return both as tables; nothing where nobody sends anything."""
    steps = {name: step for name, step in run.on_paper.items() if step.sent_bytes}
    if not steps:
        return ""
    kinds = dict.fromkeys(kind for step in steps.values() for kind in by_kind(step))
    colours = {KINDS.get(kind, kind): COLORS.get(kind, OTHER) for kind in kinds}
    return (
        keys(colours)
        + "".join(f"<h3>{escape(name)}</h3>{_table(step)}" for name, step in steps.items())
        + note("Bytes as the plan sends them; what processes agree on before a step, and the loss, are not in it.")
    )


def _table(step: Simulation) -> str:
    links = sorted(step.link_bytes.items(), key=lambda pair: -pair[1])
    most, kinds = links[0][1], by_kind(step)
    rows = [_row(step, link, count, most) for link, count in links[:MOST_LINKS]]
    left = len(links) - MOST_LINKS
    total = ", ".join(f"{KINDS.get(kind, kind)} {bytes_text(count)}" for kind, count in kinds.items())
    more = note(f"{left} more links carry less each.") * (left > 0)
    return (
        note(f"In all {bytes_text(sum(kinds.values()))}: {total}.")
        + cells_table(["link", "bytes", "by kind"], rows)
        + more
    )


def _row(step: Simulation, link: tuple[int, int], count: float, most: float) -> list[str]:
    own = {kind: size for (kind, *ends), size in step.sent_bytes.items() if tuple(ends) == link}
    parts = [
        (f"{KINDS.get(kind, kind)}: {bytes_text(size)}", size, COLORS.get(kind, OTHER)) for kind, size in own.items()
    ]
    return [f"{link[0]} → {link[1]}", bytes_text(count), bar(parts, most)]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report.

    Attributes:
        title: on the page.
        html: returns what stands below it; "" leaves the section out.
        data: returns the same as what JSON can say.
    """

    title: str
    html: Callable[[LoggedRun], str]
    data: Callable[[LoggedRun], Any]


SECTIONS: Mapping[str, Section] = {
    "variants": Section("Variants", _variants_html, variants),
    "losses": Section("Loss", _losses_html, _losses_data),
    "steps": Section("Seconds of each step", _steps_html, _steps_data),
    "timeline": Section("One step: predicted and measured", _timeline_html, _timeline_data),
    "memory": Section("Memory", _memory_html, _memory_data),
    "traffic": Section("Traffic of one step", _traffic_html, _traffic_data),
    "gathered": Section("What is gathered, as no rule splits it", _gathered_html, _gathered_ops_by_variant),
    "cluster": Section("Cluster", _cluster_html, cluster),
    "plans": Section("Plans", _plans_html, plans),
    "changes": Section("What changed", _changes_html, changes),
}
"""All sections by their key in JSON, which is their anchor on the page."""


def html_page(log: Sequence[Entry], title: str) -> str:
    """Return the page of a log that `read_log` has read."""
    run = read_run(log)
    bodies = {key: section.html(run) for key, section in SECTIONS.items()}
    shown = {key: body for key, body in bodies.items() if body}
    contents = " ".join(f'<a href="#{key}">{escape(SECTIONS[key].title)}</a>' for key in shown)
    sections = "\n".join(_section(key, body) for key, body in shown.items())
    return page(title, f"<p>{escape(entry_text(log[0]))}</p>\n<nav>{contents}</nav>\n{sections}")


def _section(key: str, body: str) -> str:
    return f'<section><h2 id="{key}">{escape(SECTIONS[key].title)}</h2>\n{body}\n</section>'


def report_json(log: Sequence[Entry]) -> dict[str, Any]:
    """Return what the page says as what JSON can say, by the keys of `SECTIONS`."""
    run = read_run(log)
    return {"processes": run.processes, **{key: section.data(run) for key, section in SECTIONS.items()}}
