"""Every way to arrange a step on a number of devices: schedules, degrees of both sides, splits into pools. Pure.

Degrees are tensor x pipeline x data. Tensor degrees divide query and key/value heads and the MLP, pipeline degrees the
layers, and what is left are whole replicas. Colocated, the rollout's tensor and pipeline degrees divide training's (one
backing for both, weights/layout.py) and the blocks divide the prompts. Pools are split at eighths of the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollplex.planner.flops import ModelCounts
from rollplex.planner.parallel import Parallel
from rollplex.planner.workload import COLOCATED, SIMULATED, Arrangement

_SPLITS = 8


@dataclass
class Considered:
    """The arrangements to choose from, and how many were left out, by reason."""

    plans: list[Arrangement] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count what is not to be had."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count


def arrangements(counts: ModelCounts, prompts: int, devices: int, *, sequence: bool) -> Considered:
    """All arrangements of `prompts` prompts a step. sequence: training's sequence parallelism."""
    found = Considered()
    for train, rollout in _colocated(counts, devices, sequence):
        if prompts % train.data:
            found.leave_out("whose replicas do not divide the prompts", len(COLOCATED))
        else:
            found.plans += [Arrangement(name, train, rollout) for name in COLOCATED]
    for sampling in splits(devices):
        for train in sides(counts, devices - sampling, sequence):
            for rollout in sides(counts, sampling):
                if prompts < max(train.data, rollout.data):
                    found.leave_out("with more replicas than prompts", len(SIMULATED) - len(COLOCATED))
                else:
                    found.plans += [Arrangement(n, train, rollout) for n in SIMULATED if n not in COLOCATED]
    return found


def sides(counts: ModelCounts, devices: int, sequence: bool = True) -> Iterator[Parallel]:
    """All degrees of one side on exactly `devices` devices."""
    text = counts.shape.text
    for tensor in _divisors(devices):
        if text.num_heads % tensor or text.num_kv_heads % tensor or text.intermediate_size % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            if text.num_layers % pipeline == 0:
                data = devices // tensor // pipeline
                yield Parallel(tensor, pipeline, data, sequence=sequence)


def splits(devices: int) -> list[int]:
    """Devices of the rollout pool. Example: 4, 8, .. 28 of 32; 1 of 2."""
    return sorted({devices * part // _SPLITS for part in range(1, _SPLITS)} - {0})


def _colocated(counts: ModelCounts, devices: int, sequence: bool) -> Iterator[tuple[Parallel, Parallel]]:
    rollouts = list(sides(counts, devices))
    for train in sides(counts, devices, sequence):
        for rollout in rollouts:
            if train.tensor % rollout.tensor == 0 and train.pipeline % rollout.pipeline == 0:
                yield train, rollout


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
