"""The order in which rows are consumed, as a pure function of one integer position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Endless epochs over `num_rows` rows; each epoch is its own permutation when `shuffle` is on.

    A position counts rows consumed since the start of the run, dropped rows included, so saving it and starting from
    it again gives exactly the rows that an unbroken run would see.

    Example: DataOrder(3, seed=0, shuffle=False).row_at(4) == 1
    """

    num_rows: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, found {self.num_rows}")

    def row_at(self, position: int) -> int:
        """The row number at `position` (0 or more)."""
        epoch, offset = divmod(position, self.num_rows)
        return int(_permutation(self.num_rows, self.seed, epoch)[offset]) if self.shuffle else offset

    def epochs_at(self, position: int) -> float:
        """Epochs consumed at `position`, with the fraction of the current one."""
        return position / self.num_rows


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
