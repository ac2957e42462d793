"""AdamW on the trainable parameters, with fp32 masters under 16-bit weights, clipping and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rollplex.config import TrainConfig
from rollplex.errors import CheckpointError, TrainingError
from rollplex.train.host_state import HostState


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step did."""

    grad_norm: float  # global L2 norm before clipping
    learning_rate: float


def learning_rate_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine to 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


class PolicyOptimizer:
    """Owns the gradients between micro-batches: 16-bit weights accumulate theirs in the fp32 masters.

    One at a time for a model: `close` gives 16-bit weights their gradients back.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, total_steps: int, *, host_chunk_bytes: int | None = None):
        """host_chunk_bytes: keep AdamW's state (and masters) in host memory, and bring it to the device in chunks of so
        many bytes for each step; absent: it stays on the device."""
        self.config, self.total_steps, self.num_steps = config, total_steps, 0
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for name, weight in self.weights.items():
            self.masters[name] = self._master(name, weight)
        decayed = [self.masters[name] for name, weight in self.weights.items() if weight.ndim >= 2]
        plain = [self.masters[name] for name, weight in self.weights.items() if weight.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
        self.host_state: HostState | None = None
        if host_chunk_bytes is not None:
            own = [master for name, master in self.masters.items() if self._is_copy(name)]
            self.host_state = HostState(self.adamw, own, host_chunk_bytes)

    def _master(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What AdamW moves for `weight`: itself, or an fp32 copy that takes over the gradients of a 16-bit one."""
        if weight.dtype in (torch.float32, torch.float64):
            return weight
        self._hooks.append(weight.register_post_accumulate_grad_hook(self._accumulate(name)))
        return weight.detach().float()

    def _is_copy(self, name: str) -> bool:
        """Whether a master holds more than its weight, so that a checkpoint needs both."""
        return self.masters[name] is not self.weights[name]

    def _accumulate(self, name: str) -> Any:
        def hook(weight: torch.Tensor) -> None:
            master, gradient = self.masters[name], weight.grad
            assert gradient is not None  # the hook runs after accumulation
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)
            weight.grad = None

        return hook

    def fill_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Give those of `weights` that have no gradient one of zeros; AdamW leaves a weight without gradient alone."""
        wanted = {id(weight) for weight in weights}
        for name, weight in self.weights.items():
            master = self.masters[name]
            if id(weight) in wanted and master.grad is None:
                master.grad = torch.zeros_like(master)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all accumulated gradients: the normalisation of a loss that was not known before its last group."""
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    def step(self) -> OptimizerStep:
        """Clip, update, write 16-bit weights from their masters, drop the gradients.

        Raises TrainingError, with all weights as they were, when the gradient is not finite.
        """
        rate = learning_rate_at(self.num_steps, self.total_steps, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        norm = self._clip()
        if not math.isfinite(norm):
            self.drop_gradients()
            raise TrainingError(
                f"the gradient norm of optimizer step {self.num_steps + 1} is {norm}, needed a finite one; the weights "
                "were not changed. Lower train.learning_rate (in the warm start: warm_start.learning_rate) and go on "
                "from an earlier checkpoint, or use model.dtype=float32"
            )
        self.num_steps += 1  # before the first weight moves: who finds the old count finds the old weights
        self._adamw_step()
        self.drop_gradients()
        return OptimizerStep(norm, rate)

    def _clip(self) -> float:
        """Scale the gradients down to the largest norm allowed; their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.config.max_grad_norm))

    def _adamw_step(self) -> None:
        """AdamW's step on the gradients that are there, and 16-bit weights from their masters."""
        if self.host_state is not None:
            self.host_state.step(self._write_weights)
            return
        self.adamw.step()
        self._write_weights(list(self.masters.values()))

    def _write_weights(self, moved: Sequence[torch.Tensor]) -> None:
        """The weights from those of `moved` that are their masters, where those are copies."""
        wanted = {id(master) for master in moved}
        with torch.no_grad():
            for name, weight in self.weights.items():
                master = self.masters[name]
                if self._is_copy(name) and id(master) in wanted:
                    weight.copy_(master)

    def drop_gradients(self) -> None:
        """Forget all accumulated gradients."""
        self.adamw.zero_grad(set_to_none=True)
        for weight in self.weights.values():
            weight.grad = None

    def close(self) -> None:
        """Drop the gradients and let go of the weights; no step can follow."""
        self.drop_gradients()
        while self._hooks:
            self._hooks.pop().remove()

    def device_state(self) -> Iterator[torch.Tensor]:
        """Masters and moments, with the storages that they have now: none for what is in host memory."""
        for master in self.masters.values():
            yield master
            yield from self.adamw.state.get(master, {}).values()

    def named_state(self) -> dict[str, torch.Tensor]:
        """Everything needed to go on bitwise, keyed by '<state>/<parameter name>'."""
        state: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                state[f"{key}/{name}"] = self._readable(master, value)
            if self._is_copy(name):
                state[f"master/{name}"] = self._readable(master, master)
        return state

    def _readable(self, master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` where its content is."""
        return value if self.host_state is None else self.host_state.on_host(master, value)

    def load_named_state(self, state: dict[str, torch.Tensor], num_steps: int) -> None:
        """Inverse of `named_state`. A parameter without state has not had a gradient yet.

        Raises CheckpointError, before anything is changed, naming tensors that are not in the model, misshapen, or
        (fp32 masters of 16-bit weights) missing.
        """
        left_over = sorted({key.split("/", 1)[1] for key in state} - set(self.masters))
        if left_over:
            raise CheckpointError(
                f"optimizer state does not fit this model: not in the model {left_over[:3]}; resume with the model.* "
                "options of the checkpoint's config.yaml"
            )
        for name in self.masters:
            if self._is_copy(name) and f"master/{name}" not in state:
                raise CheckpointError(
                    f"optimizer state lacks the fp32 master of {name}; resume with the model.dtype of the checkpoint"
                )
        for key, value in state.items():
            kind, name = key.split("/", 1)
            needed = self.masters[name].shape
            if kind != "step" and value.shape != needed:
                raise CheckpointError(f"optimizer state {key} has shape {tuple(value.shape)}, needed {tuple(needed)}")
        everything: list[Sequence[torch.Tensor]] = [list(self.masters.values())]
        for masters in everything if self.host_state is None else self.host_state.in_turn():
            here = {id(master) for master in masters}
            for key, value in state.items():
                kind, name = key.split("/", 1)
                if id(self.masters[name]) in here:
                    self._load(self.masters[name], kind, value)
        self.num_steps = num_steps

    def _load(self, master: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        if kind == "master":
            master.copy_(value)
            return
        # Moments lie in memory as their weight does, which may be a transposed view (weights/layout.py).
        like = torch.empty_like(value, device=master.device) if kind == "step" else torch.empty_like(master)
        self.adamw.state[master][kind] = like.copy_(value)
