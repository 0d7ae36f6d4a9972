"""Numbers as people write them: seconds, bytes, shares, ranks of many devices, and how processes end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from itertools import groupby

_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_NOTHING = 1e-12  # what is less is rounding
_LONG = 120.0  # from so many seconds on, minutes say more
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SIZES = {unit: size for size, unit in _BYTES} | {"bytes": 1.0}
_FAR = 100  # so many times as many bytes have another unit where both stand together
_DIGITS = 3
_MOST_RUNS = 3  # of ranks that are written out


def seconds_text(seconds: float) -> str:
    """Return seconds in the unit that suits: `9.29 s`, `16.4 ms`, `2.5 min`; `0` for none."""
    if seconds < _NOTHING:
        return "0"
    for size, unit in _SECONDS:
        least = 60 * _LONG if unit == "h" else _LONG if unit == "min" else size
        if _shown_number(seconds) >= least or unit == "us":
            return f"{_plain(seconds / size)} {unit}"
    raise AssertionError("the last unit takes what is left")


def bytes_text(count: float) -> str:
    """Return bytes in the unit that suits: `60.7 GB`, `253 MB`."""
    return " ".join(_in_unit(count))


def rate_text(per_second: float, what: str = "B/s") -> str:
    """Return what is done a second in the unit that suits: `312 TFLOP/s`, `1.25 GB/s`."""
    for size, unit in _BYTES:
        if _shown_number(per_second) >= size:
            return f"{_plain(per_second / size)} {unit[0]}{what}"
    return f"{_plain(per_second)} {what}"


def format_used_bytes(count: float, limit: float) -> str:
    """Return how many bytes of so many: `60.7 of 85.9 GB`, `334 kB of 25.3 GB`."""
    (number, own), (most, unit) = _in_unit(count), _in_unit(limit)
    if own == unit or count >= limit / _FAR:
        number, own = _plain(count / _SIZES[unit]), unit
    return f"{number}{'' if own == unit else f' {own}'} of {most} {unit}"


def _in_unit(count: float) -> tuple[str, str]:
    """Return a number of bytes in the unit that suits."""
    for size, unit in _BYTES:
        if _shown_number(count) >= size:
            return _plain(count / size), unit
    return _plain(count), "bytes"


def share_text(share: float) -> str:
    """Return a share in percent: `71 %`, `0.2 %`."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 1 or not percent else f"{percent:.1g} %"


def _shown_number(value: float) -> float:
    """Return the number that is shown of a value."""
    return float(f"{value:.{_DIGITS}g}")


def _plain(value: float) -> str:
    """Write a number with three digits, and never as a power of ten."""
    return f"{_shown_number(value):.10g}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks with neighbours as ranges: `0-7, 16-23`; of many ranges the ends and the count."""
    known = sorted(set(ranks))
    runs = [
        _run_text([rank for _, rank in run]) for _, run in groupby(enumerate(known), lambda pair: pair[1] - pair[0])
    ]
    if len(runs) <= _MOST_RUNS:
        return ", ".join(runs)
    return f"{known[0]} ... {known[-1]} ({len(known)})"


def _run_text(run: Sequence[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))


def exit_text(code: int) -> str:
    """Say how a process ended that has this exit code: -n is that of signal n."""
    if code > 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name if code else 'itself'}"
    except ValueError:
        return f"was ended by signal {-code}"
