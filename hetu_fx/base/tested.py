"""The newest versions of libraries that the tests have passed with: a newer one is used, and told.

Nothing here imports a library: versions are read from what is installed.
"""

from __future__ import annotations

import os
import re
import warnings
from importlib import metadata

NEWEST = {"torch": "2.14"}


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def above_tested(library: str, version: str) -> str:
    """Return the newest tested version of a library where this one is of a later release; "" otherwise."""
    newest = NEWEST.get(library, "")
    tested = numbers(newest)
    return newest if tested and numbers(version)[: len(tested)] > tested else ""


def upper_bound(newest: str) -> str:
    """Return the first release that is no longer of the newest tested one: 2.15 for 2.14."""
    *before, last = numbers(newest)
    return ".".join(map(str, (*before, last + 1)))


def warn_of_newer() -> None:
    """Warn, on rank 0 alone, of installed libraries above the newest tested version."""
    if os.environ.get("RANK", "0") != "0":
        return
    for library in NEWEST:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
        if newest := above_tested(library, version):
            warnings.warn(
                f"hetu_fx was tested with {library} up to {newest}, and {version} is installed\n"
                f"hint: if something fails that should not, pip install '{library}<{upper_bound(newest)}'",
                stacklevel=3,
            )
