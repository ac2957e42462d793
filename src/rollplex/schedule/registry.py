"""Schedules by name. A further one is a line here, or 'module:Name' where a name is asked for."""

from __future__ import annotations

import importlib

from rollplex.errors import ConfigError
from rollplex.schedule.step import Schedule

SCHEDULES: dict[str, str] = {
    "serial": "rollplex.schedule.serial:Serial",
    "rollplex": "rollplex.schedule.rollplex:Rollplex",
    "stream": "rollplex.schedule.stream:Stream",
}
"""For one set of devices that samples and trains: what `rollplex train` can run."""

HYBRID_SCHEDULES: dict[str, str] = {"hybrid": "rollplex.schedule.hybrid:Hybrid"}
"""For one set of devices that samples and trains, and others for the reference: in virtual time so far."""

POOL_SCHEDULES: dict[str, str] = {
    "disaggregated": "rollplex.schedule.pools:Disaggregated",
    "rolloutpipe": "rollplex.schedule.pools:RolloutPipe",
}
"""For a rollout pool and a trainer pool: in virtual time so far. `async` needs several steps at once: run.py."""


def schedule_named(name: str) -> Schedule:
    """The schedule of a registered name, or of 'module:Name'. Raises ConfigError for an unknown or unusable one."""
    known = SCHEDULES | HYBRID_SCHEDULES | POOL_SCHEDULES
    module_name, colon, attribute = known.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"schedule {name!r} is unknown; needed one of {', '.join(known)}, or 'module:Name'")
    try:
        schedule: Schedule = getattr(importlib.import_module(module_name), attribute)()
    except ModuleNotFoundError as error:
        raise ConfigError(f"schedule {name!r}: no module named {error.name!r}") from error
    except AttributeError as error:
        raise ConfigError(f"schedule {name!r}: module {module_name} has no {attribute!r}") from error
    except Exception as error:  # somebody else's code
        raise ConfigError(
            f"schedule {name!r}: {module_name}:{attribute} cannot be made into a schedule, needed a class without "
            f"arguments: {type(error).__name__}: {error}"
        ) from error
    missing = [part for part in ("name", "check", "ready") if not hasattr(schedule, part)]
    if missing:
        raise ConfigError(f"schedule {name!r}: it has no {' and no '.join(missing)} (schedule/step.py: Schedule)")
    return schedule
