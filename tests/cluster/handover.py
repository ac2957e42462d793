"""What each process does in test_publish.py."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from rollplex.config import SharingConfig
from rollplex.errors import DeadlineError, PeerError, StateError
from rollplex.models.shapes import shape_from_hf
from rollplex.models.shard_plan import ShardPlan, shard_plan
from rollplex.parallel.groups import Job, block_peers
from rollplex.parallel.waits import Peers
from rollplex.weights.layout import SharingPlan, plan_sharing
from rollplex.weights.publish import Publisher
from rollplex.weights.share import Backing, Side
from rollplex.weights.transfer import Move, received_numel

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def small_plan(tied: bool = False, vocab: int = 301, family: str = "qwen2_5_vl") -> ShardPlan:
    """8 query heads on 2 key/value heads, an odd vocabulary."""
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 4, "vocab_size": vocab}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 2, "intermediate_size": 3, "num_heads": 1, "out_hidden_size": 16,
              "patch_size": 2, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return shard_plan(shape_from_hf(config, "test"))


def sharing_plan(t: int, s: int, layouts: tuple[str, str] = ("hf", "hf"), *, tied: bool = False) -> SharingPlan:
    """The plan of the small model under two degrees."""
    return plan_sharing(
        small_plan(tied),
        SharingConfig.model_validate(
            {"train_tp": t, "rollout_tp": s, "train_layout": layouts[0], "rollout_layout": layouts[1]}
        ),
    )


def full_tensors(plan: ShardPlan, seed: int) -> Tensors:
    """Every tensor whole, drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=draw) for tensor in plan.tensors}


def all_pairs(job: Job, bucket_bytes: int) -> list[dict[str, Any]]:
    """A hand-over under all pairs of degrees and layouts; what it moved, and which parameters came out wrong."""
    blocks = {size: block_peers(job, size) for size in (1, 2, 4)}
    found = []
    for t, s, train, rollout, tied in itertools.product((1, 2, 4), (1, 2, 4), _LAYOUTS, ("hf", "vllm"), (False, True)):
        plan = sharing_plan(t, s, (train, rollout), tied=tied)
        block = blocks[plan.num_devices]
        old, new = full_tensors(plan.plan, 1), full_tensors(plan.plan, 2)
        backing = Backing.create(plan, block.rank, torch.float32, CPU)
        backing.load(old, "start")
        dropped: list[int] = []
        publisher = Publisher(
            plan,
            backing,
            block,
            bucket_bytes=bucket_bytes,
            check=True,
            dependents=[lambda b=backing, d=dropped: d.append(b.version.current)],
        )
        report = publisher.publish(lambda b=backing, n=new: b.fill(Side.TRAIN, n))
        wanted = Backing.create(plan, block.rank, torch.float32, CPU)
        wanted.load(new, "what it must be")
        wrong = [
            name
            for side in Side
            for name, view in backing.parameters(side).items()
            if not torch.equal(view, wanted.parameters(side)[name])
        ]
        planned = sum(received_numel(plan, c.unit, block.rank) for c in plan.units) * 4
        found.append(
            {"case": (t, s, train, rollout, tied), "wrong": wrong, "planned": planned, "dropped": dropped,
             "received": report.received_bytes, "buffers": report.buffer_bytes, "version": report.version,
             "rounds": report.rounds}
        )  # fmt: skip
    return found


_LAYOUTS = ("hf", "megatron")


class DyingPublisher(Publisher):
    """One device ends in the middle of the exchange, as a process does that the system kills."""

    victim = 1

    def _post(self, moves: Sequence[Move], room: Any, what: str) -> Any:
        if self.block.rank == self.victim and f"round {len(self.rounds) // 2} " in what:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._post(moves, room, what)


