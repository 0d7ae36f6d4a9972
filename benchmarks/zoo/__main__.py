"""What hetu_fx makes of models that others have published, trained as they are.

Each is a small model of a library, whose code nobody has written with hetu_fx in mind. Plain PyTorch trains it on one
device; then it is captured and trained under each plan, as all ranks of one process. What is refused is counted by its
reason. Libraries come by the extra `zoo`; what is not installed is left out, and the table says so. `--way` tries a
selection by processes, and compiled (`beyond`).
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from benchmarks.families import page
from benchmarks.families.family import Family
from benchmarks.families.trials import (
    CRASH,
    NOT_PLAIN,
    REFUSED,
    RIGHT,
    WRONG,
    Row,
    Verdict,
    counted,
    parser,
    row_of,
    tried,
    verdict,
)
from benchmarks.kit import report
from benchmarks.kit.smallest import is_smallest
from benchmarks.zoo import beyond
from benchmarks.zoo.libraries import LIBRARIES

PLANS = ("DP 3:1", "TP2", "TP2 + TP1", "PP2")
SHARE = 0.95
QUICK = ("timm: test_vit", "diffusers: PriorTransformer", "PyG: DenseGCNConv", "metric losses: TripletMarginLoss")
SMALLEST = "diffusers: PriorTransformer"


def main() -> int:
    """Print the table and the reasons; the exit status says whether enough cells are right, and none is wrong."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.way:
        return beyond.finish(options)
    families, plans = chosen(options), tuple(options.plan or PLANS)
    found = tried(families, plans, options)
    verdicts = [verdict(family, found[family.name], plan) for family in families for plan in plans]
    rows = [*(row_of(family, found[family.name], plans) for family in families), *absent(plans)]
    for kind, counts in reasons(verdicts).items():
        print(*(f"{count:4} {kind}: {reason}" for reason, count in counts.most_common()), sep="\n")
    if options.write_docs:
        page.write_published(_section(rows, verdicts, plans))
    return report.finish("zoo", bars(verdicts), rows)


def _options() -> argparse.Namespace:
    made = parser("zoo", "Train models of published libraries under plans and compare them with one device.")
    made.add_argument("--shard", default="1/1", metavar="I/N", help="only the I-th of N parts of the models, I from 1")
    made.add_argument(
        "--way",
        action="append",
        default=[],
        choices=list(beyond.TITLES),
        help="a selection by two processes over gloo, or compiled, each model under one plan; may be repeated",
    )
    made.add_argument("--write-docs", action="store_true", help="write its part of docs/coverage.md")
    return made.parse_args()


def chosen(options: argparse.Namespace) -> list[Family]:
    """Return the models that are asked for, of the libraries that are installed."""
    patterns = options.only or ((SMALLEST,) if is_smallest() else QUICK if options.quick else ("*",))
    named = [
        name for name in LIBRARIES if any(fnmatchcase(f"{name}:", f"{each.partition(':')[0]}:") for each in patterns)
    ]
    families = [family for name in named if not LIBRARIES[name].missing for family in LIBRARIES[name].made()]
    families = [family for family in families if any(fnmatchcase(family.name, pattern) for pattern in patterns)]
    number, _, count = options.shard.partition("/")
    return families[int(number) - 1 :: int(count)]


def bars(verdicts: Sequence[Verdict]) -> list[report.Bar]:
    """Say how many cells are wrong or crash, and which share of those that train plainly is right."""
    count = Counter(each.kind for each in verdicts)
    plain = len(verdicts) - count[NOT_PLAIN]
    return [
        report.Bar("wrong cells", count[WRONG], 0, at_least=False),
        report.Bar("cells that crash", count[CRASH], 0, at_least=False),
        report.Bar("share of right cells", count[RIGHT] / max(plain, 1), SHARE, at_least=True),
    ]


def reasons(verdicts: Sequence[Verdict]) -> Mapping[str, Counter[str]]:
    """Count why cells are not right, by what they came to."""
    return {
        kind: counted([each.reason for each in verdicts if each.kind == kind])
        for kind in (WRONG, CRASH, REFUSED, NOT_PLAIN)
    }


def absent(plans: Sequence[str]) -> list[Row]:
    """Make a row for each library that is not installed."""
    missing = {name: library.missing for name, library in LIBRARIES.items() if library.missing}
    empty = dict.fromkeys(("kind", "captured", "rules", *plans), "")
    return [
        {"family": name, **empty, "reason": f"not installed: {', '.join(modules)}"} for name, modules in missing.items()
    ]


def _section(rows: Sequence[Row], verdicts: Sequence[Verdict], plans: Sequence[str]) -> str:
    """Lay the table out as a part of the page."""
    count = Counter(each.kind for each in verdicts)
    versions = [f"{library.distribution} {library.version}" for library in LIBRARIES.values() if not library.missing]
    refused = reasons(verdicts)[REFUSED].most_common()
    return "\n".join(
        [
            f"Written by `python -m benchmarks.zoo --write-docs` with {', '.join(versions)}.",
            f"Of {len(verdicts)} cells "
            + ", ".join(f"{number} are {kind}" for kind, number in count.most_common())
            + ".",
            "",
            "Each is a small, unmodified model of a library, without dropout. Plans and numbers are as above.",
            "",
            page.markdown(["family", *plans, "reason"], rows),
            "",
            *(["### What is refused, by reason", ""] if refused else []),
            *(f"- {number} cells: {reason}" for reason, number in refused),
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
