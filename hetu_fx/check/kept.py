"""What trials have found, kept for the next time: in this process, and in a small folder of the user's."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import hetu_fx.comm_ops
import hetu_fx.switching
import hetu_fx.transforms
from hetu_fx.base.documents import cache_folder, sources_digest
from hetu_fx.base.records import Document, record
from hetu_fx.errors import CheckError

MOST_FILES = 256
"""Answers that are kept: the oldest go first."""


_CODE = (hetu_fx, hetu_fx.comm_ops, hetu_fx.switching, hetu_fx.transforms)


@dataclass(frozen=True, slots=True)
class Answer(Document):
    """What a trial has found.

    Attributes:
        key: of the question: program, plan and versions.
        was_checked: whether it was tried; what differs is not kept.
        says: how, or why not.
    """

    key: str
    was_checked: bool
    says: str


Answer.form = record(Answer, CheckError, format="hetu_fx.check/1")


def question_key(parts: Iterable[str]) -> str:
    """Return the digest of a question: equal for equal parts where the same code runs."""
    return hashlib.sha256("\0".join([*parts, torch.__version__, code_digest()]).encode()).hexdigest()


def code_digest() -> str:
    """Return a digest of the sources of hetu_fx: what was right before a change need not be after it."""
    return sources_digest(*_CODE)


class KeptAnswers:
    """Answers by the key of their question; what is wrong with the folder costs time only, and is told in a warning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Answer] = {}

    def get(self, key: str) -> Answer | None:
        """Return the answer to a question that was asked before."""
        if key in self._known:
            return self._known[key]
        path = self._path(key)
        try:
            answer = Answer.read(path) if path.exists() else None
        except CheckError as problem:
            warnings.warn(f"trying the plan again: {problem}", stacklevel=2)
            return None
        return answer if answer is not None and answer.key == key else None

    def put(self, answer: Answer) -> None:
        """Keep an answer."""
        self._known[answer.key] = answer
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            answer.write(self._path(answer.key))
            self._drop_oldest()
        except OSError as failure:
            warnings.warn(f"that the plan was tried is not kept for the next time: {failure}", stacklevel=2)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _drop_oldest(self) -> None:
        ages = []
        for path in self.folder.glob("*.json"):
            with suppress(OSError):  # another process may have dropped it
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[: max(0, len(ages) - MOST_FILES)]:
            path.unlink(missing_ok=True)


def default_folder() -> Path:
    """Return where answers are kept for this user: $XDG_CACHE_HOME/hetu_fx/checks, or ~/.cache/hetu_fx/checks."""
    return cache_folder("checks")
