"""What handing new weights to the rollout costs: in place, against gathering all of them and loading a shard.

usage: taskset -c 0-1 python benchmarks/publish.py [--rounds 5] [--layers 2] [--bucket-mib 8]

One process for each device of a block, over gloo, for pairs of tensor-parallel degrees and of layouts. Arms in turn:

    publish      weights/publish.py: one copy of the weights; rows that a rollout shard lacks move, in buckets
    gather       every rank gathers training's shards into a full state dict, then copies its rollout shard out of it
                 into weights of the engine's own
    gather_each  the same unit by unit (a fused group, or a tensor): no state dict

Bytes received are the kernel's count of each process's connections (TCP_INFO). Extra memory is the kernel's peak of
resident memory (VmHWM, set back before) above what was resident. Seconds are those of the slowest device from a common
start, for `publish` also until training may go on (`begin`); processor seconds are of all devices. Every rollout shard
is checked, and that `publish` received what the plan says, to the byte. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import socket
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from rollplex.config import SharingConfig
from rollplex.models.shapes import shape_from_hf
from rollplex.models.shard_plan import Kind, ShardPlan, shard_plan
from rollplex.parallel.groups import block_peers, join_job
from rollplex.parallel.waits import Peers
from rollplex.weights.layout import SharingPlan, plan_sharing
from rollplex.weights.pieces import PADDING
from rollplex.weights.publish import Publisher
from rollplex.weights.share import Backing, Side
from rollplex.weights.transfer import received_numel
from vs_trl_arms.summary import UnequalWorkError, block_order, provenance, write_result

RESULTS = Path(__file__).resolve().parent / "results"
MEGATRON_TO_VLLM, EACH_MATRIX_APART = ("megatron", "vllm"), ("hf", "hf")
CASES = ((2, 1, MEGATRON_TO_VLLM), (4, 2, MEGATRON_TO_VLLM), (4, 1, MEGATRON_TO_VLLM), (4, 2, EACH_MATRIX_APART))
DTYPE, CPU = torch.float32, torch.device("cpu")
DEADLINE_S = 300.0
MIB = 1 << 20
LIMIT = 1 << 12  # weights are whole numbers below it: exact in float32, whatever is added to them


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of degrees and layouts, and how it is measured."""

    train_tp: int
    rollout_tp: int
    layouts: tuple[str, str]
    layers: int
    rounds: int
    warmup: int
    bucket_bytes: int

    @property
    def plan(self) -> SharingPlan:
        """The sharing plan of the benchmark's model."""
        train, rollout = self.layouts
        sharing = {"train_tp": self.train_tp, "rollout_tp": self.rollout_tp}
        layouts = {"train_layout": train, "rollout_layout": rollout}
        return plan_sharing(model_plan(self.layers), SharingConfig.model_validate({**sharing, **layouts}))


def model_plan(layers: int) -> ShardPlan:
    """A small Qwen2.5-VL in the proportions of a large one: 16 query heads on 4 key/value heads, head not tied."""
    text = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 1024,
              "patch_size": 14}  # fmt: skip
    config = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    return shard_plan(shape_from_hf(config, "the benchmark"))


