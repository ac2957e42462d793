"""Experiment trackers that also receive the metrics. Each is an optional package, imported here and only when named."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.types import StepReport

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One open tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Finish; may flush."""


class Trackers:
    """All trackers of `run.report_to`. `metrics.jsonl` is written without them, so that one that fails while the run
    goes on (a network, a full quota) costs its own curves and not the run: it is warned about and tried again."""

    def __init__(self, config: Config, *, resume_step: int | None = None):
        """Open them, going on after `resume_step`. Raises ConfigError for one whose package is missing, and what one
        raises that cannot be opened."""
        self._open: dict[str, Tracker] = {}
        self._failing: set[str] = set()  # since their newest success
        for name in config.run.report_to:  # all first, so that a missing one leaves none open
            _require(name)
        try:
            for name in config.run.report_to:
                self._open[name] = _OPENERS[name](config, resume_step or 0)
        except BaseException:
            self.close()
            raise

    def log(self, report: StepReport) -> None:
        """Send one step's metrics to each."""
        for name, tracker in self._open.items():
            try:
                tracker.log(report.step, report.metrics)
            except Exception as error:  # noqa: BLE001 - a service's client may raise anything
                if name not in self._failing:  # once per outage
                    _warn(name, f"did not take the metrics of step {report.step}", error)
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def close(self) -> None:
        """Close each, in reverse order of opening."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as in log
                _warn(name, "could not be closed, and may lack the newest steps", error)


def _warn(name: str, what: str, error: Exception) -> None:
    logger.warning(
        "tracker %s (run.report_to) %s: %s: %s; the run goes on, and metrics.jsonl in its folder has every step",
        name,
        what,
        type(error).__name__,
        error,
    )


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
