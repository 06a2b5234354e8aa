"""Rules about files of different revisions in one folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from edgecc.contract.pair import Pair, Side
from edgecc.contract.rule import Rule
from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.checkpoint import INDEX

_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class OneRevision(Rule):
    """All files of a folder come from one export.

    What it checks
        Shards that count differently (`1-of-3` beside `2-of-4`), an index whose `total_size` is not
        the size of what it lists, and weight files that nothing lists.

    Why it matters
        Repositories change under the same name: the head of one published target has been NVFP4,
        then BF16, then NVFP4 again. Files of two revisions load without an error, and the draft is
        then accepted less often than it should be. What a tensor is stored in is therefore decided
        from the tensor, never from the name of a repository.

    What to do
        Fetch all files again from one revision, into an empty folder.
    """

    name = "one-revision"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/shard-count": "shards count differently",
        "checkpoint/total-size": "the index gives another size than its tensors have",
        "checkpoint/unlisted-file": "a weight file belongs to nothing and is not read",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare names and sizes of weight files."""
        for side in pair.sides:
            yield from self._counts(side)
            yield from self._size(side)
            yield from self._unlisted(side)

    def _counts(self, side: Side) -> Iterator[Diagnostic]:
        counts = {m[3]: name for name in side.checkpoint.files if (m := _SHARD.fullmatch(name))}
        if len(counts) > 1:
            yield Diagnostic(
                "checkpoint/shard-count",
                f"the names of the shards count to {' and to '.join(sorted(counts))}",
                where=f"{side.role}/{INDEX}",
                notes=tuple(sorted(counts.values())),
                help="fetch all files again from one revision",
                severity=Severity.WARNING,
            )

    def _size(self, side: Side) -> Iterator[Diagnostic]:
        index = side.checkpoint.json(INDEX)
        metadata = index.get("metadata") if index is not None else None
        declared = metadata.get("total_size") if isinstance(metadata, dict) else None
        # Others than integers are seen in real files: the entry is only meant to inform.
        if type(declared) is not int or side.checkpoint.has_unreadable:
            return
        found = sum(info.nbytes for info in side.checkpoint.tensors.values())
        if declared != found:
            yield Diagnostic(
                "checkpoint/total-size",
                f"total_size is {declared}, the tensors of the index have {found} bytes",
                where=f"{side.role}/{INDEX}: metadata.total_size",
                help="harmless if the exporter counts otherwise; else fetch all files again from "
                "one revision",
                severity=Severity.NOTE,
            )

    def _unlisted(self, side: Side) -> Iterator[Diagnostic]:
        names = side.checkpoint.folder_names()
        extra = [n for n in names if n.endswith(".safetensors") and n not in side.checkpoint.files]
        if extra:
            yield Diagnostic(
                "checkpoint/unlisted-file",
                f"{len(extra)} weight files are not read: {', '.join(extra[:4])}",
                where=side.role,
                notes=(f"read: {', '.join(side.checkpoint.files[:4])}",),
                help="remove them if they are of another revision",
                severity=Severity.NOTE,
            )
