"""Inputs and outputs that `add-state-replay` adds to a graph, when values are compared.

With nothing to replay and all rows final, a graph with logs computes what it did without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgecc.ir.core import Graph
from edgecc.ir.encodings import Array
from edgecc.ir.evaluation import match_shape
from edgecc.ir.index_ranges import concrete
from edgecc.roles import Role

REPLAY_ROLES = (Role.STATE_LOG, Role.REPLAY_LENGTH, Role.COMMIT_LENGTH)
"""What a pass may add to a graph."""


def with_replay_inputs(graph: Graph, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of a graph, completed by those with a role above.

    Args:
        graph: A graph.
        arrays: Its inputs, perhaps without these.
    """
    made, sizes = dict(arrays), dict[str, int]()
    missing = [i for i in graph.inputs if i.name not in arrays and i.role in REPLAY_ROLES]
    for item in graph.inputs if missing else ():
        if item.name in arrays:
            match_shape(f"%{item.name}", arrays[item.name].shape, item.value.type, sizes)
    for item in missing:
        shape = concrete(item.value.type.shape, sizes, f"%{item.name}")
        filling = _new_rows(graph, sizes) if item.role is Role.COMMIT_LENGTH else 0
        made[item.name] = np.full(shape, filling, item.value.type.dtype.numpy)
    return made


def _new_rows(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Rows that the layers with a log compute."""
    node = next((n for n in graph.nodes if n.op.name == "logged_delta_net"), None)
    return concrete(node.operands[0].type.shape, sizes, repr(node))[1] if node else 0
