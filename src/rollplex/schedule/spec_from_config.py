"""A run's configuration as descriptions of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollplex.config import Config
from rollplex.schedule.spec import AdvantageScope, Hold, PrefixMode, StepSpec


def prefix_mode(config: Config) -> PrefixMode:
    """How often the update of `config` computes a prompt."""
    if config.train.share_prefix:
        return PrefixMode.SHARED
    return PrefixMode.WHOLE if config.train.unshared_prefix == "whole" else PrefixMode.PER_RESPONSE


def graph_crosses_lanes(config: Config) -> bool:
    """Whether a prompt's graph may be kept from one lane to another: its backward then runs in the lane of its forward,
    whatever lane the schedule gave it."""
    own_pass = config.rollout.engine != "local" or prefix_mode(config) is PrefixMode.PER_RESPONSE
    moves = config.schedule.name != "rollplex" or own_pass
    return moves and config.train.prefix_activations != "recompute"


def steps_of_rollout(
    config: Config,
    *,
    prefill_is_actor_prefix: bool,
    minibatches: Sequence[int],
    sampled: bool = False,
    holds: tuple[Hold, ...] = (),
) -> tuple[StepSpec, ...]:
    """One description per optimizer step over one rollout; the first samples all groups and scores them.

    prefill_is_actor_prefix: the engine decodes on the update's own prefixes (only with train.share_prefix).
    minibatches: how many of the executor's groups each of algorithm.steps_per_generation steps learns from, in order.
    sampled: the groups are complete and rewarded already (dynamic sampling): the first step begins with scoring.
    """
    algorithm, parts = config.algorithm, config.algorithm.steps_per_generation
    epochs = algorithm.num_iterations
    if len(minibatches) != parts:
        raise ValueError(f"{len(minibatches)} minibatches, needed {parts} (algorithm.steps_per_generation)")
    by_batch = algorithm.loss_type == "reinforce_pp" or algorithm.scale_rewards == "batch"
    whole = StepSpec(
        num_groups=sum(minibatches),
        rollout=not sampled,
        reference=algorithm.beta > 0,
        old_logps=parts * epochs > 1 or algorithm.kl_in_reward,
        prefix=prefix_mode(config),
        prefill_is_actor_prefix=prefill_is_actor_prefix,
        advantage=AdvantageScope.BATCH if by_batch else AdvantageScope.GROUP,
        optimizer_steps=parts * epochs,
        resampling=algorithm.dynamic_sampling == "resample",
        holds=holds,
    )
    bounds = [sum(minibatches[:part]) for part in range(parts + 1)]
    trained = [tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)] * epochs
    later = replace(whole, rollout=False, reference=False, old_logps=False, prefill_is_actor_prefix=False)
    return tuple(replace(whole if n == 0 else later, trained=groups) for n, groups in enumerate(trained))
