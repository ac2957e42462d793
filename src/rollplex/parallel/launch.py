"""Which of a job's processes this one is, as torchrun says in the environment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollplex.errors import ConfigError

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")  # where env:// meets


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that were started together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on its own host: the number of its device


def launched(environment: Mapping[str, str]) -> Launch:
    """As torchrun has set the variables; one process where they are not all there.

    Raises ConfigError for values that are no ranks.
    """
    if not all(name in environment for name in (*_PLACE, *_MEETING)):
        return Launch()
    found = ", ".join(f"{name}={environment[name]}" for name in _PLACE)
    try:
        rank, world, local_rank = (int(environment[name]) for name in _PLACE)
    except ValueError as error:
        raise ConfigError(
            f"{found} in the environment, needed whole numbers; start the processes with torchrun"
        ) from error
    if not 0 <= rank < world or local_rank < 0:
        raise ConfigError(f"{found} in the environment is no place in a job; start the processes with torchrun")
    return Launch(rank, world, local_rank)


def refuse_several(environment: Mapping[str, str], command: str, instead: str) -> None:
    """Raises ConfigError where torchrun has started more than one process of a command that is one."""
    world = launched(environment).world
    if world > 1:
        raise ConfigError(f"{command} is one process, and torchrun has started {world}; start {instead!r} so instead")


def voice(environment: Mapping[str, str]) -> str:
    """What an error message begins with where several processes write to one terminal."""
    several = environment.get("WORLD_SIZE", "1") != "1" and all(name in environment for name in (*_PLACE, *_MEETING))
    return f"rank {environment['RANK']}: " if several else ""
