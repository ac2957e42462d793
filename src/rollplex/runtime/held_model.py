"""What this process holds of the model, and all that follows: optimizer, reference, engines, checkpoints.

`WholeModel` is a process of its own, `DividedModel` (divided_model.py) one of several. The trainer treats them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rollplex.config import Config
from rollplex.rollout.engines import Engines, build_engines
from rollplex.runtime.run_memory import RunMemory, run_memory
from rollplex.runtime.session import Session
from rollplex.train.checkpoint import RestoredState, load_checkpoint, save_checkpoint
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.reference import Reference


class HeldModel(Protocol):
    """The order of calls: `reference` while the weights are those that training starts from, then `start`."""

    session: Session  # its policy is the one that learns
    memory: RunMemory  # how what it holds is held

    def reference(self, *, adapters_are_fresh: bool) -> Reference:
        """The weights as they are now, frozen."""

    def start(self, total_steps: int, checkpoint: Path | None) -> tuple[PolicyOptimizer, RestoredState | None]:
        """The optimizer of a run of `total_steps` optimizer steps, and with `checkpoint` its weights and state."""

    def engines(self) -> Engines:
        """Where rollouts come from."""

    def save(self, folder: Path, optimizer: PolicyOptimizer, trainer_state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; all processes of the run must call it."""


class WholeModel:
    """All of it."""

    def __init__(self, config: Config, session: Session):
        self.config, self.session = config, session
        self.memory = run_memory(config, session.policy)

    def reference(self, *, adapters_are_fresh: bool) -> Reference:
        """The weights as they are now, frozen."""
        return Reference(self.session.policy, adapters_are_fresh=adapters_are_fresh)

    def start(self, total_steps: int, checkpoint: Path | None) -> tuple[PolicyOptimizer, RestoredState | None]:
        """The optimizer of a run of `total_steps` optimizer steps, and with `checkpoint` its weights and state."""
        optimizer = PolicyOptimizer(
            self.session.policy.model, self.config.train, total_steps, host_chunk_bytes=self.memory.host_chunk_bytes
        )
        if checkpoint is None:
            return optimizer, None
        model = self.session.loaded.model
        return optimizer, load_checkpoint(checkpoint, model=model, optimizer=optimizer, config=self.config)

    def engines(self) -> Engines:
        """Those that rollout.engine names."""
        return build_engines(self.config, self.session.policy, self.session.loaded.processor)

    def save(self, folder: Path, optimizer: PolicyOptimizer, trainer_state: Mapping[str, Any]) -> Path:
        """Write a checkpoint."""
        return save_checkpoint(
            folder,
            model=self.session.loaded.model,
            processor=self.session.loaded.processor,
            optimizer=optimizer,
            trainer_state=trainer_state,
            config=self.config,
        )
