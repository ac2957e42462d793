"""Where RL starts from: the warm-started weights, made once and kept, so that a resume or a second run finds them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.models.save import stored_state, weights_stem
from rollplex.models.save import save_pretrained
from rollplex.models.tensor_files import read_tensors
from rollplex.runtime.session import PromptFeed, Session
from rollplex.runtime.warm_start import warm_start
from rollplex.train.checkpoint_folder import atomic_folder

logger = logging.getLogger(__name__)

FOLDER = "warm-start"
SETTINGS = "warm_start.json"
OnStep = Callable[[int, int, dict[str, float]], None]


def ensure_warm_start(session: Session, on_step: OnStep) -> bool:
    """Bring the session's policy to its starting weights; True when a supervised stage ran now.

    The result is kept in `warm_start.path` (absent: the run folder) with the settings that made it, and used again by
    any run with the same settings. A folder made by other settings is refused rather than overwritten.
    """
    config = session.config
    if config.warm_start.steps == 0:
        return False
    folder = Path(config.warm_start.path or Path(config.run.output_dir) / FOLDER)
    settings = _settings(config)
    if (folder / SETTINGS).is_file():
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        if found != settings:
            changed = sorted(k for k in settings.keys() | found.keys() if settings.get(k) != found.get(k))
            raise CheckpointError(
                f"{folder} holds a model that was warm-started with other settings (differing: {', '.join(changed)}); "
                "give another folder as warm_start.path, or remove it"
            )
        _load(session, folder)
        logger.info("using the warm-started model in %s", folder)
        return False
    feed = PromptFeed(session)
    try:
        warm_start(session.policy, feed.rows(), session.answer_ids, config, on_step)
    finally:
        feed.close()
    with atomic_folder(folder.absolute()) as temporary:
        save_pretrained(session.loaded.model, session.loaded.processor, temporary)
        (temporary / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return True


def _load(session: Session, folder: Path) -> None:
    targets = stored_state(session.loaded.model)
    with torch.no_grad():
        for name, tensor in read_tensors(folder, weights_stem(session.loaded.model)):
            targets[name].copy_(tensor)
    session.policy.bump()


def _settings(config: Config) -> dict[str, str]:
    """One digest per section that decides the warm-started weights."""
    tree = config.model_dump(mode="json")
    tree["warm_start"].pop("path")
    parts = {"model": tree["model"], "data": tree["data"], "warm_start": tree["warm_start"], "seed": config.run.seed,
             "micro_batch_tokens": config.train.micro_batch_tokens}
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16] for name, part in parts.items()
    }
