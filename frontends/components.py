"""Which parts of the checkpoints are built: `--components`."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import UsageError, did_you_mean

TEXT, ALL = "text", "all"
PARTS = ("target", "draft", "vision")
SPELLINGS = f"{TEXT}, {ALL}, or a list of {', '.join(PARTS)}"


@dataclass(frozen=True, slots=True)
class Components:
    """A choice of parts.

    Attributes:
        vision: Whether a vision tower is built, and a language model that reads images.
        named: The parts that were listed; empty for `text` and `all`, which take what is there.
    """

    vision: bool
    named: frozenset[str] = frozenset()

    def check_given(self, *, target: bool, draft: bool) -> None:
        """Check that the parts that were listed are the checkpoints that were given.

        Args:
            target: Whether there is a target.
            draft: Whether there is a draft.

        Raises:
            UsageError: One is missing, or one is not listed.
        """
        given = {"target": target, "draft": draft}
        for part in (p for p in given if self.named and given[p] != (p in self.named)):
            if given[part]:
                reason, way = f"leaves out the {part}, which is given", f"add {part} to the list"
            else:
                reason, way = f"lists a {part}, and none is given", f"give it, or take {part} out"
            listed = ",".join(p for p in PARTS if p in self.named)
            raise UsageError("usage/components", f"--components {listed} {reason}", help=way)


def parse_components(text: str) -> Components:
    """A choice as users spell it: `text`, `all`, or names of parts with commas.

    Raises:
        UsageError: It is something else, or names a part twice.
    """
    if text in (TEXT, ALL):
        return Components(text == ALL)
    parts = [part.strip() for part in str(text).split(",")]
    for index, part in enumerate(parts):
        if part not in PARTS or part in parts[:index]:
            known = (*PARTS, TEXT, ALL) if len(parts) == 1 else PARTS
            raise UsageError(
                "usage/components",
                f"components {text!r}: {part!r} "
                + ("is there twice" if part in PARTS else "is no part"),
                help=f"give {SPELLINGS}; {did_you_mean(part, known)}",
            )
    named = frozenset(parts)
    if named == {"vision"} or named == {"draft", "vision"}:
        raise UsageError(
            "usage/components",
            f"components {text!r}: a vision tower is of no use without its target",
            help="add target to the list",
        )
    return Components("vision" in named, named)
