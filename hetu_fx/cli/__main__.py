"""`python -m hetu_fx.cli`: the command line where no `hetu-fx` is on the path."""

import sys

from hetu_fx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
