"""Where RL starts from: the warm-started weights, made once and kept, so that a resume or a second run finds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.models.save import save_pretrained
from rollplex.runtime.session import PromptFeed, Session
from rollplex.runtime.warm_start import warm_start
from rollplex.train.checkpoint import load_weights
from rollplex.train.checkpoint_folder import atomic_folder, verify_checksums
from rollplex.train.resume import MAY_CHANGE, changed_options, listed

logger = logging.getLogger(__name__)

FOLDER = "warm-start"
SETTINGS = "warm_start.json"  # the configuration of the run that made it
OnStep = Callable[[int, int, dict[str, float]], None]


def ensure_warm_start(session: Session, on_step: OnStep) -> None:
    """Bring the session's policy to its starting weights, by a supervised stage unless its result is there already.

    The result is kept in `warm_start.path` (absent: the run folder) and used again by any run whose options give the
    same weights. Raises CheckpointError for a folder that is damaged or was made by other options, rather than
    overwriting it.
    """
    config = session.config
    if config.warm_start.steps == 0:
        return
    folder = Path(config.warm_start.path or Path(config.run.output_dir) / FOLDER)
    if (folder / SETTINGS).is_file():
        _reuse(session, folder)
        return
    feed = PromptFeed(session)
    try:
        warm_start(session.policy, feed.rows(), session.answer_ids, config, on_step)
    finally:
        feed.close()
    with atomic_folder(folder.absolute()) as temporary:
        save_pretrained(session.loaded.model, session.loaded.processor, temporary)
        settings = json.dumps(config.model_dump(mode="json"), indent=1) + "\n"
        (temporary / SETTINGS).write_text(settings, encoding="utf-8")


def _reuse(session: Session, folder: Path) -> None:
    try:
        verify_checksums(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the warm-started model in {folder} is damaged: remove that folder to have it made again ({error})"
        ) from error
    saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    changed = {key: values for key, values in changed_options(saved, session.config, folder).items() if _decides(key)}
    if changed:
        raise CheckpointError(
            f"{folder} holds a model that was warm-started with other options: {listed(changed)}; give another folder "
            "as warm_start.path, or remove this one"
        )
    load_weights(folder, session.loaded.model)
    session.policy.bump()
    logger.info("using the warm-started model in %s", folder)


def _decides(key: str) -> bool:
    """Whether an option decides the warm-started weights."""
    return key not in MAY_CHANGE and (key == "run.seed" or key.startswith(("model.", "data.", "warm_start.")))
