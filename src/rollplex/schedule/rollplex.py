"""Both prefixes run in the decode window; all else is as in serial.py, to the last bit of the update."""

from __future__ import annotations

from rollplex.schedule.spec import Phase, StepSpec
from rollplex.schedule.step import Launch, Limits, StepState
from rollplex.schedule.turn import Turn, check_memory


class Rollplex:
    """While groups decode, prefixes of the reference and then of the actor run beside them, as far as they fit.

    Those that found no place run when their turn comes. There may be nothing to move: in one process without a
    reference, where the engine's prefill is the actor's prefix (`prefill_is_actor_prefix`), and with whole sequences.
    """

    name = "rollplex"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Runs every step that fits into memory one task at a time."""
        check_memory(self.name, spec, limits, spec.by_stage)

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """The rollout first, prefixes beside it; after the last response pass by pass."""
        turn = Turn(state, state.spec.by_stage)
        turn.offer_rewards()
        if not turn.state.all_done(Phase.DECODE):
            turn.offer_rollout()
            turn.offer_passes(Phase.REF_PREFIX, Phase.ACTOR_PREFIX)
        else:
            turn.offer_next()
        return tuple(turn.launches)
