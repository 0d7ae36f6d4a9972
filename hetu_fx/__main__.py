"""`python -m hetu_fx SCRIPT [ARGUMENTS]`: run a script of accelerate that does not name hetu_fx, in parallel.

    HETU_FX_PLAN=plan.json accelerate launch --multi_gpu --num_processes 2 --num_machines 1 -m hetu_fx train.py

Models that `Accelerator.prepare` takes to train them, in a Trainer too, become parallel by the plan that HETU_FX_PLAN
names. See docs/integrations.md.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

from hetu_fx.base.patches import PLAN_VARIABLE


def main(arguments: list[str]) -> None:
    """Run the script as `python SCRIPT` does; what is to be patched for it is known since hetu_fx was imported."""
    if not (arguments and os.environ.get(PLAN_VARIABLE)):
        raise SystemExit(f"usage: {PLAN_VARIABLE}=plan.json python -m hetu_fx SCRIPT [ARGUMENTS]")
    script, sys.argv[:] = arguments[0], arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    if "accelerate.accelerator" not in sys.modules:
        warnings.warn(
            f"{script} has not used accelerate, so nothing of it ran in parallel\nhint: call "
            f"hetu_fx.auto_parallelize in it",
            stacklevel=1,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
