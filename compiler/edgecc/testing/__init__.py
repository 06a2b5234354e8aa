"""Property tests for passes: random modules, and what every pass must keep.

```python
from hypothesis import given

from edgecc.testing import check_pass, modules

@given(modules())
def test_my_pass(module):
    check_pass(MyPass(), module)
```
Needs the extra `test`: `pip install edgecc[test]`.
"""

try:
    import hypothesis  # noqa: F401 (only whether it is there)
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "edgecc.testing needs hypothesis: pip install 'edgecc[test]'", name="hypothesis"
    ) from error

from edgecc.testing.check import assert_equivalent, check_pass, interface, module_text
from edgecc.testing.sharing import storage
from edgecc.testing.strategies import encodings, modules, weights

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
