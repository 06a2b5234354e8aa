"""What plans say about themselves."""

from __future__ import annotations

import re


def products(plan: bytes) -> list[tuple[str, str, str]]:
    """Element types of the products a plan was built with: of both sides, and of the result.

    From the builder's own description inside the plan; empty if a version has none.
    """
    text = plan.decode("latin1")
    types = dict(re.findall(r'tensor=\{[^\n]*?name="([^"]+)"[^\n]*? type=(\w+) \}', text))
    layer = r'fully_connected=\{ name="[^"]*" output=\{([^}]*)\} input=\{([^}]*)\}'
    found = []
    for out, operands in re.findall(layer, text):
        names = [*re.findall(r'"([^"]*)"', operands)[:2], *re.findall(r'"([^"]*)"', out)[:1]]
        found.append(tuple(types.get(n, "?") for n in names))
    return found
