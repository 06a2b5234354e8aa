"""The `edgecc` command: arguments, output and exit codes; the work is in the Python API."""

from edgecc.cli.main import main

__all__ = ["main"]
