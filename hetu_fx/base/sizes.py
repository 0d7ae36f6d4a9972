"""Numbers of bytes as people write them."""

from __future__ import annotations

import re


def size_parts(text: str, kilo: int) -> tuple[str, int] | None:
    """Return the number of a size such as "2G", "512 MB" or "3GiB", as it is written, and what it counts in bytes.

    K, M, G and T count by `kilo`, 1000 or 1024; Ki, Mi, Gi and Ti by 1024. None for what is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(?:([KMGT])(i?))?B?\s*", text, flags=re.IGNORECASE)
    if match is None:
        return None
    return match[1], (1024 if match[3] else kilo) ** (" KMGT".index((match[2] or " ").upper()))
