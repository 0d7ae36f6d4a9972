"""`python -m hetu_fx SCRIPT [ARGUMENTS]`: run a script of accelerate that does not name hetu_fx, in parallel.

    HETU_FX_PLAN=plan.json accelerate launch --multi_gpu --num_processes 2 --num_machines 1 -m hetu_fx train.py

Models that `Accelerator.prepare` takes to train them, in a Trainer too, become parallel by the plan that HETU_FX_PLAN
names, or by "auto". See docs/integrations.md.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

from hetu_fx.base.imports import import_with_library
from hetu_fx.base.patches import PLAN_VARIABLE

_ACCELERATOR = "accelerate.accelerator"


def main() -> None:
    """Run the script, as `python SCRIPT` does."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m hetu_fx SCRIPT [ARGUMENTS]")
    if not os.environ.get(PLAN_VARIABLE):
        os.environ[PLAN_VARIABLE] = "auto"
        import_with_library(_ACCELERATOR, "hetu_fx.integrations.accelerate")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    if _ACCELERATOR not in sys.modules:
        warnings.warn(
            f"{sys.argv[0]} has not used accelerate, so nothing of it ran in parallel\nhint: call "
            f"hetu_fx.auto_parallelize in it",
            stacklevel=1,
        )


if __name__ == "__main__":
    main()
