"""What the demo shows while it runs: a progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
import time
from typing import Any

EVERY = 4
"""Without a terminal, a line for so many steps."""


class Screen:
    """Where the demo tells what happens: in plain lines, or nothing, on all ranks but one."""

    def __init__(self, *, shows: bool = True) -> None:
        self.shows = shows
        self._began: float | None = None

    def head(self, text: str) -> None:
        """Begin a new part; say how long the one before took."""
        self.end()
        self._title(text)

    def say(self, text: str) -> None:
        """Say something, on one line or several."""
        self._print(text)

    def event(self, text: str) -> None:
        """Say that something has happened during training."""
        self._print(f"   >> {text}")

    def step(self, number: int, steps: int, loss: float, tokens_per_second: float, variant: str) -> None:
        """Show a step, numbered from 1, of so many."""
        self._step(number, steps, f"loss {loss:.4f}  {tokens_per_second:6.0f} tokens/s  {variant}")

    def finish(self) -> None:
        """End the progress bar, if there is one."""

    def end(self) -> None:
        """Say how long the part that ends now took; nothing if none had begun. The next one begins."""
        now, before = time.monotonic(), self._began
        self._began = now
        if before is not None:
            self._print(f"({now - before:.0f} s)", "dim")

    def _title(self, text: str) -> None:
        self._print(f"\n== {text}")

    def _step(self, number: int, steps: int, text: str) -> None:
        if number % EVERY == 0 or number == steps:
            self._print(f"   step {number:3}/{steps}  {text}")

    def _print(self, text: str, style: str = "") -> None:
        if self.shows:
            print(text, flush=True)


class Terminal(Screen):
    """Draws with rich: headings, and a progress bar that stays below what is said."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self.console = Console(highlight=False)
        self._progress: Any = None
        self._task: Any = None

    def event(self, text: str) -> None:
        self._print(f">> {text}", "yellow")

    def _step(self, number: int, steps: int, text: str) -> None:
        if self._progress is None:
            self._start(steps)
        self._progress.update(self._task, completed=number, shown=text)
        self._progress.refresh()

    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _title(self, text: str) -> None:
        self.console.print()
        self.console.rule(text, style="cyan", align="left")

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(text, markup=False, style=style, soft_wrap=True)

    def _start(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("{task.fields[shown]}", markup=False))
        # Refreshed by step: a thread that redraws would take its time from a device that has little.
        self._progress = Progress(*columns, console=self.console, auto_refresh=False)
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, shown="")


def make_screen(*, shows: bool = True) -> Screen:
    """Choose how to show: rich on a terminal where it is installed, else plain lines."""
    if not (shows and sys.stdout.isatty()):
        return Screen(shows=shows)
    try:
        return Terminal()
    except ImportError:
        return Screen()
