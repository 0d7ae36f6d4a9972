"""The command `hetu-fx exported`: what is in an export, whether it is whole, and whether it is stale."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hetu_fx.cli.given import load_function


def add_exported_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx exported`."""
    parser.add_argument("folder", type=Path, help="what model.hetu.export wrote")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="tell whether this plan is one of the exported")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="tell whether the model that this makes has changed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_exported(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx exported`; the status is 1 where files are damaged or the export is stale."""
    import torch

    from hetu_fx.export.load import check_exported
    from hetu_fx.plans.plan import Plan

    plan = None if options.plan is None else Plan.read(options.plan)
    make = None if options.model is None else load_function(options.model)
    with torch.device("meta"):  # so that it takes no memory
        model = None if make is None else make()
    found = check_exported(options.folder, model=model, plan=plan)
    print(json.dumps(found.to_json(), indent=2) if options.json else found.explain())
    return 0 if found.is_good else 1
