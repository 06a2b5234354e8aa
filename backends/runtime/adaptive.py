"""How many proposals are worth verifying, from measured acceptance and measured times.

A proposal is worth the chance that it and all before it are accepted, and it costs a row of the
verification. On a GPU a row is nearly free, on a CPU it may cost as much as half a step. The text
does not depend on the number, so the times of this run may decide.
"""

from __future__ import annotations

import numpy as np


class AdaptiveLength:
    """Chooses the number of proposals with the most tokens expected per second.

    The share accepted is counted for each slot among the rounds that reached it, with weights that
    fade: old rounds matter less and less, and a slot that is not tried any more is slowly taken for
    good again, so it is tried again. Times are taken as a line over the number of proposals.

    Args:
        most: Most proposals, at least 1.
    """

    FADING = 0.97
    """Weight of a round when the next one is counted."""

    PRIOR = 1.0
    """Weight of the assumption that a slot is always accepted."""

    SLOWER = 0.1
    """Share of a slower time that enters the time known; a faster one replaces it at once, because
    what disturbs a measurement only makes it longer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reached = np.zeros(most)
        self._accepted = np.zeros(most)
        self._seconds: dict[int, float] = {}
        # The first round also warms up. Two sizes make a line, three make it robust.
        self._probes = [most, most, (most + 1) // 2, 1][::-1]

    def next(self) -> int:
        """Proposals of the next round, from 1 to `most`."""
        if self._probes:
            return self._probes[-1]
        survival = np.cumprod((self._accepted + self.PRIOR) / (self._reached + self.PRIOR))
        return int(np.argmax((1.0 + np.cumsum(survival)) / self._times())) + 1

    def observe(self, proposed: int, accepted: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            proposed: How many proposals were verified; rounds without any are passed over.
            accepted: How many of them were accepted.
            seconds: How long the round took.
        """
        if not proposed:
            return
        if self._probes:
            self._probes.pop()
        self._reached *= self.FADING
        self._accepted *= self.FADING
        self._reached[: min(accepted + 1, proposed)] += 1.0
        self._accepted[:accepted] += 1.0
        known = self._seconds.get(proposed, seconds)
        self._seconds[proposed] = min(seconds, known + self.SLOWER * (seconds - known))

    def _times(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Seconds of a round with 1, 2, ... proposals; all equal where a line would fall."""
        sizes = np.array(list(self._seconds), dtype=np.float64)
        seconds = np.array(list(self._seconds.values()))
        spread = float(((sizes - sizes.mean()) ** 2).sum())
        slope = float(((sizes - sizes.mean()) * seconds).sum()) / spread if spread else 0.0
        numbers = np.arange(1, self._most + 1)
        line = seconds.mean() + max(0.0, slope) * (numbers - sizes.mean())
        return np.asarray(np.maximum(line, 1e-9), dtype=np.float64)
