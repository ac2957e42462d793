"""What the processes of one run tell each other between their passes, as Python objects: few, small, once a step.

`ALONE` is a run of one process: every method hands back what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from rollplex.parallel.arrangement import Arrangement
from rollplex.parallel.groups import Job, TrainGrid
from rollplex.parallel.waits import Peers

T = TypeVar("T")


class Team(Protocol):
    """This process among those of its run. All make the same calls in order."""

    @property
    def rank(self) -> int:
        """0 to size - 1; 0 writes what a run leaves behind."""

    @property
    def size(self) -> int:
        """Processes of the run."""

    @property
    def replica(self) -> int:
        """Which share of each step's prompts is this process's: 0 to replicas - 1."""

    @property
    def replicas(self) -> int:
        """Shares of a step's prompts."""

    @property
    def place(self) -> int:
        """This process among those that hold one model together; 0 asks the reward functions."""

    @property
    def data(self) -> Peers | None:
        """Processes of all replicas at the same place; None: there is one replica."""

    def of_replicas(self, own: list[T], what: str) -> list[T]:
        """`own` of all replicas, one after the other."""

    def of_place_0(self, value: T, what: str) -> T:
        """`value` as the first process of this replica has it."""

    def of_rank_0(self, value: T, what: str) -> T:
        """`value` as the first process of the run has it."""

    def any(self, flag: bool, what: str) -> bool:
        """Whether any process of the run says so."""


class _Alone:
    rank = replica = place = 0
    size = replicas = 1
    data = None

    def of_replicas(self, own: list[T], what: str) -> list[T]:
        return own

    def of_place_0(self, value: T, what: str) -> T:
        return value

    def of_rank_0(self, value: T, what: str) -> T:
        return value

    def any(self, flag: bool, what: str) -> bool:
        return flag


ALONE: Team = _Alone()


@dataclass(frozen=True, slots=True)
class ProcessTeam:
    """Team over process groups."""

    job: Job
    arranged: Arrangement
    grid: TrainGrid

    @property
    def rank(self) -> int:
        """0 to size - 1; 0 writes what a run leaves behind."""
        return self.job.rank

    @property
    def size(self) -> int:
        """Processes of the run."""
        return self.job.world

    @property
    def replica(self) -> int:
        """Which share of each step's prompts is this process's: 0 to replicas - 1."""
        return self.grid.data.rank

    @property
    def replicas(self) -> int:
        """Shares of a step's prompts."""
        return self.grid.data.size

    @property
    def place(self) -> int:
        """This process among those that hold one model together; 0 asks the reward functions."""
        return self.grid.tensor.rank

    @property
    def data(self) -> Peers | None:
        """Processes of all replicas at the same place; None: there is one replica."""
        return self.grid.data if self.replicas > 1 else None

    def of_replicas(self, own: list[T], what: str) -> list[T]:
        """`own` of all replicas, one after the other."""
        return own if self.data is None else [item for part in self.data.exchange(own, what) for item in part]

    def of_place_0(self, value: T, what: str) -> T:
        """`value` as the first process of this replica has it."""
        return value if self.grid.tensor.size == 1 else self.grid.tensor.peers.first(value, what)

    def of_rank_0(self, value: T, what: str) -> T:
        """`value` as the first process of the run has it."""
        return self.job.everyone.first(value, what)

    def any(self, flag: bool, what: str) -> bool:
        """Whether any process of the run says so."""
        return any(self.job.everyone.exchange(flag, what))
