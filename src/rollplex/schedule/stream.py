"""A group that is complete is scored, trained on and done with while others still decode. Exact for one optimizer step.

Gradients add up, and all weights that others read stay as they are until OPTIMIZER: so the update is that of `serial`,
up to the order of its sums (groups are taken as they become complete). Two things must be known before a group is
trained on: its advantages, so they may be made from its own rewards only; and the scale of its loss, or else the scale
must be one common factor that can be applied to the summed gradient at the end (`SCALES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rollplex.errors import ConfigError
from rollplex.schedule.spec import PER_STEP, AdvantageScope, Phase, StepSpec, Task
from rollplex.schedule.step import Launch, Limits, StepState
from rollplex.schedule.turn import Turn, check_memory


class Scale(StrEnum):
    """When the normalisation of a loss is known (formulas: docs/losses.md)."""

    KNOWN = "known"  # from a response's own length, the number of responses and the options
    AT_END = "at end"  # 1 / tokens of the step: sum without it, divide the summed gradient once, before clipping


SCALES: Mapping[str, Scale] = {
    "grpo": Scale.KNOWN,
    "gspo": Scale.KNOWN,
    "dr_grpo": Scale.KNOWN,
    "rloo": Scale.KNOWN,
    "bnpo": Scale.AT_END,
    "dapo": Scale.AT_END,
    "cispo": Scale.AT_END,
    # Its scale could be applied at the end too, but its advantages are made from the rewards of the batch: refused.
    "reinforce_pp": Scale.AT_END,
}

# Of several passes that may start, the first of these goes first: whatever brings a group nearer to its end, since
# that frees what it holds; prefixes of groups that still decode fill the rest.
_URGENCY = (
    Phase.PREFIX_BACKWARD,
    Phase.ACTOR_RESPONSE,
    Phase.REF_RESPONSE,
    Phase.REF_PREFIX,
    Phase.ACTOR_PREFIX,
    *PER_STEP,
)


def _orders(spec: StepSpec) -> tuple[tuple[Task, ...], ...]:
    """Rollouts of all groups first where they fit together, so that no boundary takes the room of a rollout; else one
    group to its end before the next is begun, which needs the least."""
    return spec.by_stage, spec.by_group


class Stream:
    """Any pass of any group runs as soon as its needs are done, beside decoding while there is decoding."""

    name = "stream"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses steps for which training before the last response is there would not be exact."""
        if spec.optimizer_steps > 1:
            raise ConfigError(
                f"schedule 'stream' is exact for one optimizer step per rollout, found {spec.optimizer_steps} "
                "(algorithm.steps_per_generation x algorithm.num_iterations): the first would move the weights that "
                "others still decode with; set both to 1, or use schedule 'rollplex'"
            )
        if spec.advantage is AdvantageScope.BATCH:
            raise ConfigError(
                "schedule 'stream' needs advantages made from a group's own rewards; algorithm.scale_rewards=batch and "
                "loss_type=reinforce_pp need all rewards of the rollout; use scale_rewards=group, or 'rollplex'"
            )
        if spec.resampling:
            raise ConfigError(
                "schedule 'stream' trains on a group at once; with algorithm.dynamic_sampling=resample the last round "
                "decides which groups, if any, the step learns from; turn it off, or use schedule 'rollplex'"
            )
        check_memory(self.name, spec, limits, *_orders(spec))

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """The rollout first; then what is most urgent."""
        turn = Turn(state, *_orders(state.spec))
        turn.offer_rewards()
        turn.offer_rollout()
        turn.offer_passes(*_URGENCY)
        return tuple(turn.launches)
