"""The smallest case of a benchmark (`--smoke`): that it runs, in seconds, as tests want to know. It measures nothing.

What is small is said here, once for all: benchmarks build their models, batches, rounds and processes by this kit. Then
models are narrow, sequences short and rounds few; ranks are forks of this process, at no speed but the machine's own;
and bars are told, but do not decide. All else runs as ever.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = "HETU_FX_BENCHMARK_SMOKE"
HEAD_WIDTH, TOKENS, ROUNDS, SECONDS = 8, 16, 2, 0.02


def is_smallest() -> bool:
    """Tell whether this process, or the one that started it, was asked for the smallest case."""
    return VARIABLE in os.environ


def least(value: int, at_most: int) -> int:
    """Return a number, or so many at most in the smallest case."""
    return min(value, at_most) if is_smallest() else value


def few(items: Iterable[T], count: int = 1) -> list[T]:
    """Return items, or the first of them in the smallest case."""
    return list(items)[: count if is_smallest() else None]


def compiler() -> str:
    """Return the name of what compiles graphs; in the smallest case they are traced for it, and run as they are."""
    return "aot_eager" if is_smallest() else "inductor"


class Smoke(argparse.Action):
    """The option that asks for it: a quick run of everything that a quick run does, as small as it can be."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="the smallest run of the same thing; measures nothing")

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Remember it in the environment, for all that this process starts."""
        os.environ[VARIABLE] = "1"
        namespace.quick = True