def killed_half_way(job: Job, folder: Path) -> Any:
    """Devices 0 and 1 publish and 1 is killed; processes 2 and 3 are readers of devices 0 and 1 that stay alive.

    Each reader answers with the versions that it was let read before and after, and whether what it read was whole. It
    leaves a file in `folder` when it was refused, for which process 0 waits before it loads everything again.
    """
    world = Peers(None, "all processes", job.deadline_s)
    plan = sharing_plan(2, 1)
    block = block_peers(job, 2)
    old, new = full_tensors(plan.plan, 1), full_tensors(plan.plan, 2)
    if job.rank < 2:
        backing = Backing.create(plan, job.rank, torch.float32, CPU)
        backing.load(old, "start")
        world.exchange(backing.handle, "handles")
        world.barrier("readers have mapped the weights")
        publisher = DyingPublisher(plan, backing, block, bucket_bytes=256)
        try:
            publisher.publish(lambda: backing.fill(Side.TRAIN, new), wait_s=job.deadline_s)
        except (PeerError, DeadlineError) as error:
            problem = str(error)
        else:
            problem = "no error"
        again = _read(backing, old, new)
        deadline_s = monotonic() + job.deadline_s
        while len(list(folder.iterdir())) < 2 and monotonic() < deadline_s:
            sleep(0.01)
        backing.load(new, "from the checkpoint", wait_s=job.deadline_s)
        return {"error": problem, "after": again, "loaded": _read(backing, old, new)}
    handles = world.exchange(None, "handles")
    backing = Backing.attach(handles[job.rank - 2])
    seen = [_read(backing, old, new)]
    world.barrier("readers have mapped the weights")
    while not seen[-1][1].startswith("StateError"):  # locked while the writers live, then half written
        seen.append(_read(backing, old, new))
        sleep(0.001)
    (folder / f"{job.rank}").touch()
    return {"seen": seen}


class HeldPublisher(Publisher):
    """Its exchange begins when it is told to."""

    go = threading.Event()

    def _exchange(self, version: int) -> tuple[int, int]:
        assert self.go.wait(self.block.deadline_s)
        return super()._exchange(version)


def read_on_the_way(job: Job) -> dict[str, Any]:
    """What training, the rollout and a second writer find between the beginning and the end of a hand-over."""
    plan = sharing_plan(2, 1, ("megatron", "vllm"))
    block = block_peers(job, 2)
    old, new = full_tensors(plan.plan, 1), full_tensors(plan.plan, 2)
    backing, wanted = (Backing.create(plan, block.rank, torch.float32, CPU) for _ in range(2))
    backing.load(old, "start")
    wanted.load(new, "what it must be")
    dropped, patient = list[int](), list[tuple[int, str]]()
    publisher = HeldPublisher(
        plan, backing, block, bucket_bytes=256, dependents=[lambda: dropped.append(backing.version.current)]
    )
    begun = publisher.begin(lambda: backing.fill(Side.TRAIN, new))
    reader = threading.Thread(target=lambda: patient.append(_same(backing, wanted, wait_s=job.deadline_s)))
    reader.start()
    found: dict[str, Any] = {
        "training": _differing(backing, wanted, Side.TRAIN),
        "rollout": _differing(backing, wanted, Side.ROLLOUT),
        "hasty": _same(backing, wanted),
    }
    try:
        publisher.begin(lambda: None)
    except DeadlineError as error:
        found["writer"] = str(error)
    found |= {"on the way": (list(patient), list(dropped), backing.version.current)}
    publisher.go.set()
    report = begun.finish()
    reader.join(job.deadline_s)
    return found | {"versions": (begun.version, report.version), "patient": patient, "dropped": dropped}


def _differing(backing: Backing, wanted: Backing, side: Side) -> list[str]:
    truth = wanted.parameters(side)
    return [name for name, view in backing.parameters(side).items() if not torch.equal(view, truth[name])]


def _same(backing: Backing, wanted: Backing, *, wait_s: float = 0.0) -> tuple[int, str]:
    """(version, what differs in the rollout from what it must be) or what refused to be read."""
    try:
        with backing.version.reading("rollout", wait_s=wait_s) as version:
            return version, ", ".join(_differing(backing, wanted, Side.ROLLOUT))
    except (StateError, DeadlineError) as error:
        return -1, f"{type(error).__name__}: {error}"


def _read(backing: Backing, old: Tensors, new: Tensors) -> tuple[int, str]:
    """(version, "old" or "new" if all weights are of one version, else "mixed") or what refused to be read."""
    try:
        with backing.version.reading("reader") as version:
            views = backing.parameters(Side.ROLLOUT)
            for name, tensors in (("old", old), ("new", new)):
                if all(torch.equal(view[: tensors[key].shape[0]], tensors[key]) for key, view in views.items()):
                    return version, name
            return version, "mixed"
    except (StateError, DeadlineError) as error:
        return -1, f"{type(error).__name__}: {error}"


def late(job: Job, deadline_s: float, folder: Path) -> str:
    """Process 1 does not come to the barrier of process 0 before that one has given up; what it is told."""
    block = replace(block_peers(job, 2), deadline_s=deadline_s)
    told = folder / "told"
    if job.rank == 1:
        until = monotonic() + job.deadline_s
        while not told.exists() and monotonic() < until:
            sleep(0.01)
        return ""
    try:
        block.barrier("publish of v7: start")
    except DeadlineError as error:
        return str(error)
    finally:
        told.touch()
    return "no error"
