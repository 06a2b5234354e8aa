"""What tests of passes share: yours as well as ours.

```python
from hypothesis import given

from edgecc.testing import check_pass, modules

@given(modules())
def test_my_pass(module):
    check_pass(MyPass(), module)
```
Needs the extra `test`: `pip install edgecc[test]`. Golden cases are in `edgecc.testing.golden`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgecc.testing.check import assert_equivalent, check_pass, interface, module_text
    from edgecc.testing.sharing import storage
    from edgecc.testing.strategies import encodings, modules
    from edgecc.testing.weight_trees import weights

_LAZY = {
    "assert_equivalent": "check",
    "check_pass": "check",
    "encodings": "strategies",
    "interface": "check",
    "module_text": "check",
    "modules": "strategies",
    "storage": "sharing",
    "weights": "weight_trees",
}

__all__ = [
    "assert_equivalent",
    "check_pass",
    "encodings",
    "interface",
    "module_text",
    "modules",
    "storage",
    "weights",
]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: golden cases need no hypothesis.

    Raises:
        ModuleNotFoundError: The extra `test` is not installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'edgecc.testing' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"edgecc.testing.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        message = f"edgecc.testing.{name} needs hypothesis: pip install 'edgecc[test]'"
        raise ModuleNotFoundError(message, name="hypothesis") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
