"""Measurements of hetu_fx against bars. `python -m benchmarks.NAME [--quick]` runs one.

Each prints a table for people and, as its last line, one JSON object for machines, and exits 0 when every bar
holds. What is compared runs side by side in one run, alternating, and counts by its median.
"""

import os

os.environ.setdefault("HETU_FX_CHECK", "0")  # seconds of preparation are compared as they were
