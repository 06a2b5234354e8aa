"""Facts of a draft's config, wherever its writer put them.

The families write the same facts in different places. All places are read, nulls are ignored, and
two values that differ are an error: guessing a precedence has cost other tools acceptance silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields

_T = TypeVar("_T")

OUTPUT_IDS = "target_layer_ids"
INPUT_IDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


class Places:
    """One key looked up in every object that may hold it.

    Args:
        checkpoint: Whose config.
        nested: Keys of objects that hold facts besides the top level.
    """

    def __init__(self, checkpoint: Checkpoint, nested: Sequence[str]) -> None:
        self.top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
        sections = [self.top.section(name) for name in nested]
        self.all = [self.top, *[n for n in sections if n is not None]]

    def find(self, keys: Sequence[str], read: Callable[[Fields, str], _T]) -> tuple[str, _T] | None:
        """A fact and its place, wherever and however often it is written.

        Raises:
            InputError: Two places disagree.
        """
        found = [(f.at(k), read(f, k)) for k in keys for f in self.all if k in f]
        for place, value in found[1:]:
            if value != found[0][1]:
                raise InputError(
                    "draft/config-conflict",
                    f"{found[0][0]} is {shown(found[0][1])}, {place} is {shown(value)}",
                    where=place,
                    help="remove the one that is wrong; tools disagree on which of them wins",
                )
        return found[0] if found else None

    def get(self, keys: Sequence[str], read: Callable[[Fields, str], _T]) -> _T | None:
        """Like `find`, without the place."""
        found = self.find(keys, read)
        return None if found is None else found[1]

    def require(self, keys: Sequence[str], read: Callable[[Fields, str], _T], what: str) -> _T:
        """Like `get`, but the fact must be there.

        Raises:
            InputError: It is nowhere.
        """
        value = self.get(keys, read)
        if value is None:
            raise InputError(
                "config/missing-key",
                f"{what} is missing",
                where=self.top.where,
                notes=[f"looked for {k} in {', '.join(f.where for f in self.all)}" for k in keys],
                help="a default would be silently wrong for this draft: add the key it was "
                "trained with",
            )
        return value

    def flag(self, key: str) -> tuple[str, bool] | None:
        """A boolean fact and its place."""
        return self.find((key,), lambda f, k: f.boolean(k, default=False))

    def string(self, key: str) -> tuple[str, str] | None:
        """A text and its place."""
        return self.find((key,), lambda f, k: f.string(k))

    def integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer fact, None when it is nowhere."""
        return self.get((key,), lambda f, k: f.integer(k, minimum=minimum))


def tapped_layers(places: Places) -> tuple[tuple[int, ...], str] | None:
    """Tapped layers as outputs, from either numbering, and the key they come from; None if nowhere.

    `target_layer_ids` number the layer whose output is read; the `aux_hidden_state_layer_ids` of
    speculators and NVIDIA drafts number the layer whose input is read, which is one more.

    Raises:
        InputError: The list is empty, does not increase, or two lists disagree.
    """
    direct = places.find((OUTPUT_IDS,), lambda f, k: f.integers(k, minimum=-1))
    shifted = places.find(INPUT_IDS, _shifted)
    if direct is not None and shifted is not None and direct[1] != shifted[1]:
        raise InputError(
            "draft/config-conflict",
            f"{direct[0]} taps the outputs of layers {shown(direct[1])}, {shifted[0]} those of "
            f"{shown(shifted[1])}",
            where=shifted[0],
            help=f"{OUTPUT_IDS} numbers outputs, {INPUT_IDS[0]} numbers inputs: one more",
        )
    found = direct or shifted
    if found is None:
        return None
    place, ids = found
    if not ids:
        raise no_tapped_layers(place)
    if list(ids) != sorted(set(ids)):
        raise InputError(
            "draft/tapped-layers",
            f"tapped layers {shown(ids)} (outputs, counted from 0) must increase",
            where=place,
            help="use the list this draft was trained with",
        )
    return ids, place.rpartition(": ")[2].rpartition(".")[2]


def no_tapped_layers(where: str) -> InputError:
    """The error of a config that does not say which layers are tapped."""
    return InputError(
        "draft/tapped-layers",
        f"no tapped layers: {OUTPUT_IDS} is missing or empty",
        where=where,
        notes=[f"looked for {k}" for k in (OUTPUT_IDS, *INPUT_IDS)],
        help="add the layers this draft was trained on",
    )


def _shifted(fields: Fields, key: str) -> tuple[int, ...]:
    return tuple(i - 1 for i in fields.integers(key) or ())


def shown(value: object) -> str:
    """A value as JSON writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
