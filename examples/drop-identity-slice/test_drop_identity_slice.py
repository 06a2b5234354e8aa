from drop_identity_slice import DropIdentitySlice
from hypothesis import given

from edgecc.testing import check_pass, modules


@given(modules(ops=["slice", "linear", "add", "call"]))
def test_random_modules(module):
    check_pass(DropIdentitySlice(), module)
