"""The smallest tests under another torch, in an environment of its own: `make smoke TORCH='torch==2.11.*'`.

The environment stays in build/venv-VERSION, with this tree installed in it, for more tests under that torch.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from tests.packaging.environments import ROOT, TO_TEST, TREE, Environment, NotInIndexError, Torch, held

TESTS = ("tests/base/test_torch_private.py", "tests/base/test_torch_private_calls.py", "tests/packaging/test_smoke.py")


def main() -> int:
    """Make the environment, and run the tests; the status is that of pytest."""
    asked = argparse.ArgumentParser(description="Run the smallest tests under another torch.")
    asked.add_argument("torch", help="a requirement, with options of pip if need be")
    asked.add_argument("--small", action="store_true", help="skip a torch that the index has with CUDA only, or not")
    given = asked.parse_args()
    try:
        found = Torch.find(given.torch, Environment.at("venv-tools"))
    except NotInIndexError as error:
        print(f"{'SKIPPED' if given.small else 'NO'} smoke under {given.torch}: {error}")
        return 0 if given.small else 1
    if given.small and found.brings:
        print(f"SKIPPED smoke under {given.torch}: the index has torch {found.version} with CUDA only (gigabytes)")
        return 0
    environment = Environment.at(f"venv-{found.version}")
    environment.install(*shlex.split(given.torch))
    with held(TREE):
        environment.install(*TO_TEST, "--editable", str(ROOT))
    print(f"smoke under torch {found.version}, in {environment.folder.relative_to(ROOT)}", flush=True)
    return environment.pytest(*TESTS)


if __name__ == "__main__":
    sys.exit(main())
