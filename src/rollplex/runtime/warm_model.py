"""Where RL starts from: the warm-started weights, made once and kept, so that a resume or a second run finds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.models.save import save_pretrained
from rollplex.parallel.team import ALONE, Team
from rollplex.runtime.session import PromptFeed, Session
from rollplex.runtime.warm_start import warm_start
from rollplex.train.checkpoint import load_weights
from rollplex.train.checkpoint_folder import atomic_folder, verify_checksums
from rollplex.train.resume import MAY_CHANGE, changed_options, listed

logger = logging.getLogger(__name__)

FOLDER = "warm-start"
SETTINGS = "warm_start.json"  # the configuration of the run that made it
OnStep = Callable[[int, int, dict[str, float]], None]


def kept_warm_start(config: Config) -> Path | None:
    """The folder of the warm-started model of `config`, when this run or one whose options give the same weights has
    made it before.

    Raises CheckpointError for a folder that is damaged or was made by other options, rather than overwriting it.
    """
    folder = _folder(config)
    if config.warm_start.steps == 0 or not (folder / SETTINGS).is_file():
        return None
    try:
        verify_checksums(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the warm-started model in {folder} is damaged: remove that folder to have it made again ({error})"
        ) from error
    saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    changed = {key: values for key, values in changed_options(saved, config, folder).items() if _decides(key)}
    if changed:
        raise CheckpointError(
            f"{folder} holds a model that was warm-started with other options: {listed(changed)}; give another folder "
            "as warm_start.path, or remove this one"
        )
    return folder


def ensure_warm_start(session: Session, kept: Path | None, on_step: OnStep, team: Team = ALONE) -> None:
    """Bring the session's policy to its starting weights: those in `kept`, or by a supervised stage whose result is
    then kept in `warm_start.path` (absent: the run folder). Of several processes the first takes the stage alone, step
    by step before the eyes of the others, who then read what it kept."""
    config, loaded = session.config, session.loaded
    if config.warm_start.steps == 0:
        return
    if kept is None and team.rank > 0:
        for number in range(config.warm_start.steps):
            _watch_step(team, number + 1)
        _watch_end(team)
        kept = kept_warm_start(config)
        if kept is None:
            raise CheckpointError(
                f"rank {team.rank} does not find the warm-started model that rank 0 has written to {_folder(config)}; "
                "processes on several hosts need a folder that all of them see (warm_start.path, run.output_dir)"
            )
    if kept is not None:
        load_weights(kept, loaded.model)
        session.policy.bump()
        logger.info("using the warm-started model in %s", kept)
        return

    def told(step: int, total: int, metrics: dict[str, float]) -> None:
        on_step(step, total, metrics)
        _watch_step(team, step)

    feed = PromptFeed(session)
    try:
        warm_start(session.policy, feed.rows(), session.answer_ids, config, told)
    finally:
        feed.close()
    with atomic_folder(_folder(config).absolute()) as temporary:
        save_pretrained(loaded.model, loaded.processor, temporary)
        settings = json.dumps(config.model_dump(mode="json"), indent=1) + "\n"
        (temporary / SETTINGS).write_text(settings, encoding="utf-8")
    _watch_end(team)


def _watch_step(team: Team, step: int) -> None:
    team.of_rank_0(None, f"warm-start step {step} of rank 0")


def _watch_end(team: Team) -> None:
    team.of_rank_0(None, "write of the warm-started model by rank 0")


def _folder(config: Config) -> Path:
    return Path(config.warm_start.path or Path(config.run.output_dir) / FOLDER)


def _decides(key: str) -> bool:
    """Whether an option decides the warm-started weights."""
    return key not in MAY_CHANGE and (key == "run.seed" or key.startswith(("model.", "data.", "warm_start.")))
