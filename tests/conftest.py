"""Profiles of the property tests: `pytest --hypothesis-profile=nightly` chooses one by name."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["edgecc.testing.pytest_golden", "pytester"]

# Time is not checked: machines are shared, and a slow example says nothing about the code.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("dev", _COMMON, max_examples=30)
settings.register_profile("ci", _COMMON, max_examples=60, derandomize=True)
settings.register_profile("nightly", _COMMON, max_examples=5000)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")
