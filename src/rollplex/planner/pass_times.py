"""Seconds of a task from its phase and its load, for runs of a million tasks: looked up, not counted anew.

Passes over prompts depend on the prompt alone. Passes over responses are counted for groups whose responses all have 2,
4, 8, .. tokens, and taken on the line between in all response tokens. That smooths attention among unequal responses,
their padding, and the jump at another micro-batch: under a tenth of the time where the longest response is twice the
shortest, a sixth too little at worst.
"""

from __future__ import annotations

from math import log2

from rollplex.planner.cost import StepCost
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.passes import passes
from rollplex.schedule.spec import Phase, PrefixMode

_OF_PROMPT = (Phase.PREFILL, Phase.REF_PREFIX, Phase.ACTOR_PREFIX, Phase.PREFIX_BACKWARD)


class PassTimes:
    """`StepCost.task(..).total` for any group. `cost.groups` count only for how full a pipeline is kept."""

    def __init__(self, cost: StepCost):
        self._cost = cost
        self._known: dict[tuple[Phase, Prompt, int, int], float] = {}

    def of(self, phase: Phase, load: GroupLoad | None) -> float:
        """Seconds of a group's phase, or of one of the whole step (load None); not of DECODE."""
        if phase is Phase.OPTIMIZER:
            return self._cost.optimizer.total
        if phase is Phase.PUBLISH:
            return self._cost.publish.total
        if load is None or phase is Phase.DECODE:
            raise ValueError(f"{phase} is decoded by an engine, or needs a group; found load {load}")
        if phase is Phase.REWARD:
            return self._cost.reward_s
        count = len(load.responses)
        if phase in _OF_PROMPT and self._cost.algorithm.prefix is not PrefixMode.WHOLE:
            return self._equal(phase, load.prompt, count, 1)
        mean = load.response_tokens / count
        if mean == 1:  # first tokens come from the prompt: nothing is fed, not even weights are read
            return self._equal(phase, load.prompt, count, 1)
        below = max(2, 1 << int(log2(mean)))
        low, high = (self._equal(phase, load.prompt, count, tokens) for tokens in (below, 2 * below))
        return low + (high - low) * (mean / below - 1)

    def _equal(self, phase: Phase, prompt: Prompt, count: int, tokens: int) -> float:
        """For `count` responses of `tokens` tokens each."""
        key = (phase, prompt, count, tokens)
        if key not in self._known:
            cost = self._cost
            side = cost.side(phase)
            found = passes(phase, GroupLoad(prompt, (tokens,) * count), side.counts, cost.algorithm)
            batches = cost.micro_batches(side)
            self._known[key] = sum(side.seconds(one, batches).total for one in found)
        return self._known[key]
