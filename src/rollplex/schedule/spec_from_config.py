"""A run's configuration as descriptions of its optimizer steps."""

from __future__ import annotations

from dataclasses import replace

from rollplex.config import Config
from rollplex.schedule.spec import AdvantageScope, Hold, PrefixMode, StepSpec


def steps_of_rollout(
    config: Config, *, prefill_is_actor_prefix: bool, holds: tuple[Hold, ...] = ()
) -> tuple[StepSpec, ...]:
    """One description per optimizer step over one rollout; the first samples all groups and scores them.

    prefill_is_actor_prefix: the engine decodes on the update's own prefixes (only with train.share_prefix).
    """
    algorithm, count = config.algorithm, config.rollout.prompts_per_step
    parts, epochs = algorithm.steps_per_generation, algorithm.num_iterations
    by_batch = algorithm.loss_type == "reinforce_pp" or algorithm.scale_rewards == "batch"
    whole = StepSpec(
        num_groups=count,
        reference=algorithm.beta > 0,
        old_logps=parts * epochs > 1 or algorithm.kl_in_reward,
        prefix=PrefixMode.SHARED if config.train.share_prefix else PrefixMode.WHOLE,
        prefill_is_actor_prefix=prefill_is_actor_prefix,
        advantage=AdvantageScope.BATCH if by_batch else AdvantageScope.GROUP,
        optimizer_steps=parts * epochs,
        resampling=algorithm.dynamic_sampling == "resample",
        holds=holds,
    )
    size = count // parts
    trained = [tuple(range(start, start + size)) for start in range(0, count, size)] * epochs
    later = replace(whole, rollout=False, reference=False, old_logps=False, prefill_is_actor_prefix=False)
    return tuple(replace(whole if n == 0 else later, trained=groups) for n, groups in enumerate(trained))
