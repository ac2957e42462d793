"""A time that no step under an arrangement is faster than, in closed form: what a search need not simulate. Pure.

Both sides on their own, loads spread evenly (W / p of planner/bounds.py, or the longest chain if that is more):

    sampling   prompt passes / engines + max(all tokens decoded at the fullest batch / engines,
                                             the longest response alone, one row a step)
    training   passes of all groups / replicas, or those of the longest group; the optimizer step

and put together as a schedule may overlap them at best:

    serial, disaggregated   sampling + all passes
    rollplex                decoding beside both prefixes + the other passes
    stream                  decoding beside all passes, or decoding + the last group's passes over responses
    hybrid                  sampling + the actor's passes
    rolloutpipe             the larger of decoding + one group's passes, and the first group's end + all passes
    async                   max(sampling, all passes of the step before), step by step; the last one's passes

D seconds of decoding beside P of passes on the same devices take max(D, P) + min(D, P) x (contention - 1) at least:
overlapping for x seconds gets x / contention of each done.
The times of passes and decode steps are those of the simulation, so that only what overlaps and who waits is bounded.
The line of a decode step is taken at the rows that an engine has at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.planner.load import GroupLoad
from rollplex.planner.parallel import Parallel
from rollplex.planner.pass_times import PassTimes
from rollplex.planner.workload import Arrangement, Workload
from rollplex.schedule.spec import PREFIXES, REFERENCE, Phase

_REST = (Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)


@dataclass(frozen=True, slots=True)
class _Sampling:
    prefill_s: float
    decode_s: float
    first_s: float  # until any group is complete


@dataclass(frozen=True, slots=True)
class _Training:
    prefix_s: float
    rest_s: float
    once_s: float
    own_s: float  # all passes but the reference's
    last_s: float  # of the group that has least, its passes over responses
    group_s: float  # and all its passes


class StepBound:
    """Bounds for one workload over the steps that a simulation is judged by, each side counted once.

    steps: numbers of these steps. The clock starts when the step before them has been trained on.
    """

    def __init__(self, workload: Workload, steps: range):
        self._workload = workload
        self._steps = [workload.feed.groups(step, workload.shape.prompts) for step in steps]
        self._sampling: dict[Parallel, list[_Sampling]] = {}
        self._training: dict[tuple[Parallel, Parallel | None], list[_Training]] = {}

    def seconds(self, plan: Arrangement) -> float:
        """Per step, a mean over the steps."""
        if plan.rollout not in self._sampling:
            self._sampling[plan.rollout] = [self._sample(plan, groups) for groups in self._steps]
        key = plan.train, plan.scoring
        if key not in self._training:
            self._training[key] = [self._train(plan, groups) for groups in self._steps]
        pairs = list(zip(self._sampling[plan.rollout], self._training[key], strict=True))
        if plan.schedule == "async":  # the first of the steps may be sampled already when the clock starts
            sampled = [sample.prefill_s + sample.decode_s for sample, _ in pairs]
            trained = [train.prefix_s + train.rest_s + train.once_s for _, train in pairs]
            return (sum(map(max, sampled[1:], trained[:-1])) + trained[-1]) / len(pairs)
        beside = min(1.0, self._workload.assumed.contention - 1)
        return sum(_step(plan.schedule, sample, train, beside) for sample, train in pairs) / len(pairs)

    def _sample(self, plan: Arrangement, groups: Sequence[GroupLoad]) -> _Sampling:
        workload, engines = self._workload, plan.rollout.data
        cost = workload.cost(plan)
        times, table = PassTimes(cost), workload.table(cost.rollout)
        prefill_s = sum(times.of(Phase.PREFILL, group) for group in groups) / engines
        one = table.of(1)
        longest, prompt = max((max(group.responses), group.prompt.tokens) for group in groups)
        chain_s = (longest - 1) * (one.start + (one.pairs + one.cached) * (prompt + longest / 2))
        rows = max(
            1, min(workload.config.rollout.max_decode_rows, -(-len(groups) // engines) * workload.shape.generations)
        )
        full = table.of(rows)
        fed = sum(tokens - 1 for group in groups for tokens in group.responses)
        contexts = sum((n - 1) * (group.prompt.tokens + n / 2) for group in groups for n in group.responses)
        read = contexts if not workload.shared_prompts else sum(map(_read_together, groups))
        work_s = (fed * full.start / rows + contexts * full.pairs + read * full.cached) / engines
        first_s = min(max(group.responses) - 1 for group in groups) * one.start
        return _Sampling(prefill_s, max(chain_s, work_s), first_s)

    def _train(self, plan: Arrangement, groups: Sequence[GroupLoad]) -> _Training:
        cost, replicas = self._workload.cost(plan), plan.train.data
        times = PassTimes(cost)

        def spread(*phases: Phase) -> float:
            each = [sum(times.of(phase, group) for phase in phases) for group in groups]
            return max(sum(each) / replicas, max(each))

        there = self._workload.whole.tasks_per_phase
        prefixes = [phase for phase in PREFIXES if there[phase]]
        rest = [phase for phase in _REST if there[phase]]
        own = [phase for phase in (*prefixes, *rest) if phase not in REFERENCE]
        last = min(sum(times.of(phase, group) for phase in rest) for group in groups)
        whole = min(sum(times.of(phase, group) for phase in (*prefixes, *rest)) for group in groups)
        return _Training(spread(*prefixes), spread(*rest), times.of(Phase.OPTIMIZER, None), spread(*own), last, whole)


def _read_together(group: GroupLoad) -> float:
    """Tokens read for a group in all steps where its prompt is read once a step."""
    return group.prompt.tokens * (max(group.responses) - 1) + sum((n - 1) * n / 2 for n in group.responses)


def _step(schedule: str, sample: _Sampling, train: _Training, beside: float) -> float:
    """beside: how much of what is hidden is paid all the same."""
    decode_s, passes_s = sample.decode_s, train.prefix_s + train.rest_s
    if schedule == "rollplex":
        hidden_s = min(decode_s, train.prefix_s)
        return sample.prefill_s + decode_s + passes_s - hidden_s * (1 - beside) + train.once_s
    if schedule == "stream":
        both_s = max(decode_s, passes_s) + min(decode_s, passes_s) * beside
        return sample.prefill_s + max(both_s, decode_s + train.last_s) + train.once_s
    if schedule == "hybrid":
        return sample.prefill_s + decode_s + train.own_s + train.once_s
    if schedule == "rolloutpipe":
        return max(sample.prefill_s + decode_s + train.group_s, sample.first_s + passes_s) + train.once_s
    return sample.prefill_s + decode_s + passes_s + train.once_s
