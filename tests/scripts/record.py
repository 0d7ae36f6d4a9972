"""Verdicts in a file, a line each as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.scripts.script import Script
from tests.scripts.verdict import Kind, Verdict

Key = tuple[str, str]
"""The names of a script and of a setting."""


def read(path: Path | None) -> Mapping[Key, Verdict]:
    """Return what a file holds; nothing where there is none. The newest verdict counts."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {(x["script"], x["setting"]): _verdict(x) for x in lines}


def _verdict(line: Mapping[str, Any]) -> Verdict:
    return Verdict(Kind(line["verdict"]), line["why"], line["seconds"], line["differences"])


def write(path: Path | None, script: Script, setting: str, verdict: Verdict) -> None:
    """Add a verdict to a file."""
    if path is None:
        return
    line = {"script": script.name, "setting": setting, **asdict(verdict), "verdict": verdict.kind.value}
    del line["kind"]
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