class Drawn(Mapping[str, torch.Tensor]):
    """The full tensors that all start from, drawn by name whenever one is asked for: nobody holds all of them."""

    def __init__(self, plan: ShardPlan):
        self.shapes = {tensor.name: tensor.shape for tensor in plan.tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randint(LIMIT, self.shapes[name], generator=draw, dtype=torch.int16).to(DTYPE)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Gathering:
    """The peer: training's shards and the engine's are apart, and a full tensor lies between them."""

    def __init__(self, plan: SharingPlan, block: Peers, start: Drawn):
        self.plan, self.block = plan, block
        self.training, self.engine = (Backing.create(plan, block.rank, DTYPE, CPU) for _ in range(2))
        for backing in (self.training, self.engine):
            backing.load(start, "start")

    def all_at_once(self) -> None:
        """A full state dict on every rank, then the load."""
        full: dict[str, torch.Tensor] = {}
        for number in range(len(self.plan.units)):
            full |= self._gathered(number)
        self.engine.fill(Side.ROLLOUT, full)

    def one_by_one(self) -> None:
        """The same, a unit at a time."""
        for number, placement in enumerate(self.engine.layout.placements):
            self.engine.fill_unit(placement.unit, placement.rollout, self._gathered(number))

    def _gathered(self, number: int) -> dict[str, torch.Tensor]:
        """Full tensors of a unit, from every training rank's piece of it."""
        unit, placement = self.plan.units[number].unit, self.training.layout.placements[number]
        pieces = [self.plan.pieces(unit, rank)[0] for rank in range(self.block.size)]
        rows = list(self.training.rows(unit, placement.train, 0, pieces[self.block.rank].length))
        own = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous()
        if unit.kind in (Kind.REPLICATED, Kind.VISION):
            parts, pieces = [own], pieces[:1]
        else:
            parts = [torch.empty_like(own) for _ in pieces]
            self.block.wait(dist.all_gather(parts, own, group=self.block.group, async_op=True), unit.name)
        shapes = {member.name: member.shape for member in unit.members}
        # Row-parallel shards are stored transposed; so is the full tensor: the peer never copies across the grain.
        full = {
            name: torch.empty(shape[::-1], dtype=DTYPE).t() if unit.dim else torch.empty(shape, dtype=DTYPE)
            for name, shape in shapes.items()
        }
        for piece, part in zip(pieces, parts, strict=True):
            for run in piece.runs:
                if run.tensor != PADDING:
                    target = full[run.tensor].movedim(unit.dim, 0)[run.start : run.stop]
                    target.copy_(part[run.at : run.at + run.length])
        return full


def received_so_far() -> int:
    """Bytes that arrived at this process's TCP connections, by the kernel's count (tcpi_bytes_received)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", info, 128)[0]
        except OSError:  # closed since the listing, or no TCP
            continue
    return total


@contextmanager
def resident_peak(found: dict[str, Any]) -> Iterator[None]:
    """Puts into `found` how far resident memory rose in the block."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide what the block takes
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    before = _status("VmRSS")
    yield
    found["extra_bytes"] = _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) << 10


def check(backing: Backing, start: Drawn, added: int, arm: str) -> None:
    """Raises UnequalWorkError unless the rollout's weights are those of `start` with `added` added to each."""
    for unit, part in backing.placements(Side.ROLLOUT):
        for placed in part:
            for run in placed.parameter.runs:
                if run.tensor == PADDING:
                    continue
                found = torch.cat(list(backing.rows(unit, (placed,), run.at, run.at + run.length)))
                truth = start[run.tensor].movedim(unit.dim, 0)[run.start : run.stop] + added
                if not torch.equal(found, truth):
                    raise UnequalWorkError(f"{arm}: {run.tensor} of the rollout is not what training wrote")


def device(rank: int, rendezvous: str, case: Case, answers: str) -> None:
    """One process: all arms in turn, each on weights that training has just changed."""
    torch.set_num_threads(1)
    plan = case.plan
    job = join_job(rank, plan.num_devices, rendezvous, device="cpu", deadline_s=DEADLINE_S)
    block, start = block_peers(job, plan.num_devices), Drawn(plan.plan)
    shared, peer = Backing.create(plan, rank, DTYPE, CPU), Gathering(plan, block, start)
    shared.load(start, "start")
    publisher = Publisher(plan, shared, block, bucket_bytes=case.bucket_bytes)
    facts: dict[str, Any] = {"planned_bytes": sum(_received(plan, rank))}

    def publish(sample: dict[str, Any], began: float) -> None:
        begun = publisher.begin(lambda: None)
        sample["begin_s"] = monotonic() - began
        report = begun.finish()
        facts["reported_bytes"], facts["buffer_bytes"] = report.received_bytes, report.buffer_bytes

    arms: dict[str, tuple[Backing, Callable[[dict[str, Any], float], None]]] = {
        "publish": (shared, publish),
        "gather": (peer.training, lambda _sample, _began: peer.all_at_once()),
        "gather_each": (peer.training, lambda _sample, _began: peer.one_by_one()),
    }
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for arm in block_order(list(arms), case.warmup + case.rounds):
        written, hand_over = arms[arm]
        for view in written.parameters(Side.TRAIN).values():
            view.add_(1.0)
        sample: dict[str, Any] = {}
        block.barrier(f"start of {arm}")
        arrived = received_so_far()
        with resident_peak(sample):
            block.barrier(f"start of the clock of {arm}")
            began, worked = monotonic(), process_time()
            hand_over(sample, began)
            sample |= {"seconds": monotonic() - began, "cpu_seconds": process_time() - worked}
        block.barrier(f"end of {arm}")
        sample["received_bytes"] = received_so_far() - arrived
        samples[arm].append(sample)
    check(shared, start, case.warmup + case.rounds, "publish")
    check(peer.engine, start, 2 * (case.warmup + case.rounds), "gather")
    found = block.exchange((facts, {arm: taken[case.warmup :] for arm, taken in samples.items()}), "answers")
    if rank == 0:
        Path(answers).write_text(json.dumps(found))
    block.barrier("end")


