"""`python -m repro`: see repro.cli."""

import sys

from repro.cli import main

if __name__ == "__main__":  # worker processes import this module and must not start over
    sys.exit(main())
