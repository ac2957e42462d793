"""Every way to arrange a step on a number of devices: schedules, degrees of both sides, splits into pools. Pure.

Degrees of each side, which all divide what they are of:

    tensor    query and key/value heads and the MLP; sequence parallelism with it as the recipe says
    pipeline  the layers
    context   training's prompts, into parts of at least LEAST_PART tokens; a rollout decodes one token at a time
    expert    the experts, where the model has any; inside context x data, so no device is for experts alone
    data      what is left: whole replicas

Colocated, the rollout's tensor, pipeline and expert degrees divide training's (one backing for both, weights/layout.py)
and the blocks divide the prompts. Pools are split at eighths of the devices, and at the whole nodes nearest to
these; a pool of the reference beside colocated blocks (`hybrid`) has up to half of the devices, tensor and data
parallelism only, and replicas that blocks can share evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollplex.planner.flops import ModelCounts
from rollplex.planner.parallel import Parallel
from rollplex.planner.workload import COLOCATED, HYBRID, POOLS, Arrangement

_SPLITS = 8
# An assumption: with fewer tokens a device the ring waits for its latencies, and the search only grows.
LEAST_PART = 4096


@dataclass
class Considered:
    """The arrangements to choose from, and how many were left out, by reason."""

    plans: list[Arrangement] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count what is not to be had."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees to choose from for one model and step. Example: Degrees(counts, prompt_tokens=8192).training(32)

    prompt_tokens: of the longest prompt. sequence: training's sequence parallelism. reference: whether there is one.
    node: devices of a node.
    """

    counts: ModelCounts
    prompt_tokens: int
    sequence: bool = True
    reference: bool = True
    node: int = 8

    def training(self, devices: int) -> Iterator[Parallel]:
        """All degrees of training on exactly `devices` devices."""
        return self._sides(devices, max(1, self.prompt_tokens // LEAST_PART), self.sequence)

    def rollout(self, devices: int) -> Iterator[Parallel]:
        """All degrees of the rollout on exactly `devices` devices."""
        return self._sides(devices, 1, True)

    def _sides(self, devices: int, most_context: int, sequence: bool) -> Iterator[Parallel]:
        text, experts = self.counts.shape.text, self.counts.experts
        for tensor in _divisors(devices):
            if text.num_heads % tensor or text.num_kv_heads % tensor or text.intermediate_size % tensor:
                continue
            for pipeline in _divisors(devices // tensor):
                if text.num_layers % pipeline:
                    continue
                replicas = devices // tensor // pipeline
                for expert in _divisors(replicas):
                    if expert > 1 and (experts is None or experts.count % expert):
                        continue
                    for context in _divisors(replicas):
                        if context <= most_context and self.prompt_tokens % context == 0:
                            data = replicas // context
                            yield Parallel(tensor, pipeline, data, context, expert, sequence)


def arrangements(degrees: Degrees, prompts: int, devices: int) -> Considered:
    """All arrangements of `prompts` prompts a step."""
    found = Considered()
    for train, rollout in _colocated(degrees, devices):
        if prompts % train.data:
            found.leave_out("whose replicas do not divide the prompts", len(COLOCATED))
        else:
            found.plans += [Arrangement(name, train, rollout) for name in COLOCATED]
    if degrees.reference:
        _add_hybrid(found, degrees, prompts, devices)
    for sampling in splits(devices, degrees.node):
        rollouts = list(degrees.rollout(sampling))
        for train in degrees.training(devices - sampling):
            for rollout in rollouts:
                if prompts < max(train.data, rollout.data):
                    found.leave_out("with more replicas than prompts", len(POOLS))
                else:
                    found.plans += [Arrangement(name, train, rollout) for name in POOLS]
    return found


def _add_hybrid(found: Considered, degrees: Degrees, prompts: int, devices: int) -> None:
    for reference in splits(devices, degrees.node):
        if 2 * reference > devices:  # it computes a third of what training does: half is more than enough
            break
        scorings = [p for p in degrees.training(reference) if p.pipeline == p.context == p.expert == 1]
        for train, rollout in _colocated(degrees, devices - reference):
            if prompts % train.data:
                found.leave_out("whose replicas do not divide the prompts", len(scorings))
                continue
            for scoring in scorings:
                if scoring.data % train.data and train.data % scoring.data:
                    found.leave_out("whose blocks cannot share the reference evenly")
                else:
                    found.plans.append(Arrangement(HYBRID, train, rollout, scoring))


def splits(devices: int, node: int = 8) -> list[int]:
    """Devices of one of two pools, rising. Example: 4, 8, .. 28 of 32; 1 of 2; of 24 in nodes of 8 also 8 and 16."""
    eighths = {devices * part // _SPLITS for part in range(1, _SPLITS)}
    nodes = {round(part / node) * node for part in eighths}
    return sorted(part for part in eighths | nodes if 0 < part < devices)


def _colocated(degrees: Degrees, devices: int) -> Iterator[tuple[Parallel, Parallel]]:
    rollouts = list(degrees.rollout(devices))
    for train in degrees.training(devices):
        for rollout in rollouts:
            if not (
                train.tensor % rollout.tensor or train.pipeline % rollout.pipeline or train.expert % rollout.expert
            ):
                yield train, rollout


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
