"""Sampling and training share their devices, the reference has devices of its own: `hybrid` placement.

Lane WINDOW is the reference's devices, one slot for each replica that a block has there; nothing in it slows anything
else. Its prefixes run from the start, its pass over a group's responses as soon as the group is complete. Rollout and
the actor's passes follow each other in the other lanes as in serial.py, and give the update to the last bit of it.
"""

from __future__ import annotations

from rollplex.errors import ConfigError
from rollplex.schedule.spec import REFERENCE, Phase, StepSpec
from rollplex.schedule.step import Lane, Launch, Limits, StepState
from rollplex.schedule.turn import Turn


class Hybrid:
    """Serial, but for the reference, which neither takes time nor memory of the devices that train."""

    name = "hybrid"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses steps of which the reference's devices can do nothing or not all, and a cap that counts one kind of
        device."""
        if spec.old_logps:
            raise ConfigError(
                "schedule 'hybrid' scores responses where only the reference is, and old log-probs of the actor are "
                "wanted too; use 'serial'"
            )
        if not spec.reference:
            raise ConfigError(
                "schedule 'hybrid' gives the reference devices of its own, and algorithm.beta 0 has none; use 'serial'"
            )
        if limits.memory_bytes is not None:
            raise ConfigError(
                "schedule 'hybrid' has two kinds of device, Limits.memory_bytes counts one: leave it out and plan each "
                "by itself"
            )
        if not limits.window:
            raise ConfigError("schedule 'hybrid' runs the reference in lane window, and Limits.window is 0")

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """The reference whenever it can go on; the rollout while a group is not decoded, then pass by pass."""
        turn = Turn(state, state.spec.by_stage)
        turn.offer_rewards()
        for phase in (Phase.REF_RESPONSE, Phase.REF_PREFIX):  # complete groups first: the update waits for them
            turn.offer_all(phase, Lane.WINDOW)
        if not turn.state.all_done(Phase.DECODE):
            turn.offer_rollout(apart=True)
            return tuple(turn.launches)
        for task in turn.state.unlaunched(turn.order):
            if task.phase in (*REFERENCE, Phase.REWARD):
                continue
            if not turn.offer(task, Lane.MAIN):
                break
        return tuple(turn.launches)
