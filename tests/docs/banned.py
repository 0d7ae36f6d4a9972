"""Phrases that pages and messages do without, each with what to write instead."""

from __future__ import annotations

import re

BANNED = {
    r"(?:is|are|was|were|be|been|unless|if) told": "the log, the warning or the error says",
    r"(?:is|are) (?:said|meant) (?:where|by|in|so|plainly|of)": "name who says it, and where",
    r"way out": "a line of its own: hint: ...",
    r"digit for digit|to the last digit": "up to rounding; bit for bit",
    r"whoever": "code that ..., a rank that ...",
    r"whatever (?:they|those|these|it|that|he|the others?) (?:is|are|do|does|was|were|has|have|says?)": "any; always",
    r"(?:go|goes|going|gone|went) on(?: from| by| as| with)?": "resume, continue, keep running",
    r"(?:stands?|standing|stood) (?:in|at|on|there|beside|behind|before|below|above|for)": "is in, precedes, means",
    r"beside": "next to, alongside, in addition to",
    r"besides": "in addition, other than",
    r"so many|as many as there are": "n, the given number of, one per",
    r"so much (?:more|later|longer)": "the number, or by how much",
    r"what is more": "anything above",
    r"unlike": "different, of different sizes",
    r"alike": "equal, the same",
    r"of which": "a sentence of its own",
    r"at once": "immediately, at the same time",
    r"in silence": "silently, without a warning",
    r"as ever": "as before, unchanged",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix",
    r"nobody|anybody": "no rank, no device, no user",
    r"(?:now and then|for good|next to nothing|of old|of before)": "how often, permanently, a number",
    r"under way": "in flight",
    r"put by": "kept, deferred",
    r"shall": "must, should, will",
    r"(?:the former|the latter)": "the noun",
    r"(?:let|lets|letting) go of": "drop, free",
    r"there and then": "immediately",
    r"(?:hears?|heard)": "receives",
    r"all the same": "still, anyway",
    r"but for": "except",
    r"cotangents?": "gradient",
    r"go(?:es)? round": "rotate, circulate",
}
"""Patterns of phrases, without word boundaries, and what to write instead."""

_ANY = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in BANNED), re.IGNORECASE)
_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def found(text: str) -> list[str]:
    """Return the banned phrases of a text, in order; what is code is left out, and so are addresses of links."""
    return [match[0].lower() for match in _ANY.finditer(re.sub(r"\s+", " ", _CODE.sub(" ", text)))]