def _received(plan: SharingPlan, rank: int) -> Iterator[int]:
    for classified in plan.units:
        yield received_numel(plan, classified.unit, rank) * DTYPE.itemsize


def measured(case: Case) -> dict[str, Any]:
    """All devices of one case, put together."""
    with tempfile.TemporaryDirectory(prefix="publish_") as folder:
        rendezvous, answers = (Path(folder) / "rendezvous").as_uri(), Path(folder) / "answers"
        torch.multiprocessing.spawn(device, (rendezvous, case, str(answers)), nprocs=case.plan.num_devices)
        found = json.loads(answers.read_text())
    for rank, (facts, _) in enumerate(found):
        if facts["reported_bytes"] != facts["planned_bytes"]:
            raise UnequalWorkError(f"device {rank} of {case}: the plan's bytes were not those received: {facts}")
        if facts["buffer_bytes"] > 2 * case.bucket_bytes:
            raise UnequalWorkError(f"device {rank} of {case}: buffers took more than two buckets: {facts}")
    arms = {arm: _figures([samples[arm] for _, samples in found]) for arm in found[0][1]}
    return {
        "train_tp": case.train_tp,
        "rollout_tp": case.rollout_tp,
        "layouts": case.layouts,
        "planned_bytes": max(facts["planned_bytes"] for facts, _ in found),
        "buffer_bytes": max(facts["buffer_bytes"] for facts, _ in found),
        **{
            f"{kind}_{arm}": round(arms[arm][f"median_{key}"] / arms["publish"][f"median_{key}"], 3)
            for kind, key in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds"))
            for arm in ("gather", "gather_each")
        },
        "arms": arms,
    }


def _figures(devices: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Of each round the slowest device's seconds and the processor seconds of all; the largest bytes of any device."""
    rounds = list(zip(*devices, strict=True))
    seconds = {
        key: [max(s[key] for s in each) for each in rounds] for key in ("seconds", "begin_s") if key in rounds[0][0]
    }
    seconds["cpu_seconds"] = [sum(s["cpu_seconds"] for s in each) for each in rounds]
    largest = {key: max(s[key] for each in rounds for s in each) for key in ("received_bytes", "extra_bytes")}
    return {**{f"median_{key}": round(median(values), 4) for key, values in seconds.items()}, **largest, **seconds}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured hand-overs of each arm (default 5, at least 5)")
    parser.add_argument("--warmup", type=int, default=1, help="unmeasured hand-overs of each arm (default 1)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers of the model, 45 MB each (default 2)")
    parser.add_argument("--bucket-mib", type=int, default=8, help="bucket of publish (default 8)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep the result."""
    options = parse_arguments()
    if options.rounds < 5:
        raise SystemExit("--rounds must be at least 5: the median needs as many hand-overs")
    cases = []
    for train, rollout, layouts in CASES:
        case = Case(train, rollout, layouts, options.layers, options.rounds, options.warmup, options.bucket_mib * MIB)
        cases.append(measured(case))
        print(json.dumps({key: value for key, value in cases[-1].items() if key != "arms"}), flush=True)
    cores = len(os.sched_getaffinity(0))
    model_bytes = sum(tensor.numel for tensor in model_plan(options.layers).tensors) * DTYPE.itemsize
    line = {"model_bytes": model_bytes, "bucket_bytes": options.bucket_mib * MIB, "cores": cores}
    result = {"benchmark": "publish", **provenance(), **line, "dtype": "float32", "cases": cases}
    result["versions"] = {"torch": torch.__version__}
    print(f"written: {write_result('publish', result, cores, options.results)}")
    print(json.dumps({**line, "ratios": [case["ratio_gather"] for case in cases]}))


if __name__ == "__main__":
    main()
