"""Environments of their own, and what the package index has for them. Standard library only: runs before any set-up."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
NOTHING_FOUND = ("No matching distribution found", "ResolutionImpossible")
"""What pip says where the index, or a constraint of this machine, allows no version."""
BRINGS_CUDA = ("nvidia-", "cuda-")
"""How names of packages begin that make a torch of a few hundred megabytes one of several gigabytes."""
TREE = "tree"
"""What setuptools writes into this repository, under which name it is held."""
KEEPS_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Nothing is compiled as it is installed: what is imported is, then, and kept."""
TO_TEST = ("pytest", "pytest-timeout", "hypothesis", "expecttest")


class NotInIndexError(Exception):
    """The index has no such package, or a constraint forbids it."""


@contextmanager
def held(name: str) -> Iterator[None]:
    """Keep other processes of this repository from what has a name, meanwhile."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path, cwd: Path = ROOT, seconds: float = 1800, **environment: str) -> str:
    """Run a command; return what it printed. Raises CalledProcessError, after its errors have been shown."""
    names = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **KEEPS_COMPILED, **environment}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=names, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        if any(said in done.stderr for said in NOTHING_FOUND):
            raise NotInIndexError("the index has no version that is asked for and that pip's constraints allow")
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `build/`."""

    folder: Path

    @classmethod
    def at(cls, name: str, *, clear: bool = False) -> Environment:
        """Make one, or take the one that is there; two that ask for one at a time get the same."""
        made = cls(BUILD / name)
        with held(name):
            if clear or not made.python.exists():
                venv.create(made.folder, with_pip=True, clear=True)
                made.install("--upgrade", "pip")
        return made

    @property
    def python(self) -> Path:
        """Return the interpreter."""
        return self.folder / "bin" / "python"

    def install(self, *words: str) -> None:
        """Install packages, given as words for pip."""
        run(self.python, "-m", "pip", "install", "--quiet", "--no-compile", *words)

    def resolve(self, *words: str) -> list[dict[str, Any]]:
        """Return the metadata of what pip would install. Raises NotInIndexError if there is no such package."""
        report = run(self.python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *words)
        return [one["metadata"] for one in json.loads(report)["install"]]

    def pytest(self, *words: str | Path, cwd: Path = ROOT) -> int:
        """Run tests, which print to this process's output; return their status."""
        command = [self.python.with_name("pytest"), "-q", "-p", "no:cacheprovider", "--timeout", "300", *words]
        settings = {**KEEPS_COMPILED, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            list(map(str, command)), cwd=cwd, env={**os.environ, **settings}, check=False, timeout=1800
        ).returncode


@dataclass(frozen=True)
class Torch:
    """One torch of the index."""

    version: str
    brings: Sequence[str]

    @classmethod
    def find(cls, requirement: str, asking: Environment) -> Torch:
        """Return the one that pip would install for a requirement, which may have options such as --index-url."""
        (found,) = asking.resolve("--ignore-installed", "--no-deps", *shlex.split(requirement))
        needs = found.get("requires_dist", []) if sys.platform == "linux" else []  # elsewhere no torch has CUDA
        return cls(found["version"], [line for line in needs if line.startswith(BRINGS_CUDA)])
