"""From the hidden states of a text's tokens to the one vector that stands for the text.

The states come in order, in pieces as the prompt was cut; after a preemption those that are known
already come once more. A mean is summed in float64, token by token, so that the pieces do not show.
"""

import numpy as np
from numpy.typing import NDArray

from localllm.models.spec import Pooling

Floats = NDArray[np.float32]


class Pooler:
    """Takes the states of one sequence. `wants_all`: all of them, not only the last one's."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._num_seen = 0
        self._sum: NDArray[np.float64] | None = None

    @property
    def wants_all(self) -> bool:
        return self.pooling != "last"

    def add(self, first: int, states: Floats) -> None:
        """Take the states [n, width] of the positions from `first` on; they are not kept."""
        for position, state in enumerate(states, first):
            if self.wants_all and position < self._num_seen:
                continue
            assert not self.wants_all or position == self._num_seen
            if self._sum is None or self.pooling == "last":
                self._sum = state.astype(np.float64)
            elif self.pooling == "mean":
                self._sum += state
            self._num_seen = position + 1

    def vector(self) -> Floats:
        """float32 [width], once all states are in."""
        assert self._sum is not None
        count = self._num_seen if self.pooling == "mean" else 1
        return (self._sum / count).astype(np.float32)
