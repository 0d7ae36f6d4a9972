"""What grows with the number of ranks, in counts: hops, bytes, sockets, requests to the store; and planning for 4,096.

`tree`: how a step is agreed on, on paper, by 2 to 4,096 ranks on nodes of 8, and what that takes the host. `processes`:
real processes that pretend to stand on nodes of 4, which agree over a group of hetu_fx's own; if a script makes its
group itself, there are twice as many sockets. `plan`: devices of 4 kinds on nodes of 8, for which a decoder of 80
blocks is captured, planned and deduced, and one rank specialized.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from math import log2
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cases.planning import cluster
from benchmarks.kit.forks import Tell, in_forks
from benchmarks.kit.report import Bar, Part, Row, finish, parser
from benchmarks.kit.smallest import few, least
from hetu_fx.comm_ops.plans.sum_tree import sum_tree
from hetu_fx.comm_ops.wire import consensus, small_sums
from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree
from hetu_fx.comm_ops.wire.groups import GroupTable, watched_group
from hetu_fx.comm_ops.wire.process_group import create_world
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import deduce_program
from hetu_fx.transforms.passes import run_pass
from hetu_fx.transforms.specialize.specialize import Specialize

PER_NODE, PER_EMULATED_NODE = 8, 4
RANKS = (2, 8, 32, 128, 512, 1024, 2048, 3000, 4096)
PROCESSES = (2, 4, 8)
KINDS = ("V100-32G", "H20-96G", "A100-80G", "H800-80G")
MOST_BYTES, MOST_HOST_MS, MOST_REQUESTS = 512, 1.0, 4.0
MOST_SECONDS, MOST_GIB = 60.0, 1.0
STEPS, WATCHED_SECONDS, PROCESS_SECONDS = 20, 6.0, 300.0
FACTS = LocalFacts(4, "training", (512,), ("dim 1 of input 'x'",), 512, (2048.0,))
REQUESTS = ("set", "get", "check", "compare_set", "add", "wait")


def main() -> int:
    """Count and judge."""
    made = parser("scale", "What grows with the number of ranks, in counts.")
    made.add_argument("--part", choices=[*PARTS], action="append", help="one of what is counted (default: all)")
    made.add_argument(
        "--processes", type=int, nargs="+", default=PROCESSES, help="how many real ones, up to 24 (default: 2 4 8)"
    )
    made.add_argument("--blocks", type=int, default=80, help="of the decoder that is planned (default: %(default)s)")
    options = made.parse_args()
    found = [PARTS[name](options) for name in options.part or PARTS]
    bars, rows = ([one for part in found for one in part[side]] for side in (0, 1))
    return finish("scale", bars, rows)


def tree_part(_: Namespace) -> Part:
    """Count the hops and messages of the agreement on paper; time the host's share of it."""
    rows = [tree_row(count) for count in RANKS]
    hops = max(float(str(row["hops"])) - float(str(row["hops allowed"])) for row in rows)
    sockets = max(float(str(row["tree sockets"])) / float(str(row["sockets allowed"])) for row in rows)
    size, millis = message_bytes(), host_millis(RANKS[-1], least(200, 5))
    bars = [
        Bar("hops over 2 + log2(nodes), at most", hops, 0.0, at_least=False),
        Bar("bytes of a message of the agreement", size, MOST_BYTES, at_least=False),
        Bar("sockets that the tree needs, over 3 x (ranks of a node + log2 nodes)", sockets, 1.0, at_least=False),
        Bar(f"host ms of the agreement of {RANKS[-1]} ranks", millis, MOST_HOST_MS, at_least=False),
    ]
    return bars, rows


