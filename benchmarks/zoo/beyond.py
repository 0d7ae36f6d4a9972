"""A selection of the models beyond ranks of one process: by two processes over gloo, and compiled by inductor.

Each is tried under one plan. The selection has models of all libraries; among them are nets with batch norm, a U-Net,
an LSTM, attention, graphs, complex numbers, losses over pairs of rows, and leaves.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from benchmarks.families import page
from benchmarks.families.cells import AS_RANKS
from benchmarks.families.family import Family
from benchmarks.families.processes import SILENCE, WORLD, try_as_processes
from benchmarks.families.trials import CRASH, WRONG, Heard, Row, Verdict, Way, in_lockstep, shortened, tried, verdict
from benchmarks.kit import report
from benchmarks.kit.smallest import compiler, is_smallest
from benchmarks.zoo.libraries import LIBRARIES

SELECTION: Mapping[str, str] = {
    "timm: test_vit": "DP 3:1",
    "timm: test_resnet": "DP 3:1",
    "timm: sequencer.Sequencer2d": "TP2",
    "torchvision: vit": "PP2",
    "torchvision: swin": "TP2",
    "diffusers: DiTTransformer2DModel": "DP 3:1",
    "diffusers: PriorTransformer": "TP2",
    "segmentation_models: Unet": "DP 3:1",
    "segmentation_models: DiceLoss": "DP 3:1",
    "monai: BasicUNet": "PP2",
    "monai: ViT": "TP2",
    "monai: HausdorffDTLoss": "DP 3:1",
    "x-transformers: rotary_pos_emb": "TP2",
    "x-transformers: attn_kv_heads": "PP2",
    "neuraloperator: FNO": "DP 3:1",
    "neuraloperator: TFNO": "TP2",
    "PyG: DenseGATConv": "DP 3:1",
    "PyG: DenseSAGEConv": "PP2",
    "metric losses: ContrastiveLoss": "DP 3:1",
    "metric losses: ArcFaceLoss": "DP 3:1",
}
"""Models, and the plan of each: for two ranks, as there are two processes."""

QUICK = ("timm: test_vit", "diffusers: PriorTransformer", "PyG: DenseSAGEConv")
SMALLEST = "diffusers: PriorTransformer"
PROCESSES, COMPILED = "processes", "inductor"
TITLES = {PROCESSES: "two processes", COMPILED: "inductor"}
DESCRIPTIONS = {
    PROCESSES: "Two processes over gloo bring 5 and 3 of 8 rows.",
    COMPILED: "Inductor compiles for ranks of one process.",
}


def ways() -> Mapping[str, Way]:
    """Return the ways, by name."""
    compiled = in_lockstep(replace(AS_RANKS, backend=compiler()))
    return {PROCESSES: Way(PROCESSES, try_as_processes, WORLD, SILENCE), COMPILED: Way(COMPILED, compiled)}


def finish(options: argparse.Namespace) -> int:
    """Try the selection in the ways that are asked for; the exit status says whether none is wrong or crashes."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others are tried at the same time
    families = chosen(options)
    found = {way: _tried(families, ways()[way], options) for way in options.way}
    verdicts = {
        way: {family.name: verdict(family, heard[family.name], SELECTION[family.name]) for family in families}
        for way, heard in found.items()
    }
    rows = [_row(family, {way: told[family.name] for way, told in verdicts.items()}) for family in families]
    if options.write_docs:
        page.write_beyond(_section(rows, options.way))
    return report.finish("zoo", bars([each for told in verdicts.values() for each in told.values()]), rows)


def chosen(options: argparse.Namespace) -> list[Family]:
    """Return the models of the selection that are asked for, of the libraries that are installed."""
    patterns = options.only or ((SMALLEST,) if is_smallest() else QUICK if options.quick else ("*",))
    planned = [name for name, plan in SELECTION.items() if plan in (options.plan or (plan,))]
    names = [name for name in planned if any(fnmatchcase(name, pattern) for pattern in patterns)]
    libraries = [LIBRARIES[name] for name in dict.fromkeys(name.partition(":")[0] for name in names)]
    by_name = {family.name: family for library in libraries if not library.missing for family in library.made()}
    number, _, count = options.shard.partition("/")
    return [by_name[name] for name in names if name in by_name][int(number) - 1 :: int(count)]


def bars(verdicts: Sequence[Verdict]) -> list[report.Bar]:
    """Say how many are wrong, and how many crash."""
    kinds = [each.kind for each in verdicts]
    return [
        report.Bar("wrong cells", kinds.count(WRONG), 0, at_least=False),
        report.Bar("cells that crash", kinds.count(CRASH), 0, at_least=False),
    ]


def _tried(families: Sequence[Family], way: Way, options: argparse.Namespace) -> dict[str, Heard]:
    found: dict[str, Heard] = {}
    for plan in dict.fromkeys(SELECTION[family.name] for family in families):
        found |= tried([family for family in families if SELECTION[family.name] == plan], (plan,), options, way)
    return found


def _row(family: Family, verdicts: Mapping[str, Verdict]) -> Row:
    reasons = [f"{TITLES[way]}: {each.reason}" for way, each in verdicts.items() if each.reason]
    marks = {TITLES[way]: each.mark for way, each in verdicts.items()}
    return {"family": family.name, "plan": SELECTION[family.name], **marks, "reason": shortened("; ".join(reasons))}


def _section(rows: Sequence[Row], found: Sequence[str]) -> str:
    """Lay the table out as a part of the page."""
    asked = " ".join(f"--way {way}" for way in found)
    return "\n".join(
        [
            f"Written by `python -m benchmarks.zoo {asked} --write-docs`. Each model runs under one plan.",
            " ".join(DESCRIPTIONS[way] for way in found),
            "",
            page.markdown(["family", "plan", *(TITLES[way] for way in found), "reason"], rows),
            "",
        ]
    )
