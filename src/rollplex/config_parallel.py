"""The section of the configuration about training in several processes. Part of the tree in config.py. Pure."""

from __future__ import annotations

from pydantic import Field

from rollplex.config_section import Section


class ParallelConfig(Section):
    """Training in several processes, started by torchrun; their tensor-parallel degrees are those of sharing."""

    deadline_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds that a process waits for the others at one place, in which they may still be sampling, "
        "before the run ends with an error.",
    )
