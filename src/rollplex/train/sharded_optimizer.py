"""The policy's optimizer on one of several ranks: the same steps, on the rank's own part of every weight.

AdamW works element by element, so a part moves as it would in the whole; what needs all ranks is the gradient's norm,
and the gradients of what several ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rollplex.config import TrainConfig
from rollplex.models.shard_plan import PlanTensor
from rollplex.parallel.data_shards import DataShards
from rollplex.parallel.gradients import GradientSums
from rollplex.parallel.tensor_ranks import ProcessRanks
from rollplex.train.optimizer import OptimizerStep, PolicyOptimizer

Publish = Callable[[Callable[[], None]], None]
"""Runs a write of new weights, and hands them over to all that read them."""


class ShardedOptimizer(PolicyOptimizer):
    """PolicyOptimizer of a tensor-parallel rank; with `data`, of weights that data-parallel ranks divide further.

    tensors: the shard plan's. publish: who hands new weights over, where the rollout does not read those of training.
    All ranks must take the same steps. With `data` the model's weights are whole before and after a step.
    """

    def __init__(  # noqa: PLR0913 - those of PolicyOptimizer, and what makes the ranks
        self,
        model: nn.Module,
        config: TrainConfig,
        total_steps: int,
        *,
        tensors: Sequence[PlanTensor],
        ranks: ProcessRanks,
        data: DataShards | None = None,
        publish: Publish | None = None,
    ):
        self.sums, self.data, self._publish = GradientSums(tensors, ranks), data, publish
        super().__init__(model, config, total_steps)

    def fill_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """As PolicyOptimizer; with `data`, weights that another rank reaches are filled before gradients are summed."""
        if self.data is None:
            super().fill_gradients(weights)
            return
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all accumulated gradients."""
        if self.data is None:
            super().scale_gradients(factor)
            return
        for weight in self.weights.values():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def step(self) -> OptimizerStep:
        """Sum over ranks, clip by the whole model's norm, update."""
        if self.data is not None:
            for name, gradient in self.data.reduce().items():
                self.masters[name].grad = gradient
        self.sums.complete(self._gradients())
        if self._publish is None:
            return self._move()
        done: list[OptimizerStep] = []

        def write() -> None:
            done.append(self._move())

        self._publish(write)
        return done[0]

    def _move(self) -> OptimizerStep:
        """Clip and update; with `data`, the new weights are whole again."""
        try:
            return super().step()
        finally:
            if self.data is not None:
                self.data.gather()

    def _is_copy(self, name: str) -> bool:
        return super()._is_copy(name) if self.data is None else False  # with it, a master is the weight's own rows

    def _master(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return super()._master(name, weight) if self.data is None else self.data.local[name]

    def _clip(self) -> float:
        gradients = self._gradients()
        norm = self.sums.norm(gradients, None if self.data is None else self.data.peers)
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        if scale < 1.0:
            for gradient in gradients.values():
                gradient.mul_(scale)
        return norm

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}
