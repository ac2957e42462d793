"""Experiment trackers that also receive the metrics. Each is an optional package, imported here and only when named."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.types import StepReport


class Tracker(Protocol):
    """One open tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Finish; may flush."""


class Trackers:
    """All trackers of `run.report_to`. `metrics.jsonl` is written without them."""

    def __init__(self, config: Config, *, resume_step: int | None = None):
        """Open them, going on after `resume_step`. Raises ConfigError for one whose package is missing."""
        self._open: list[Tracker] = []
        for name in config.run.report_to:  # all first, so that a missing one leaves none open
            _require(name)
        try:
            for name in config.run.report_to:
                self._open.append(_OPENERS[name](config, resume_step or 0))
        except BaseException:
            self.close()
            raise

    def log(self, report: StepReport) -> None:
        """Send one step's metrics to each."""
        for tracker in self._open:
            tracker.log(report.step, report.metrics)

    def close(self) -> None:
        """Close each, in reverse order of opening."""
        while self._open:
            self._open.pop().close()


class _Tensorboard:
    def __init__(self, config: Config, resume_step: int):
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.run.output_dir) / "tensorboard"
        # Hides what a killed run had logged after the checkpoint that is resumed from.
        self.writer: Any = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, config: Config, resume_step: int):
        folder = Path(config.run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = _require("wandb").init(
            project="rollplex", name=folder.name, dir=str(folder), config=config.model_dump(mode="json")
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, config: Config, resume_step: int):
        self.trackio = _require("trackio")
        name = Path(config.run.output_dir).name
        self.trackio.init(project="rollplex", name=name, config=config.model_dump(mode="json"), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log({key: value for key, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self.trackio.finish()


_OPENERS: dict[str, Callable[[Config, int], Tracker]] = {
    "tensorboard": _Tensorboard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


def _require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"run.report_to names {name!r}, whose package cannot be imported ({error}): pip install "
            "'rollplex[trackers]', or leave it out"
        ) from error
