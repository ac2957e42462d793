"""Who belongs together: `replicas x degree` processes as a grid, and the groups along its two axes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollplex.errors import ConfigError, DeadlineError
from rollplex.parallel.tensor_ranks import ProcessRanks
from rollplex.parallel.waits import Peers


@dataclass(frozen=True, slots=True)
class Job:
    """This process among all of a job."""

    rank: int
    world: int
    device: Literal["cpu", "cuda"]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TrainGrid:
    """Training's ranks: neighbours share a model (tensor parallel), equal places hold one shard (data parallel)."""

    tensor: ProcessRanks
    data: Peers
    data_mesh: DeviceMesh


def join_job(rank: int, world: int, rendezvous: str, *, device: Literal["cpu", "cuda"], deadline_s: float) -> Job:
    """Meet the other processes at `rendezvous`, a URL of torch.distributed such as file:///path or tcp://host:port.

    Processes on CPUs talk over gloo, on GPUs over NCCL. Raises DeadlineError when they do not all come in time.
    """
    try:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=deadline_s),
        )
    except RuntimeError as error:
        raise DeadlineError(
            f"rank {rank} of {world} waited {deadline_s:.0f} s for the others at {rendezvous}; start all of them"
        ) from error
    Peers(dist.group.WORLD, "the job", deadline_s).barrier("start of the job")
    return Job(rank, world, device, deadline_s)


def train_grid(job: Job, degree: int) -> TrainGrid:
    """Tensor-parallel groups of `degree` neighbours. Raises ConfigError when they do not fill the job."""
    if job.world % degree:
        raise ConfigError(
            f"sharing.train_tp {degree} does not divide the {job.world} processes of the job; start a multiple of it"
        )
    mesh = init_device_mesh(job.device, (job.world // degree, degree), mesh_dim_names=("data", "tensor"))
    tensor = Peers(mesh["tensor"].get_group(), "training's tensor-parallel ranks", job.deadline_s)
    data = Peers(mesh["data"].get_group(), "training's data-parallel ranks", job.deadline_s)
    return TrainGrid(ProcessRanks(tensor), data, mesh["data"])


def neighbours(job: Job, degree: int, name: str) -> Peers:
    """This process's group of `degree` neighbours, such as a rollout's ranks or a block. All processes must call it."""
    if job.world % degree:
        raise ConfigError(f"groups of {degree} for {name} do not fill the {job.world} processes of the job")
    members = [list(range(first, first + degree)) for first in range(0, job.world, degree)]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=job.deadline_s))
    return Peers(group, name, job.deadline_s)