def tree_row(count: int) -> Row:
    """Return what the tree of so many ranks comes to."""
    tree, num_nodes = sum_tree([rank // PER_NODE for rank in range(count)]), -(-count // PER_NODE)
    steps = [tree.steps(head) for head in tree.heads]
    return {
        "part": "tree",
        "ranks": count,
        "hops": tree.hops,
        "hops allowed": 2 + log2(num_nodes),
        "tree sockets": max(len(one.members) + len(one.partners) for one in steps),
        "sockets allowed": 3 * (PER_NODE + log2(num_nodes)),
    }


def message_bytes() -> int:
    """Return the bytes of what a rank sends, as it is sent."""
    sent = []
    steady, row = steady_of(2)

    def sum_alone(sums: list[float], largest: list[float], *_: object) -> tuple[list[float], list[float]]:
        sent.append(torch.tensor([*sums, *largest], dtype=torch.float64).nbytes)
        return [0.0, 0.0, *sums[2:]], largest

    with patch.object(consensus, "sum_by_tree", sum_alone):
        steady.agree(GroupTable.dry(0, 2), FACTS, row)
    return sent[0]


def host_millis(count: int, repetitions: int) -> float:
    """Return the milliseconds of the processor for one agreement, without messages; sizes change every other time."""
    table, seconds = GroupTable.dry(0, count), []
    others = LocalFacts(4, "training", (640,), FACTS.size_names, 640, (2560.0,))

    def sum_alone(sums: list[float], largest: list[float], *_: object) -> tuple[list[float], list[float]]:
        return [0.0, count * sums[1], *(count * number for number in sums[2:])], largest

    steady, _ = steady_of(count)
    with patch.object(consensus, "sum_by_tree", sum_alone):
        for number in range(repetitions):
            steady.count = 0
            facts = (FACTS, others)[number // 2 % 2]
            start = time.process_time()
            found = steady.agree(table, facts, consensus._encode(facts, {"compute_seconds": 0.1}))
            seconds.append(time.process_time() - start)
            assert found is not None
            assert len(found.sizes_of) == count
    return 1e3 * statistics.fmean(seconds)


def steady_of(count: int) -> tuple[consensus._Steady, consensus.Numbers]:
    """Return what rank 0 of so many ranks holds after they have gathered."""
    row = consensus._encode(FACTS, {"compute_seconds": 0.1})
    nodes = [rank // PER_NODE for rank in range(count)]
    steady = consensus._Steady(sum_tree(nodes).steps(0))
    ranks = [row[consensus._FIRST_FACT : consensus._FIRST_SIZE]] * count
    agreed: StepFacts = consensus._combined(ranks, FACTS.counts, (FACTS.sizes,) * count)
    steady.know(agreed, FACTS, row)
    return steady, row


def processes_part(options: Namespace) -> Part:
    """Let real processes agree; count what each of them opens and asks."""
    rows, bars = [processes_row(count) for count in few(options.processes)], []
    for row in rows:
        count, requests = row["ranks"], float(str(row["store requests a second"]))
        sockets, allowed = (float(str(row[name])) for name in ("sockets", "sockets allowed"))
        bars.append(Bar(f"sockets of a rank of {count}", sockets, allowed, at_least=False))
        bars.append(Bar(f"store requests a second of a rank of {count}", requests, MOST_REQUESTS, at_least=False))
    return bars, rows


def processes_row(count: int) -> Row:
    """Return what so many processes come to; figures are those of the rank that has most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = [(rank, count, port) for rank in range(count)]
    told = [heard[0] for _, heard in in_forks(jobs, rank_work, count, PROCESS_SECONDS)]
    nodes = -(-count // PER_EMULATED_NODE)
    return {
        "part": "processes",
        "ranks": count,
        "sockets": max(one["sockets"] for one in told if not one["serves"]),
        "sockets allowed": 3 * (min(count, PER_EMULATED_NODE) + log2(nodes)),
        "messages a step": max(one["messages"] for one in told) / STEPS,
        "bytes a message": max(one["bytes"] for one in told),
        "store requests a second": max(one["requests"] for one in told) / WATCHED_SECONDS,
    }


def rank_work(job: tuple[int, int, int], tell: Tell) -> None:
    """Be one rank: agree on steps by the tree, then let others be watched for a while."""
    rank, count, port = job
    torch.set_num_threads(1)
    os.environ["HETU_FX_NODE"] = f"node {rank // PER_EMULATED_NODE}"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    create_world("gloo", rank, count)
    found, sizes = Counter[str](), set[int]()
    with patch.object(consensus, "TREE_RANKS", 2), counted_messages(found, sizes):
        table = GroupTable(watched_group(None, 60.0))
        agree(table, FACTS)
        found.clear()
        with counted_requests(found):
            for _ in range(STEPS):
                agree(table, FACTS)
            time.sleep(least(WATCHED_SECONDS, 1))
    counts = {"messages": found["messages"], "requests": found["requests"], "bytes": max(sizes)}
    tell(counts | {"sockets": num_sockets(), "serves": rank == 0})  # the store, which a launcher does otherwise
    agree(table, FACTS)


def counted_messages(found: Counter[str], sizes: set[int]) -> Any:
    """Count the messages of sums, and their sizes."""

    def post(receives: Any, sends: Any, table: GroupTable) -> Any:
        found["messages"] += len(sends)
        sizes.update(tensor.nbytes for _, tensor, _ in (*receives, *sends))
        return posted(receives, sends, table)

    posted = small_sums.post
    return patch.object(small_sums, "post", post)


def counted_requests(found: Counter[str]) -> Any:
    """Count what a rank asks the store, in whatever thread."""

    def counting(name: str) -> Callable[..., Any]:
        asked = getattr(dist.PrefixStore, name)

        def ask(*arguments: Any) -> Any:
            found["requests"] += 1
            return asked(*arguments)

        return ask

    return patch.multiple(dist.PrefixStore, **{name: counting(name) for name in REQUESTS})


def num_sockets() -> int:
    """Return how many sockets this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        place = Path("/proc/self/fd") / entry
        count += place.is_symlink() and os.readlink(place).startswith("socket:")
    return count


def plan_part(options: Namespace) -> Part:
    """Capture and plan a decoder of Llama-70B's width for 4,096 devices of four kinds, and specialize one rank."""
    each, blocks = (1024, options.blocks) if not options.quick else (64, 4)
    row = in_one_fork(least(each, 8), least(blocks, 2))
    seconds = sum(float(str(row[name])) for name in ("capture s", "plan s", "deduce s", "specialize s"))
    bars = [
        Bar(f"seconds for {row['ranks']} devices of 4 kinds, {row['blocks']} blocks", seconds, MOST_SECONDS, False),
        Bar("GiB at their peak", float(str(row["peak GiB"])), MOST_GIB, False),
    ]
    return bars, [row]


def in_one_fork(each: int, blocks: int) -> Row:
    """Return what planning comes to in a process of its own, whose memory is its own."""
    ((_, heard),) = in_forks([(each, blocks)], plan_work, 1, 1800.0)
    row: Row = heard[0]
    return row


def plan_work(job: tuple[int, int], tell: Tell) -> None:
    """Plan; seconds are those of the processor."""
    each, blocks = job
    devices = cluster(dict.fromkeys(KINDS, each), per_node=PER_NODE)
    took: dict[str, float] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = act()
        took[f"{name} s"] = time.process_time() - start
        return made

    with torch.device("meta"):
        model, ids = decoder(blocks), torch.zeros(4096, least(4096, 64), dtype=torch.int64)
    programs = Programs(model, None, row_dims=AskedRowDims({}))
    captured = timed("capture", lambda: CapturedProgram.of(programs, {"input_ids": ids, "labels": ids.clone()}))
    plan = timed("plan", lambda: captured.at(captured.costs()).plan(devices, "auto"))
    deduced = timed("deduce", lambda: deduce_program(captured.program, plan, wants_values=False))
    timed("specialize", lambda: run_pass(Specialize(plan.devices[0]), deduced))
    peak = getrusage(RUSAGE_SELF).ru_maxrss / (1 << 20)
    tell({"part": "plan", "ranks": 4 * each, "blocks": blocks, **took, "peak GiB": peak})


def decoder(blocks: int) -> LlamaForCausalLM:
    """Return a decoder as wide as Llama-70B."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=blocks,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16().train()


PARTS: Mapping[str, Callable[[Namespace], Part]] = {"tree": tree_part, "processes": processes_part, "plan": plan_part}

if __name__ == "__main__":
    sys.exit(main())
