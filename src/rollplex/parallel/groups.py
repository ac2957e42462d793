"""Who belongs together: `replicas x degree` processes as a grid, and the groups along its two axes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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


def replicas(world: int, degree: int, block: int) -> list[list[int]]:
    """The processes of each tensor-parallel group of `degree`, by rank, on blocks of `block` devices.

    The shards of training and rollout that nest lie on one device (weights/layout.py), so ranks of the side with the
    smaller degree are not neighbours: of 4 devices, a rollout at TP 2 has the groups [0, 2] and [1, 3].
    Raises ConfigError when groups and blocks do not fill the job.
    """
    if world % block or block % degree:
        raise ConfigError(
            f"{world} processes cannot hold whole blocks of {block} devices with groups of {degree}; start a "
            "multiple of the larger of sharing.train_tp and sharing.rollout_tp"
        )
    apart = block // degree
    return [
        [first + inner + rank * apart for rank in range(degree)]
        for first in range(0, world, block)
        for inner in range(apart)
    ]


def train_grid(job: Job, degree: int, block: int) -> TrainGrid:
    """Training's groups at tensor-parallel degree `degree`, on blocks of `block` devices. All processes must call it.

    Raises ConfigError when groups and blocks do not fill the job.
    """
    mesh = DeviceMesh(job.device, replicas(job.world, degree, block), mesh_dim_names=("data", "tensor"))
    tensor = Peers(mesh["tensor"].get_group(), "training's tensor-parallel ranks", job.deadline_s)
    data = Peers(mesh["data"].get_group(), "training's data-parallel ranks", job.deadline_s)
    return TrainGrid(ProcessRanks(tensor), data, mesh["data"])


def rollout_ranks(job: Job, degree: int, block: int) -> ProcessRanks:
    """This process's place in its rollout replica of tensor-parallel degree `degree`. All processes must call it.

    Raises ConfigError when groups and blocks do not fill the job.
    """
    return ProcessRanks(_group(job, replicas(job.world, degree, block), "the rollout's tensor-parallel ranks"))


def block_peers(job: Job, block: int) -> Peers:
    """The processes of this process's block, in the order of its devices. All processes must call it.

    Raises ConfigError when blocks do not fill the job.
    """
    return _group(job, replicas(job.world, block, block), "the block of devices")


def _group(job: Job, members: list[list[int]], name: str) -> Peers:
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=job.deadline_s))
    return Peers(group, name, job.deadline_s)
