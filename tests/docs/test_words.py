"""Pages and messages are in plain English: short sentences, no banned phrases, hints on lines of their own.

What is left is in words.toml, by page and by folder, and may only fall. HETU_FX_WRITE_DOCS=1 writes what has fallen.
"""

from __future__ import annotations

import os

import pytest

from tests.docs.banned import BANNED, found
from tests.docs.messages import messages
from tests.docs.prose import mean_words, sentences, words
from tests.docs.words import MEASURES, budget, lower


@pytest.mark.parametrize("name", MEASURES)
def test_numbers_of_pages_and_messages_only_fall(name: str) -> None:
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        lower()
    most = budget()[name]
    above = {
        where: (number, most.get(where, 0)) for where, number in MEASURES[name]().items() if number > most.get(where, 0)
    }
    assert above == {}, (
        "there are more than words.toml allows: write them in other words (tests/docs/banned.py has some)"
    )


def test_sentences_are_counted_without_code_tables_and_headings() -> None:
    page = "# One two\n\nOne `a b. c` [three](x.md). Four, in fp32. *Five*.\n\n| a | b |\n\n- six seven\n- eight\n"
    page += "\n```py\nnine ten\n```\n"
    assert [words(sentence) for sentence in sentences(page)] == [3, 3, 1, 2, 1]
    assert mean_words(page) == 2


def test_a_banned_phrase_is_found_as_words_and_not_in_code() -> None:
    assert found("The others stand\nin a row, besides; a standing order, `beside` and [x](beside.md).") == [
        "stand in",
        "besides",
    ]
    assert all(found(f"a {phrase} b") for phrase in ("way out", "unlike", "whatever they are", "as ever", "so many"))
    assert all(BANNED.values())


def test_messages_are_literals_with_a_few_words_and_no_docstrings() -> None:
    source = (
        'def f(a):\n    """What it does is said."""\n    raise E(f"{a} is not there; give " "another one", "key")\n'
    )
    assert messages(source) == [(3, "X is not there; give another one")]
