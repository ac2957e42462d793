"""Whether a configuration goes on with the run that wrote a checkpoint, and which checkpoint that is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollplex.config import Config, RunConfig
from rollplex.config_devices import MemoryConfig
from rollplex.config_rollout import VllmConfig
from rollplex.errors import CheckpointError
from rollplex.train.checkpoint_folder import newest_complete, verify_sizes

logger = logging.getLogger(__name__)

# Options that change where a run reports, how far it goes or how much it holds at once, but not which run it is.
MAY_CHANGE = frozenset(
    {
        "parallel.deadline_s",
        "run.output_dir",
        "run.num_threads",
        "run.save_steps",
        "run.save_total_limit",
        "run.resume_from_checkpoint",
        "run.log_completions_steps",
        "run.report_to",
        "run.eval_steps",
        "run.eval_rows",
        "run.trace_steps",
        "run.memory_steps",
        "data.eval_split",
        "data.media_workers",
        "data.media_timeout_s",
        "rewards.timeout_s",
        "sharing.train_tp",  # checkpoints hold whole tensors
        "sharing.rollout_tp",
        "sharing.train_layout",
        "sharing.rollout_layout",
        "sharing.vocab_padding",
        "schedule.overlap",
        "schedule.decode_threads",
        "schedule.window_threads",
        "schedule.window_sms",
        "schedule.pass_timeout_s",
        "rewards.on_timeout",
        "rollout.max_decode_rows",
        "rollout.decode_graphs",
        *(f"rollout.vllm.{name}" for name in VllmConfig.model_fields if name != "engine_dtype"),
        "train.max_steps",
        "train.micro_batch_tokens",
        "train.prefix_activations",
        "train.share_prefix",
        "warm_start.path",
        *(f"memory.{name}" for name in MemoryConfig.model_fields),  # where things are held changes no bit
    }
)


# What runs did before an option was there, where that is not its default.
_BEFORE: dict[str, dict[str, Any]] = {"algorithm": {"use_bias_correction_kl": False}}


def resolve_resume(run: RunConfig) -> Path | None:
    """The checkpoint that `run.resume_from_checkpoint` means; None to start afresh ('auto' with no checkpoint yet).

    Raises CheckpointError when a folder is named that is not there, or not a whole checkpoint.
    """
    wanted = run.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted == "auto":
        found = newest_complete(run.output_dir)
        if found is None:
            logger.warning(
                "run.resume_from_checkpoint is auto and %s has no complete checkpoint: starting", run.output_dir
            )
        return found
    folder = Path(wanted)
    if not folder.is_dir():
        newest = newest_complete(run.output_dir)
        hint = f"; the newest complete one is {newest}" if newest else ""
        raise CheckpointError(f"run.resume_from_checkpoint is {wanted}, which is no folder{hint}")
    verify_sizes(folder)
    return folder


def check_same_run(saved: Mapping[str, Any], config: Config, folder: Path) -> None:
    """Raises CheckpointError naming the options that may not differ between a checkpoint's config and `config`.

    `train.max_steps` may change under a constant learning rate only: the other schedules depend on it from the start.
    """
    free = MAY_CHANGE - ({"train.max_steps"} if config.train.lr_scheduler_type != "constant" else frozenset())
    changed = {key: values for key, values in changed_options(saved, config, folder).items() if key not in free}
    if changed:
        raise CheckpointError(
            f"{folder} is of a run with other options: {listed(changed)}; set them back, or start a new run from its "
            "weights with model.path"
        )


def changed_options(saved: Mapping[str, Any], config: Config, folder: Path) -> dict[str, tuple[Any, Any]]:
    """(value saved, value now) of each option that differs, by its key; options newer than `saved` had their defaults,
    or what _BEFORE says. Two of `algorithm` count as what they come to.

    Raises CheckpointError when `saved`, found in `folder`, is no configuration that this version knows.
    """
    try:
        complete = Config.model_validate(_completed(saved))
    except ValidationError as error:
        raise CheckpointError(
            f"{folder} has a configuration that this version does not know: {error.errors()[0]['loc']}: "
            f"{error.errors()[0]['msg']}; resume with the version that wrote it"
        ) from error
    before, now = (
        dict(_leaves(c.model_dump(mode="json")))
        | {"algorithm.mismatch_correction": c.mismatch_correction}
        | {"algorithm.use_bias_correction_kl": c.algorithm.kl_by_ratio}
        for c in (complete, config)
    )
    keys = sorted(before.keys() | now.keys())
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _completed(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    sections = {name: {**options, **saved.get(name, {})} for name, options in _BEFORE.items() if name in saved}
    return {**saved, **sections}


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The first of `changed_options` as the middle of a sentence."""
    shown = "; ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in list(changed.items())[:5])
    return shown + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")


def _leaves(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty or absent section is a leaf."""
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        dotted = f"{path}.{key}" if path else str(key)
        leaves.extend(_leaves(value, dotted) if isinstance(value, Mapping) and value else [(dotted, value)])
    return leaves
