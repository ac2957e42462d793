"""Phase after phase on one device: rollout, then scoring, then the update. The baseline of every comparison."""

from __future__ import annotations

from rollplex.schedule.spec import Phase, StepSpec
from rollplex.schedule.step import Launch, Limits, StepState
from rollplex.schedule.turn import Turn, check_memory


class Serial:
    """No pass beside decoding but the engine's own prefill. With PrefixMode.WHOLE it is what today's frameworks do.

    Groups are scored and trained on in their own order, whatever the order in which they were complete.
    """

    name = "serial"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Runs every step that fits into memory one task at a time."""
        check_memory(self.name, spec, limits, spec.by_stage)

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """The rollout while a group is not decoded, then pass by pass."""
        turn = Turn(state, state.spec.by_stage)
        turn.offer_rewards()
        if not turn.state.all_done(Phase.DECODE):
            turn.offer_rollout()
        else:
            turn.offer_next()
        return tuple(turn.launches)
