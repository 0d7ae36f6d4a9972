"""A job of `hetu-fx launch` on several machines of namespaces, what is done to them, and what comes of it.

Each machine has its own network, processes and shared memory, and dies as a whole by one kill. Whatever is lost comes
back before the next fault.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos_faults import Decks
from tests.chaos_job import LAST_STEPS, PAUSE_SECONDS, SCRIPT, set_steps
from tests.chaos_record import ChaosError, Lines, Record
from tests.chaos_report import spread, spread_text
from tests.launch.agents import Launcher, children
from tests.ranks.machines import Machine

LEAST_NODES = 3  # of two, the one that does not serve the rendezvous waits where the other is gone
CUT_SECONDS = 5.0
CUT_OFF = "rendezvous at .* is gone|machines .* do not answer"
SLOW_SECONDS = 3.0
SLOW = "root tbf rate 20mbit burst 16384 latency 200ms"
CALM_STEPS = 5
REJOIN_SECONDS = "1"
BARS = {("kill", "resume"): 3.0, ("kill process", "resume"): 1.0, ("cut", "speaks"): 5.0}  # seconds, of 95 %
TIMES = ("notice", "regroup", "resume", "speaks", "pause", "rejoin")


@dataclass(frozen=True, slots=True)
class NodeFault:
    """What was done to a machine, when (time.monotonic), and what came of it, in seconds; None: no such thing.

    Attributes:
        notice: until a launcher told its processes that the start under way is over.
        regroup: until the others began anew.
        resume: until they had finished a step.
        speaks: until a machine that is cut off said so.
        pause: the longest time without a step, where nothing was lost.
        rejoin: the longest time without a step as what was lost came back.
        world: processes after it.
    """

    kind: str
    node: str
    done: float
    notice: float | None = None
    regroup: float | None = None
    resume: float | None = None
    speaks: float | None = None
    pause: float | None = None
    rejoin: float | None = None
    world: int = 0

    @property
    def text(self) -> str:
        found = ((name, getattr(self, name)) for name in TIMES)
        told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found if seconds is not None)
        return f"{self.kind} of {self.node}: {told}"


class Node:
    """A machine that brings so many processes, and its launcher once that has been started."""

    def __init__(self, machine: Machine, processes: int, folder: Path) -> None:
        self.machine, self.processes, self.name = machine, processes, machine.hostname
        self.events, self._folder = Lines(folder / f"events_{self.name}.jsonl"), folder
        self.launcher: Launcher

    def start(self, endpoints: str, nodes: int) -> None:
        """Start its launcher."""
        self.events.path.unlink(missing_ok=True)
        self.events = Lines(self.events.path)
        options = ["--rejoin-after", REJOIN_SECONDS, "--max-losses", "100000", "--events", str(self.events.path)]
        script = [str(SCRIPT), str(self._folder)]
        self.launcher = Launcher(self.machine, endpoints, f"1:{nodes}", script, self.processes, *options)

    def in_network(self, *words: str) -> None:
        """Run what changes its network."""
        subprocess.run(["ip", "netns", "exec", self.machine.namespace, *words], check=True, timeout=30)

    def workers(self) -> list[int]:
        """Return the processes that run its script, as they are numbered here."""
        started = [event for event in self.events() if event["event"] == "start"][-1]["workers"]
        return [one for one in children(self.launcher.first_process()) if _number_inside(one) in started]


def _number_inside(process: int) -> int:
    """Return the number of a process on its machine."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])


