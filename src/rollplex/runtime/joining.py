"""How a run's processes come together: alone, or as torchrun has started them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.parallel.arrangement import arrangement
from rollplex.parallel.groups import Job, join_job, leave_job, train_grid
from rollplex.parallel.launch import Launch
from rollplex.parallel.team import ALONE, ProcessTeam, Team
from rollplex.runtime.device import device_of, take_device
from rollplex.train.resume import changed_options, listed


@contextmanager
def joined(config: Config, launch: Launch) -> Iterator[Team]:
    """The team of a run for the block. An error that ends the block is told to the processes that wait for this one.

    Raises ConfigError for options that so many processes cannot honour, before any of them waits, or in which they
    differ; DeadlineError when not all come.
    """
    arrangement(config, launch.world)
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
        yield team_of(job, config)
    leave_job()


def team_of(job: Job, config: Config) -> ProcessTeam:
    """The team of a job whose processes have met. All of them must call it. Raises ConfigError where options differ."""
    arranged = arrangement(config, job.world)
    found = job.everyone.exchange(config, "options of all processes")
    for rank, other in enumerate(found):
        different = changed_options(found[0].model_dump(mode="json"), other, Path("the options of rank 0"))
        if different:
            raise ConfigError(
                f"rank {rank} has other options than rank 0: {listed(different)}; start all processes with the same "
                "recipe and overrides"
            )
    return ProcessTeam(job, arranged, train_grid(job, arranged.train_tp, arranged.train_tp))
