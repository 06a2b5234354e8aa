"""Random modules and what every pass must keep: the public ones, where tests look for them."""

from edgecc.ir import evaluate
from edgecc.ir.random_inputs import random_inputs
from edgecc.testing import check_pass, interface, module_text, modules, storage

__all__ = [
    "check_pass",
    "evaluate",
    "interface",
    "module_text",
    "modules",
    "random_inputs",
    "storage",
]
