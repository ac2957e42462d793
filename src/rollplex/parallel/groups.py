"""Who belongs together: `replicas x degree` processes as a grid, and the groups along its two axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous as meet

from rollplex.errors import ConfigError, DeadlineError, PeerError
from rollplex.parallel.tensor_ranks import ProcessRanks
from rollplex.parallel.waits import Peers
from rollplex.parallel.witness import Whereabouts, Witness


@dataclass(frozen=True, slots=True)
class Job:
    """This process among all of a job."""

    rank: int
    world: int
    device: Literal["cpu", "cuda"]
    deadline_s: float
    witness: Witness

    @property
    def everyone(self) -> Peers:
        """All processes of the job."""
        return Peers(dist.group.WORLD, "the job", self.deadline_s, self.witness)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Leave word of an error that ends the block, for those who wait for this rank."""
        try:
            yield
        except PeerError:  # the first one to end has told already
            raise
        except BaseException as error:
            self.witness.tell(error)
            raise


@dataclass(frozen=True, slots=True)
class TrainGrid:
    """Training's ranks: neighbours share a model (tensor parallel), equal places hold one shard (data parallel)."""

    tensor: ProcessRanks
    data: Peers
    data_mesh: DeviceMesh


def join_job(rank: int, world: int, rendezvous: str, *, device: Literal["cpu", "cuda"], deadline_s: float) -> Job:
    """Meet the other processes at `rendezvous`, a URL of torch.distributed such as env://, file:///path or
    tcp://host:port.

    Processes on CPUs talk over gloo, on GPUs over NCCL. Raises DeadlineError when they do not all come in time.
    """
    patience = timedelta(seconds=deadline_s)
    try:
        store, _, _ = next(meet(rendezvous, rank, world, timeout=patience))
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=world,
            timeout=patience,
        )
    except RuntimeError as error:
        raise DeadlineError(
            f"rank {rank} of {world} waited {deadline_s:.0f} s for the others at {rendezvous}; start all of them"
        ) from error
    found = Peers(dist.group.WORLD, "the job", deadline_s).exchange(Whereabouts.own(), "start of the job")
    return Job(rank, world, device, deadline_s, Witness(store, rank, found))


def leave_job() -> None:
    """End of a job that has done all its work. After an error processes simply end: their peers may be gone already."""
    dist.destroy_process_group()


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
    tensor = _peers(job, mesh["tensor"].get_group(), "training's tensor-parallel ranks")
    data = _peers(job, mesh["data"].get_group(), "training's data-parallel ranks")
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
    return _peers(job, group, name)


def _peers(job: Job, group: object, name: str) -> Peers:
    return Peers(group, name, job.deadline_s, job.witness)
