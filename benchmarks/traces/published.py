"""Plans of papers, with as many blocks and ranks as published, for a model of a small width that they train.

What makes a plan is kept: devices, groups, blocks of each stage, shares of rows, what is recomputed. Micro-batches are
fewer, as they say how often the same is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from transformers import BertConfig, BertForMaskedLM

import hetu_fx
from benchmarks.cases.planning import Case, cases, cluster, llama
from benchmarks.ladder_hetu_v2 import as_run, priced
from benchmarks.traces.hydraulis import hydraulis
from benchmarks.traces.trace import Named, Trace
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.plans.plan import Plan

MICRO_BATCHES = 2
WIDTH, HEADS = 16, 8
HETEROPP, HAP = "HeteroPP, 70B, 64 of 4 kinds", "BERT, 8 V100 and 21 P100"
KINDS = ("V100-32G", "H20-96G", "A100-80G", "H800-80G")
BERT_BLOCKS = 8
PUBLISHED_SECONDS = {"1: 32B, 32 H20 + 16 H800": 6.05}  # Hetu v2, section 6.2; those of the others are not printed
# HAP's 29 devices, by the machines that they stand in, and what one does a second there (its repository's run of BERT).
V100, P100 = "V100-16G", "P100-16G"
MACHINES = ((V100, 7), (V100, 1), (P100, 3), (P100, 8), (P100, 1), (P100, 6), (P100, 1), (P100, 2))
FLOPS = {V100: 3_858_755_112_937.0, P100: 2_149_250_936_815.0}


def traces() -> Iterator[Named]:
    """Yield them all."""
    yield from _hetu_v2()
    yield Named("H2", HETEROPP, _heteropp)
    yield Named("HAP", HAP, _hap)
    yield from hydraulis()


def _hetu_v2() -> Iterator[Named]:
    """Yield the 14 strategies of Hetu v2 (section 6.2 and appendix C)."""
    for case in cases(48):
        plan = case.published_plan
        if plan is not None:
            yield Named("Hetu v2", case.name, partial(_as_published, case, plan))


def _as_published(case: Case, plan: Plan) -> Trace:
    seconds, published = priced(plan, as_run(case)), PUBLISHED_SECONDS.get(case.name)
    return Trace("Hetu v2", case.name, (small(plan),), blocks_of(case), WIDTH, HEADS, seconds, published)


def blocks_of(case: Case) -> int:
    """Return how many blocks the model of a case has."""
    return case.profile.costs.num_blocks


def _heteropp() -> Trace:
    """Return H2's HeteroPP, as HeteroAuto finds it for a model that asks for the memory of all devices."""
    case = Case(HETEROPP, cluster(dict.fromkeys(KINDS, 16)), llama(80, 8192, 28672, 256))
    plan = make_plan(case.profile, case.cluster, search="heteroauto")
    seconds = plan.predicted.seconds if plan.predicted else None
    return Trace("H2", HETEROPP, (small(plan),), blocks_of(case), WIDTH, HEADS, seconds)


def _hap() -> Trace:
    """Return what HAP finds for its BERT (8 layers, 32 sequences of 128 tokens a device), as the nearest plan says."""
    config = BertConfig(vocab_size=33280, num_hidden_layers=BERT_BLOCKS)  # of width 768, with 12 heads
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    ids = torch.ones(32 * sum(count for _, count in MACHINES), 128, dtype=torch.int64)
    plan = hetu_fx.plan(model, {"input_ids": ids, "labels": ids.clone()}, cluster=hap_cluster(), search="hap")
    seconds = plan.predicted.seconds if plan.predicted else None
    return Trace("HAP", HAP, (small(plan),), BERT_BLOCKS, WIDTH, HEADS, seconds)


def hap_cluster() -> Cluster:
    """Return HAP's cluster: 8 V100 on two machines and 21 P100 on six, as fast as its authors measured them."""
    devices = [
        {"kind": kind, "node": str(node), "flops_per_second": FLOPS[kind], "memory_bytes": 16_000_000_000}
        for node, (kind, count) in enumerate(MACHINES)
        for _ in range(count)
    ]
    intra = {"bytes_per_second": 1e10, "latency_seconds": 1e-5}
    links = {"intra": intra, "inter": {"bytes_per_second": 10.4e9 / 8, "latency_seconds": 5e-5}}
    numbered = [{"rank": rank, **device} for rank, device in enumerate(devices)]
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": numbered, "links": links})


def small(plan: Plan) -> Plan:
    """Return a plan with no more micro-batches than show that there are several."""
    fewer = (replace(p, micro_batches=min(p.micro_batches, MICRO_BATCHES)) for p in plan.pipelines)
    return replace(plan, pipelines=tuple(fewer), predicted=None, name=None)
