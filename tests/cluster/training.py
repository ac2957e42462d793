"""What each process does in test_training.py: one optimizer step of its share of the model, and of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from numerics.cases import RecordingOptimizer, Rig, config_of, groups_of, moved, ragged_lengths, tiny_rig
from rollplex.config import Config, SharingConfig
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import Activations
from rollplex.models.shard_plan import shard_plan
from rollplex.parallel.data_shards import DataShards
from rollplex.parallel.groups import Job, TrainGrid, block_peers, train_grid
from rollplex.train.data_parallel import totals_over_ranks
from rollplex.train.microbatch import items_of
from rollplex.train.optimizer import OptimizerStep
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.sharded_optimizer import ShardedOptimizer
from rollplex.train.update import FrozenLogps, PassResult, Updater
from rollplex.types import ScoredGroup
from rollplex.weights.bind import bound, shape_of_model, store
from rollplex.weights.layout import SharingPlan, plan_sharing
from rollplex.weights.publish import Publisher
from rollplex.weights.share import Backing, Side

Tensors = dict[str, torch.Tensor]
SIZES = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}


@dataclass(frozen=True)
class Case:
    """A model, its groups, and which data-parallel rank has which."""

    family: str
    names: tuple[str, ...]  # of numerics.cases.EXAMPLES, one group each
    degree: int
    rollout_degree: int
    owners: tuple[int, ...]  # data-parallel rank of each group
    mode: Activations = "graph"
    tied: bool = False
    beta: float = 0.0
    vocab: int = 384
    chunk_tokens: int | None = None  # of the several processes; one runs whole passes

    @property
    def block(self) -> int:
        """Devices that share one copy of the weights."""
        return max(self.degree, self.rollout_degree)

    @property
    def config(self) -> Config:
        """Small micro-batches, so that a rank runs several; the gradient's norm is clipped."""
        return config_of(
            train={"micro_batch_tokens": 40, "max_grad_norm": 0.05, "weight_decay": 0.1, "learning_rate": 1e-3},
            algorithm={"beta": self.beta},
        )

    def rig(self, dtype: torch.dtype = torch.float64) -> Rig:
        """A fresh copy of the model."""
        return tiny_rig(self.family, dtype, tie_word_embeddings=self.tied, **SIZES)

    def groups(self, rig: Rig) -> list[ScoredGroup]:
        """The same on every process."""
        lengths = [ragged_lengths(3, seed) for seed in range(len(self.names))]
        return groups_of(rig.specs(self.names), self.names, lengths, rig.plain_vocab)


class Recording(ShardedOptimizer):
    """Keeps this rank's gradient, complete and before clipping, by parameter name."""

    def _clip(self) -> float:
        self.gradients = {name: g.clone() for name, g in self._gradients().items()}
        return super()._clip()


def plan_of(rig: Rig, degree: int, rollout_degree: int) -> SharingPlan:
    """Shards of the rig's model, each matrix apart on both sides."""
    sharing = SharingConfig(train_tp=degree, rollout_tp=rollout_degree)
    return plan_sharing(shard_plan(shape_of_model(rig.loaded.model)), sharing)


def one_process(case: Case) -> dict[str, Any]:
    """What it must be: the product's own update in one process."""
    config = case.config
    with full_float64():
        rig = case.rig()
        groups = case.groups(rig)
        reference = Reference(Policy(moved(rig.loaded.model))) if case.beta else None
        optimizer = RecordingOptimizer(rig.loaded.model, config.train, 1)
        updater = Updater(rig.policy, optimizer, reference, config)
        book = PrefixBook(rig.policy, config.train.micro_batch_tokens)
        book.compute({s.group.rollout_id: s.group.spec for s in groups}, case.mode)
        metrics = updater.update(groups, book, updater.frozen_logps([s.group for s in groups], book))
    return {
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "gradients": optimizer.steps[0],
        "weights": {name: p.detach() for name, p in rig.loaded.model.named_parameters()},
    }


def one_step(job: Job, case: Case) -> dict[str, Any]:
    """This rank's gradients and weights after one optimizer step, and its share of the loss."""
    grid = train_grid(job, case.degree, case.block)
    with ExitStack() as stack:
        stack.enter_context(full_float64())
        rig = case.rig()
        plan = plan_of(rig, case.degree, case.rollout_degree)
        block = block_peers(job, case.block)
        backing = Backing.create(plan, block.rank, torch.float64, torch.device("cpu"))
        backing.load(dict(rig.loaded.model.named_parameters()), "start")
        publisher = Publisher(plan, backing, block, bucket_bytes=1 << 16, check=True)
        model = bound(rig.loaded.model, backing.tensors(Side.TRAIN), trainable=True)
        policy = Policy(model, grid.tensor, chunk_tokens=case.chunk_tokens)
        reference = _reference(rig, plan, grid, block.rank, case.chunk_tokens) if case.beta else None
        data = DataShards(policy, grid.data_mesh, grid.data) if grid.data.size > 1 else None
        optimizer = Recording(model, case.config.train, 1, tensors=plan.plan.tensors, ranks=grid.tensor, data=data)
        updater = Updater(policy, optimizer, reference, case.config)
        own = [g for g, owner in zip(case.groups(rig), case.owners, strict=True) if owner == grid.data.rank]
        results = _passes(updater, own, case, grid)
        steps: list[OptimizerStep] = []

        def write() -> None:
            steps.append(updater.apply(own))
            if data is not None:
                store(model, backing.tensors(Side.TRAIN))

        publisher.publish(write)
        shards = optimizer.masters if data is not None else dict(model.named_parameters())
        return {
            "rank": (grid.data.rank, grid.tensor.rank),
            "loss": sum(float(metrics.sums["loss"]) for metrics, _ in results),
            "grad_norm": steps[0].grad_norm,
            "gradients": optimizer.gradients,
            "weights": {name: tensor.detach().clone() for name, tensor in shards.items()},
            "rollout": {name: view.clone() for name, view in backing.parameters(Side.ROLLOUT).items()},
        }


def _reference(rig: Rig, plan: SharingPlan, grid: TrainGrid, device: int, chunk_tokens: int | None) -> Reference:
    other = moved(rig.loaded.model)
    backing = Backing.create(plan, device, torch.float64, torch.device("cpu"))
    backing.load(dict(other.named_parameters()), "start")
    model = bound(other, backing.tensors(Side.TRAIN), trainable=False)
    return Reference(Policy(model, grid.tensor, chunk_tokens=chunk_tokens))


def _passes(updater: Updater, own: Sequence[ScoredGroup], case: Case, grid: TrainGrid) -> list[PassResult]:
    """All passes of one optimizer step on this rank's groups, with the sizes of all ranks' groups."""
    totals = totals_over_ranks(grid.data, items_of(own, mask_truncated=False))
    groups = [scored.group for scored in own]
    frozen = FrozenLogps(None, updater.reference_logps(groups) if updater.reference is not None else None)
    book = PrefixBook(updater.policy, case.config.train.micro_batch_tokens)
    book.compute({group.rollout_id: group.spec for group in groups}, case.mode)
    by_id = {scored.group.rollout_id: scored for scored in own}
    results: list[PassResult] = []
    for use in book.uses(list(by_id)):
        members = [by_id[rollout_id] for rollout_id in use.numbers]
        results += updater.respond(use, members, frozen, totals)
        updater.push_prefix(use, members)
    return results
