"""What the traced steps of a run consisted of, from what its folder says: for calibrate.py. Pure.

A run folder has sums by step, not the length of each prompt and response. So all prompts of a step are taken to be
equally long, and its responses to be the quantiles of a log-normal with the step's mean and longest (lengths.py), dealt
to the groups at random, since the passes of a group are padded to its longest:

    R = responses x completions/mean_length       response tokens
    prompt = R (1 - u) / (responses u - prompts)  with u = prefix/unique_tokens_ratio = (R + prompts x prompt) /
                                                  (R + responses x prompt)
Of a prompt memory.visual_share are one video with frames of data.image_size. Spans with another span of the window's
lane beside them are left out: what co-running costs is no efficiency of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.models.shapes import shape_of
from rollplex.planner.calibrate import TracedStep
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware
from rollplex.planner.lengths import from_metrics
from rollplex.planner.load import GroupLoad, Prompt, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.passes import Algorithm
from rollplex.schedule.spec import PREFIXES, Phase
from rollplex.schedule.spec_from_config import prefix_mode
from rollplex.trace import Span

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_MEAN, _MOST = "completions/mean_length", "completions/max_length"
_UNIQUE = "prefix/unique_tokens_ratio"
_UNIT_PHASES = (Phase.PREFILL, *PREFIXES, Phase.ACTOR_RESPONSE)


def traced_steps(
    config: Config, spans: Sequence[Span], metrics: Sequence[Mapping[str, Any]], device: Hardware, *, eager: bool
) -> dict[int, TracedStep]:
    """The steps of a run that were traced, by number. eager: the passes ran without fused attention kernels.

    Raises ConfigError, naming the option, for a run whose steps cannot be told apart from its folder.
    """
    if config.model.lora is not None:
        raise ConfigError("the cost model counts full fine-tuning, found a run with model.lora; trace one without")
    if config.algorithm.dynamic_sampling == "resample":
        raise ConfigError("a run with algorithm.dynamic_sampling=resample has rounds of sampling; trace one without")
    if config.algorithm.steps_per_generation * config.algorithm.num_iterations != 1:
        raise ConfigError(
            "a step of several optimizer steps cannot be told apart; trace a run with algorithm.steps_per_generation "
            "and num_iterations at 1"
        )
    rows = {row["step"]: row for row in metrics if all(isinstance(row.get(k), float) for k in (_MEAN, _MOST, _UNIQUE))}
    side = run_side(config, device, eager=eager)
    found = {
        step: _traced(config, [span for span in spans if span.step == step], rows[step], side)
        for step in sorted({span.step for span in spans})
        if step in rows
    }
    return {step: traced for step, traced in found.items() if traced is not None}


def run_side(config: Config, device: Hardware, *, eager: bool) -> Side:
    """The model of a run in one process, on its one device; both training and rollout."""
    shape = shape_of(config.model)
    counts = ModelCounts(
        shape,
        _DTYPE_BYTES[config.model.dtype],
        shape.text.experts,
        vision_trained=not config.model.freeze_vision,
        eager=eager,
    )
    return Side(counts, device, Parallel())


def run_cost(config: Config, row: Mapping[str, float], prompts: int, side: Side, *, pack: int) -> StepCost:
    """A step of `prompts` prompts with the lengths of a row of metrics.jsonl. pack: prompts of a pass."""
    algorithm = Algorithm(
        reference=config.algorithm.beta > 0,
        old_logps=config.algorithm.kl_in_reward,
        prefix=prefix_mode(config),
        activations=config.train.prefix_activations,
        prefill_is_actor_prefix=config.train.share_prefix and config.rollout.engine == "local",
        micro_batch_tokens=config.train.micro_batch_tokens,
        pack_groups=pack,
    )
    return StepCost(side, side, algorithm, _groups(config, row, prompts, side), max_rows=config.rollout.max_decode_rows)


def _traced(config: Config, spans: Sequence[Span], row: Mapping[str, float], side: Side) -> TracedStep | None:
    decoded = [span.group for span in spans if span.name == Phase.DECODE and span.group is not None]
    ids = tuple(dict.fromkeys(decoded))
    if not ids:
        return None
    units = _units(spans, ids)
    return TracedStep(run_cost(config, row, len(ids), side, pack=max(map(len, units))), ids, units)


def _units(spans: Sequence[Span], ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Prompts whose passes ran together: each pass carries the id of its first, the others are dealt out in turn."""
    labels = {span.group for span in spans if span.name in _UNIT_PHASES}
    firsts = [i for i in ids if i in labels] or list(ids)
    rest = [i for i in ids if i not in firsts]
    return tuple((first, *rest[place :: len(firsts)]) for place, first in enumerate(firsts))


def _groups(config: Config, row: Mapping[str, float], prompts: int, side: Side) -> tuple[GroupLoad, ...]:
    generations, mean = config.rollout.num_generations, row[_MEAN]
    total, unique = prompts * generations * mean, row[_UNIQUE]
    left = prompts * (generations * unique - 1)
    if left <= 0 or unique >= 1:
        raise ConfigError(
            f"{_UNIQUE} is {unique}: prompts cannot be told from responses; trace a run with rollout.num_generations "
            "above 1"
        )
    prompt = _prompt(config, max(1, round(total * (1 - unique) / left)), side)
    lengths = from_metrics([row], prompts * generations, config.rollout.max_completion_length)
    dealt = np.random.default_rng(int(row["step"])).permutation(lengths.quantiles(prompts * generations))
    return tuple(GroupLoad(prompt, tuple(int(n) for n in of_one)) for of_one in dealt.reshape(prompts, generations))


def _prompt(config: Config, tokens: int, side: Side) -> Prompt:
    vision = side.counts.shape.vision
    across = max(1, config.data.image_size // (vision.patch_size * vision.spatial_merge_size))
    visual = round(config.memory.visual_share * tokens)
    return video_prompt(tokens, visual, vision, tokens_per_frame=across * across)
