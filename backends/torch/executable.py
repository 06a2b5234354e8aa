"""One graph behind the contract of the runtime, so that decoding can run on the second oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from edgecc.backends.base import Array, Role
from edgecc.backends.torch.executor import TorchExecutor
from edgecc.backends.torch.tensors import to_array, torch_dtype
from edgecc.errors import RequestError
from edgecc.ir.core import Input, Output
from edgecc.ir.evaluation import find_graph
from edgecc.ir.types import DimExpr


class TorchExecutable:
    """Runs one graph of a module. See `backends.base`.

    It owns every input that an output overwrites: caches, states and their logs.

    Args:
        executor: Evaluates the graph.
        graph: Its name: `target` or `draft`.
        slots: Sequences that it holds, the most of a call.

    Raises:
        RequestError: The module has no such graph.
    """

    def __init__(self, executor: TorchExecutor, graph: str, slots: int = 1) -> None:
        self.slots = self.batch_size = slots
        self._executor = executor
        self._graph = find_graph(executor.module, graph)
        self._updates = {o.name: o.alias for o in self._graph.outputs if o.alias is not None}
        kept = set(self._updates.values())
        self._inputs: dict[Role, Input] = {
            i.role: i for i in self._graph.inputs if i.name not in kept
        }
        self._outputs: dict[Role, Output] = {
            o.role: o for o in self._graph.outputs if o.alias is None
        }
        self._caches: dict[str, Tensor] = {
            item.name: torch.zeros(
                [slots if isinstance(d, DimExpr) else d for d in item.value.type.shape],
                dtype=executor.dtype,
                device=executor.device,
            )
            for item in self._graph.inputs
            if item.name in kept
        }

    @property
    def capacity(self) -> int:
        """Rows each KV cache holds; 0 without any."""
        caches = self._graph.by_role(Role.KV_CACHE)
        return min((self._caches[c.name].shape[2] for c in caches), default=0)

    @property
    def log_rows(self) -> int:
        """Rows the logs of the states hold; 0 without any."""
        logs = self._graph.by_role(Role.STATE_LOG)
        return min((self._caches[log.name].shape[1] for log in logs), default=0)

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        """See `Executable.run`; the results are copies. A call that is refused changes no cache.

        Raises:
            RequestError: An input or output is missing, unknown, of the wrong dtype or shape, or
                the new rows do not fit into the caches.
        """
        if inputs.keys() != self._inputs.keys():
            raise RequestError(
                "run/inputs",
                f"graph @{self._graph.name} takes {_names(self._inputs)}, got {_names(inputs)}",
            )
        for role in outputs:
            if role not in self._outputs:
                raise RequestError(
                    "run/outputs",
                    f"graph @{self._graph.name} has no output {role!s}",
                    notes=[f"it has {_names(self._outputs)}"],
                )
        lengths = np.atleast_1d(inputs.get(Role.CACHE_LENGTH, 0))
        held = slice(slot, slot + len(lengths))
        if slot < 0 or held.stop > self.slots:
            raise RequestError(
                "run/slots", f"{len(lengths)} sequences from slot {slot} on, of {self.slots}"
            )
        for item in self._graph.by_role(Role.STATE):
            self._caches[item.name][slot + np.flatnonzero(lengths == 0)] = 0
        named = {self._inputs[role].name: array for role, array in inputs.items()}
        caches = {name: cache[held] for name, cache in self._caches.items()}
        wanted = [self._outputs[role].name for role in outputs]
        found = self._executor.run_tensors(
            self._graph.name, {**named, **caches}, [*wanted, *self._updates]
        )
        for name, cache in self._updates.items():
            self._caches[cache][held] = found[name]
        return {role: self._array(found, self._outputs[role]) for role in outputs}

    def _array(self, found: Mapping[str, Tensor], output: Output) -> Array:
        """An output in the dtype of its type, whatever it was computed in."""
        return to_array(found[output.name].to(torch_dtype(output.value.type.dtype)))


def _names(roles: Mapping[Role, object]) -> str:
    return ", ".join(sorted(map(str, roles))) or "nothing"
