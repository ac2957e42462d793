"""Work and depth of each stage of a step, and the bound W/p <= T_p <= W/p + D beside the estimate.

The formulation is the survey's (research/rl_systems.md 4, arXiv 2608.27046), by Brent's and Graham's theorems: work W
is device-seconds, depth D the seconds of the longest chain of tasks that cannot be divided on a plan. A stage's tasks
are its groups, each on one replica:

| stage | W | D |
|---|---|---|
| generation | prompt passes; operations and cache reads of all tokens | one group on an engine of its own |
| reward | groups x verifier | 1 verifier |
| scoring (reference and old log-probs, values) | passes of all groups | one group's passes |
| training | forward, backward, prefix backward of all groups | one group's, and the optimizer step |
| publish | - | what is received, and log p hops |

Of generation a group's share is its prompt pass, its tokens, and a step for each token of its longest response. A step
takes what it takes for a single row: weights, launches, collectives, sampling. What a token adds on its own
(operations, cache) is work. Where an engine has fewer places than rows (rollout.max_decode_rows), the time of a step is
paid anew for each fill of all places: work, in the upper bound. The lower bound counts operations and cache reads as
overlapping, the upper as not: both kinds of kernel are in a step. The upper bound is that of groups that go to any
replica that is free; the estimate deals them out beforehand, which is the same for groups that are alike. A reference
with devices of its own is a stage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollplex.planner.cost import Side, StepCost
from rollplex.planner.decoding import Rows
from rollplex.schedule.spec import PREFIXES, REFERENCE, Phase, Task

_TRAINING = (Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. Seconds; work in device-seconds on `devices` devices, from `work_s` to `most_work_s`."""

    name: str
    devices: int
    work_s: float
    most_work_s: float  # where operations and memory traffic do not overlap
    depth_s: float
    estimate_s: float

    @property
    def lower_s(self) -> float:
        """No schedule on these devices is faster: W / p."""
        return self.work_s / self.devices

    @property
    def upper_s(self) -> float:
        """A greedy schedule is not slower: W / p + D."""
        return self.most_work_s / self.devices + self.depth_s


def stages(cost: StepCost) -> tuple[Stage, ...]:
    """The stages of a serial step, the estimate of each with its groups dealt out in turn."""
    apart = () if cost.scoring is None else (_on(cost, cost.scoring, "reference", REFERENCE),)
    name, phases = ("prefixes", PREFIXES[1:]) if apart else ("scoring and prefixes", (*REFERENCE, *PREFIXES[1:]))
    return (
        _generation(cost),
        _passes(cost, "reward", (Phase.REWARD,), devices=len(cost.groups), replica=1),
        *apart,
        _on(cost, cost.train, name, phases),
        _training(cost),
        Stage("publish", cost.rollout.plan.devices, 0.0, 0.0, cost.publish.total, cost.publish.total),
    )


def _generation(cost: StepCost) -> Stage:
    side, groups, seconds = cost.rollout, cost.groups, cost.durations()
    prefill = [seconds(Task(Phase.PREFILL, g)) for g in range(len(groups))]
    one = side.decode_step(Rows(1, 1, 1, 1)).total
    rows = sum(len(group.responses) for group in groups[:: side.plan.data])
    filled = 0.0 if cost.max_rows is None or cost.max_rows >= rows else one / cost.max_rows  # a token's, of full steps
    least, most, depth = 0.0, 0.0, 0.0
    for taken_in, group in zip(prefill, groups, strict=True):
        fed = sum(n - 1 for n in group.responses)
        pairs = sum((n - 1) * (group.prompt.tokens + n / 2) for n in group.responses)
        longest = max(group.responses) - 1
        shared = group.prompt.tokens * longest + sum((n - 1) * n / 2 for n in group.responses)
        work = side.decode_work(Rows(fed, 1, pairs, shared if cost.shared_prompts else pairs))
        tokens = work.apart + filled * fed
        least, most = least + work.overlapped, most + tokens
        depth = max(depth, taken_in + one * longest + tokens)
    replica, engines = side.plan.replica, side.plan.data
    estimate = max(
        sum(prefill[e::engines]) + max(cost.engine_ends[e].groups, default=0.0)
        for e in range(min(engines, len(groups)))
    )
    prompts = sum(prefill) * replica
    return Stage("generation", side.plan.devices, prompts + least * replica, prompts + most * replica, depth, estimate)


def _passes(cost: StepCost, name: str, phases: Iterable[Phase], *, devices: int, replica: int) -> Stage:
    each = _group_seconds(cost, phases)
    replicas = devices // replica
    estimate = max(sum(each[r::replicas]) for r in range(replicas))
    return Stage(name, devices, sum(each) * replica, sum(each) * replica, max(each), estimate)


def _on(cost: StepCost, side: Side, name: str, phases: Iterable[Phase]) -> Stage:
    return _passes(cost, name, phases, devices=side.plan.devices, replica=side.plan.replica)


def _training(cost: StepCost) -> Stage:
    stage = _on(cost, cost.train, "training", _TRAINING)
    step = cost.optimizer.total
    return Stage(
        stage.name, stage.devices, stage.work_s, stage.most_work_s, stage.depth_s + step, stage.estimate_s + step
    )


def _group_seconds(cost: StepCost, phases: Iterable[Phase]) -> list[float]:
    seconds = cost.durations()
    taken = cost.algorithm.prefill_is_actor_prefix
    wanted = [phase for phase in phases if not (taken and phase is PREFIXES[1])]
    return [sum(seconds(Task(phase, g)) for phase in wanted) for g in range(len(cost.groups))]
