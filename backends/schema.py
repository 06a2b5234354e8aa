"""JSON schemas of manifests, with integers that are integers."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


@functools.cache
def validator(package: str, name: str) -> Validator:
    """The validator of a schema file that lies in a package."""
    # Importing jsonschema takes longer than everything else that opening a bundle does.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    text = resources.files(package).joinpath(name).read_text("utf-8")
    # JSON Schema counts 1.0 as an integer; the code that reads sizes wants real ones.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    strict: type[Validator] = extend(  # type: ignore[no-untyped-call]
        Draft202012Validator, type_checker=types
    )
    return strict(json.loads(text))
