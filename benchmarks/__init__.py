"""Measurements of edgecc: `python -m benchmarks --help`; results are in docs/performance.md."""
