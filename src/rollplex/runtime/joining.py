"""How a run's processes come together: alone, or as torchrun has started them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollplex.config import Config
from rollplex.parallel.arrangement import arrangement
from rollplex.parallel.groups import join_job, leave_job, train_grid
from rollplex.parallel.launch import Launch
from rollplex.parallel.team import ALONE, ProcessTeam, Team
from rollplex.runtime.device import device_of, take_device


@contextmanager
def joined(config: Config, launch: Launch) -> Iterator[Team]:
    """The team of a run for the block. An error that ends the block is told to the processes that wait for this one.

    Raises ConfigError for options that so many processes cannot honour, before any of them waits, and DeadlineError
    when not all come.
    """
    arranged = arrangement(config, launch.world)
    if launch.world == 1:
        yield ALONE
        return
    kind = device_of(config.run.device).type
    take_device(kind, launch.local_rank)
    job = join_job(
        launch.rank,
        launch.world,
        "env://",
        device="cuda" if kind == "cuda" else "cpu",
        deadline_s=config.parallel.deadline_s,
    )
    with job.telling():
        yield ProcessTeam(job, arranged, train_grid(job, arranged.train_tp, arranged.train_tp))
    leave_job()
