"""Both prefixes run in the decode window; all else is as in serial.py, to the last bit of the update."""

from __future__ import annotations

from rollplex.errors import ConfigError
from rollplex.schedule.spec import Phase, PrefixMode, StepSpec
from rollplex.schedule.step import Launch, Limits, StepState
from rollplex.schedule.turn import Turn, check_memory, stage_order


class Rollplex:
    """While groups decode, prefixes of the reference and then of the actor run beside them, as far as they fit.

    Those that found no place run when their turn comes. With one process and no reference there may be nothing to
    move: the engine's prefill is the actor's prefix then (`prefill_is_actor_prefix`).
    """

    name = "rollplex"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses whole sequences: they have no prefix pass that could move."""
        if spec.prefix is PrefixMode.WHOLE:
            raise ConfigError(
                "schedule 'rollplex' moves prefix passes into the decode window, and train.share_prefix=false has none "
                "apart from the response passes; share the prefix, or use schedule 'serial'"
            )
        check_memory(self.name, spec, limits, stage_order(spec))

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """The rollout first, prefixes beside it; after the last response pass by pass."""
        turn = Turn(state, stage_order(state.spec))
        turn.offer_rewards()
        if not turn.state.all_done(Phase.DECODE):
            turn.offer_rollout()
            for phase in (Phase.REF_PREFIX, Phase.ACTOR_PREFIX):
                turn.offer_passes(phase)
        else:
            turn.offer_next()
        return tuple(turn.launches)