class NodesJob(Record):
    """A job on machines, of which the n-th brings n processes at most `most`; all serve the rendezvous in turn."""

    def __init__(self, folder: Path, found: Sequence[Machine], most: int, hang: float) -> None:
        (folder / "saved").mkdir(parents=True)
        super().__init__(folder)
        set_steps(folder, 10**9)
        self.nodes = [Node(machine, min(at + 1, most), folder) for at, machine in enumerate(found)]
        self.up = list[Node]()
        self._hang, self._endpoints = hang, ",".join(machine.address for machine in found)

    @property
    def world(self) -> int:
        """Return the number of processes of the machines that are there."""
        return sum(node.processes for node in self.up)

    def start(self, node: Node) -> None:
        """Start a machine's part in the job."""
        node.start(self._endpoints, len(self.nodes))
        self.up.append(node)

    def lose(self, node: Node, how: Callable[[], None]) -> float:
        """Lose a machine; return when (time.monotonic)."""
        at = time.monotonic()
        how()
        self.up.remove(node)
        return at

    def wait_for(self, what: str, find: Callable[[], Any]) -> Any:
        """Return what `find` finds. Raises ChaosError where the job hangs, or a launcher ends."""
        deadline = time.monotonic() + self._hang
        while not (found := find()):
            for node in self.up:
                if (status := node.launcher.process.poll()) is not None:
                    raise ChaosError(f"{node.name} ended with status {status}; awaited: {what}\n{self.output()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing for {self._hang:g} s; awaited: {what}\n{self.output()}")
            time.sleep(PAUSE_SECONDS)
        return found

    def output(self) -> str:
        """Return what launchers have said last."""
        return "\n".join(f"{node.name}:\n{''.join(node.launcher.lines[-25:])}" for node in self.nodes)

    def first_step(self, after: float, world: int) -> float:
        """Wait until so many processes have begun anew after that time, and done a step; return when it ended."""

        def find() -> float | None:
            began = [line["seconds"] for line in self.told("resumed", after) if line["world"] == world]
            steps = self.steps(began[0]) if began else []
            return next((line["seconds"] for line in steps if line["world"] == world), None)

        return float(self.wait_for(f"a step of {world} processes", find))

    def pause(self, begin: float, end: float) -> float:
        """Return the longest time without a step of those that a time was in."""
        times = [line["seconds"] for line in self.steps()]
        before = max((at for at in times if at <= begin), default=begin)
        return max(b - a for a, b in pairwise([before, *(at for at in times if before < at <= end)]))

    def said(self, what: str, after: float, nodes: Sequence[Node]) -> float | None:
        """Return how long after that launchers of these machines said something first."""
        times = [at for node in nodes if (at := node.launcher.when(what, after)) is not None]
        return min(times) - after if times else None

    def last_step(self) -> float:
        """Return what the last step took."""
        *_, one, other = self.steps()
        return float(other["seconds"] - one["seconds"])

    def calm(self, steps: int) -> None:
        """Wait for so many steps."""
        now = time.monotonic()
        self.wait_for(f"{steps} steps", lambda: len(self.steps(now)) >= steps)

    def finish(self) -> dict[str, Any]:
        """Let the job come to its end; return its result."""
        set_steps(self.folder, self.steps()[-1]["step"] + LAST_STEPS)
        for node in self.up:
            if (status := node.launcher.process.wait(self._hang)) != 0:
                raise ChaosError(f"{node.name} ended with status {status}\n{self.output()}")
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def end(self) -> None:
        """Leave nothing behind."""
        for node in self.nodes:
            if hasattr(node, "launcher"):
                node.launcher.kill()
                node.launcher.process.wait()


def _after_loss(job: NodesJob, fault: NodeFault, world: int) -> NodeFault:
    """Wait until so many processes go on; return it with how long that took."""
    resume = job.first_step(fault.done, world) - fault.done
    notice, regroup = (job.said(said, fault.done, job.up) for said in ("the others keep running", "starts in"))
    return replace(fault, notice=notice, regroup=regroup, resume=resume, world=world)


def _bring_back(job: NodesJob, node: Node, fault: NodeFault) -> NodeFault:
    """Start a machine again, and wait until it takes part."""
    begin = time.monotonic()
    job.start(node)
    return replace(fault, rejoin=job.pause(begin, job.first_step(begin, job.world)))


def _kill(job: NodesJob, node: Node) -> NodeFault:
    """All processes of a machine end at once."""
    fault = NodeFault("kill", node.name, job.lose(node, node.launcher.kill))
    fault = _after_loss(job, fault, job.world)
    node.launcher.process.wait()
    return _bring_back(job, node, fault)


def _drain(job: NodesJob, node: Node) -> NodeFault:
    """A machine is told to end, and leaves at a step's end."""
    done = job.lose(node, node.launcher.terminate)
    fault = replace(_after_loss(job, NodeFault("drain", node.name, done), job.world), resume=None)
    if fault.notice is not None:
        raise ChaosError(f"a machine that leaves at a step's end ended the start under way\n{job.output()}")
    if (status := node.launcher.process.wait(60)) != 0:
        raise ChaosError(f"{node.name} was told to leave, and ended with status {status}\n{job.output()}")
    return _bring_back(job, node, replace(fault, pause=job.pause(done, job.steps()[-1]["seconds"])))


def _cut(job: NodesJob, node: Node) -> NodeFault:
    """The link of a machine is cut for some seconds: the others go on without it, and it comes back by itself."""
    done = job.lose(node, lambda: node.in_network("ip", "link", "set", "eth0", "down"))
    fault = _after_loss(job, NodeFault("cut", node.name, done), job.world)
    time.sleep(max(0.0, done + CUT_SECONDS - time.monotonic()))
    speaks = job.wait_for("the side that is cut off", lambda: job.said(CUT_OFF, done, [node]))
    begin = time.monotonic()
    node.in_network("ip", "link", "set", "eth0", "up")
    job.up.append(node)
    return replace(fault, speaks=speaks, rejoin=job.pause(begin, job.first_step(begin, job.world)))


