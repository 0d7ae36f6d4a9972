"""Shares in whole numbers, as HAP's released code rounds them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rounded(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """Return whole shares of `total` near the ratios: floors, then one more for the largest remainders.

    Equal remainders go to the last device; a share may be 0.
    """
    shares = [math.floor(ratio * total) for ratio in ratios]
    order = sorted(range(len(shares)), key=lambda i: (ratios[i] * total - shares[i], i), reverse=True)
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)
