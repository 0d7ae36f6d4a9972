"""`python -m benchmarks.equal`: equal devices, ours beside torch's in one run; pipelines of two stages so far."""

import sys

from benchmarks.equal.pipelines import main

if __name__ == "__main__":
    sys.exit(main())
