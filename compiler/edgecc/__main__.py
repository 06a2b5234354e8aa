"""`python -m edgecc` is `edgecc`."""

import sys

from edgecc.cli import main

if __name__ == "__main__":
    sys.exit(main())