def _slow(job: NodesJob, node: Node) -> NodeFault:
    """The link of a machine is slow for some seconds: nothing is lost."""
    done = time.monotonic()
    node.in_network("tc", "qdisc", "replace", "dev", "eth0", *SLOW.split())
    time.sleep(SLOW_SECONDS)
    node.in_network("tc", "qdisc", "delete", "dev", "eth0", "root")
    job.calm(CALM_STEPS)
    if job.said("the others keep running", done, job.up) is not None:
        raise ChaosError(f"a slow link ended a start\n{job.output()}")
    return NodeFault("slow link", node.name, done, pause=job.pause(done, time.monotonic()), world=job.world)


def _kill_process(job: NodesJob, node: Node) -> NodeFault:
    """One process of a machine is lost, and started again by its launcher."""
    victim, done = node.workers()[0], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    fault = NodeFault("kill process", node.name, done)
    if node.processes == 1:  # its machine begins anew with another one
        return _after_loss(job, fault, job.world)
    fault = _after_loss(job, fault, job.world - 1)
    begin = done + (fault.resume or 0.0)
    return replace(fault, rejoin=job.pause(begin, job.first_step(begin, job.world)))


Inflict = Callable[[NodesJob, Node], NodeFault]
NODE_KINDS: dict[str, Inflict] = {
    "kill": _kill,
    "drain": _drain,
    "cut": _cut,
    "slow link": _slow,
    "kill process": _kill_process,
}


def inflict_on_nodes(job: NodesJob, faults: int, kinds: Sequence[str], chance: random.Random) -> Iterator[NodeFault]:
    """Start a job, and do faults to machines of it at random moments; whatever is lost is back after each."""
    begin = time.monotonic()
    for node in job.nodes:
        job.start(node)
    job.first_step(begin, job.world)
    decks = Decks(tuple(kinds), chance)
    for _ in range(faults):
        job.calm(chance.randrange(CALM_STEPS, 2 * CALM_STEPS))
        time.sleep(chance.random() * job.last_step())
        yield NODE_KINDS[decks.kind()](job, chance.choice(job.nodes))


def node_summary(faults: Sequence[NodeFault], job: Record) -> dict[str, Any]:
    """Sum up by kind of fault: p50 and p95 in seconds, finished steps done again, and what the job went on from."""
    ends = [*(fault.done for fault in faults), float("inf")][1:]
    rows = [{**asdict(fault), **_resumed(job, fault.done, end)} for fault, end in zip(faults, ends, strict=True)]
    made: dict[str, Any] = {"rows": rows, "kinds": {}, "bars": {}}
    for kind in (kind for kind in NODE_KINDS if any(row["kind"] == kind for row in rows)):
        chosen = [row for row in rows if row["kind"] == kind]
        made["kinds"][kind] = {
            "faults": len(chosen),
            "steps_lost": sum(row["steps_lost"] for row in chosen),
            "sources": Counter(source for row in chosen for source in row["sources"]),
            **{f"{name}_seconds": spread([row[name] for row in chosen]) for name in TIMES},
        }
    for (kind, name), bar in BARS.items():
        found = made["kinds"].get(kind, {}).get(f"{name}_seconds")
        if found:
            made["bars"][f"{kind}, {name}"] = {"bar": bar, "p95": found["p95"], "holds": found["p95"] < bar}
    return made


def _resumed(job: Record, begin: float, end: float) -> dict[str, Any]:
    """Return the finished steps that are done again after starts within a time, and what these went on from."""
    lost, last, sources = 0, 0, list[str]()
    for line in job.progress():
        if "resumed" in line and begin < line["seconds"] < end:
            lost, sources = lost + max(0, last - line["resumed"]), [*sources, line["source"]]
        last = line.get("finished", line.get("resumed", last))
    return {"steps_lost": lost, "sources": sources}


def print_node_table(made: dict[str, Any]) -> None:
    """Print p50 and p95 in milliseconds, and whether bars are kept."""
    worst = made["worst_difference"]
    print(f"FAILED: {made['failure']}" if made["failure"] else f"passed: parameters within {worst:.2g}")
    load = " to ".join(f"{value:.1f}" for value in made["load"])
    print(f"{made['faults']} faults in {made['steps']} steps; load average {load}")
    print(f"{'':14}{'faults':>7}" + "".join(f"{name:>15}" for name in TIMES) + f"{'steps lost':>12}   (ms, p50 / p95)")
    for kind, row in made["kinds"].items():
        texts = "".join(f"{spread_text(row[f'{name}_seconds']):>15}" for name in TIMES)
        print(f"{kind:14}{row['faults']:>7}{texts}{row['steps_lost']:>12}")
    for name, bar in made["bars"].items():
        print(f"{name}: p95 {bar['p95']:.2f} s, bar {bar['bar']:g} s: {'holds' if bar['holds'] else 'missed'}")
