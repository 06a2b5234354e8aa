"""`python -m edgecc` is `edgecc`."""

import sys


def main() -> int:
    """Run the command line.

    Its imports take a moment, in which it can be interrupted as well.
    """
    try:
        from edgecc.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("edgecc: error[interrupted]: stopped by the user", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
