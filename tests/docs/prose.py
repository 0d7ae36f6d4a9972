"""The sentences of a page, as a reader meets them: without code, tables, headings and markup."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]+`")
_APART = re.compile(r" *(?:\||#|:::|===|!\[|--- *$|<)")
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")
_ABBREVIATED = re.compile(r"\b(e\.g|i\.e|vs|etc|cf|Fig|No)\.\s")


def sentences(page: str) -> list[str]:
    """Return the sentences of a page in Markdown; an item of a list and a paragraph each end one."""
    return [sentence for block in _blocks(_FENCED.sub("\n", page)) for sentence in _split(block)]


def words(sentence: str) -> int:
    """Return how many words a sentence has; a span of code and a number are one each."""
    return sum(any(letter.isalnum() for letter in word) for word in _CODE.sub("code", sentence).split())


def mean_words(page: str) -> float:
    """Return the mean number of words of a page's sentences; 0 where it has none."""
    found = [count for count in map(words, sentences(page)) if count]
    return sum(found) / len(found) if found else 0.0


def _blocks(text: str) -> Iterator[str]:
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or _APART.match(line) or _ITEM.match(line):
            yield " ".join(block)
            block = []
        if line.strip() and not _APART.match(line):
            block.append(_ITEM.sub("", line, count=1).strip())


def _split(block: str) -> list[str]:
    bare = _ABBREVIATED.sub(r"\1 ", _CODE.sub("`code`", _LINK.sub(r"\1", block)))
    return [sentence for sentence in _END.split(bare) if sentence.strip()]
