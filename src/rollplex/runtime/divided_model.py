"""This process's part of a model that several processes train: its shard, what hands it over, whole checkpoints of it.

    whole model of the session --Backing--> its shard of training's degree: the policy that learns
                               --Backing--> its shard of the rollout's: what samples, where the degrees differ
    shard of training --FSDP2--> rows of it, where there are several replicas
Weights come in whole in every process and are dropped once the shard has its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollplex.config import Config
from rollplex.models.load import LoadedModel
from rollplex.models.policy import Policy
from rollplex.models.ranks import ALONE
from rollplex.models.save import stored_state
from rollplex.models.shard_plan import shard_plan
from rollplex.models.tensor_files import StoredTensor, sliced_tensors
from rollplex.parallel.data_shards import DataShards
from rollplex.parallel.groups import rollout_ranks
from rollplex.parallel.team import ProcessTeam
from rollplex.rollout.block_engine import BlockEngines
from rollplex.rollout.decode_graphs import decode_graphs
from rollplex.rollout.engines import Engines, LocalEngines
from rollplex.runtime.run_memory import run_memory
from rollplex.runtime.session import Session
from rollplex.train.checkpoint import (
    RestoredState,
    WholeState,
    check_checkpoint,
    load_optimizer,
    save_checkpoint,
)
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.reference import Reference
from rollplex.train.sharded_optimizer import Publish, ShardedOptimizer
from rollplex.weights.bind import bound, shape_of_model, store
from rollplex.weights.layout import plan_sharing
from rollplex.weights.publish import Publisher
from rollplex.weights.share import Backing, Side
from rollplex.weights.whole import WholeTensors


class DividedModel:
    """HeldModel of one process of `team`. Raises ConfigError, naming the option, for degrees that do not divide it."""

    def __init__(self, config: Config, session: Session, team: ProcessTeam):
        whole, policy, grid = session.loaded.model, session.policy, team.grid
        self.config, self.team = config, team
        self.memory = run_memory(config, policy)
        self.plan = plan_sharing(shard_plan(shape_of_model(whole)), config.sharing)
        self.tensors = WholeTensors(self.plan, grid.tensor)
        self._backing: Backing | None = Backing.create(self.plan, team.place, policy.dtype, policy.device)
        self._backing.load(dict(whole.named_parameters()), "the weights that training starts from")
        actor = bound(whole, self._backing.tensors(Side.TRAIN), trainable=True)
        self.policy = Policy(actor, grid.tensor if grid.tensor.size > 1 else ALONE, chunk_tokens=policy.chunk_tokens)
        self.policy.weight_version = team.of_rank_0(policy.weight_version, "version of the weights")
        self._sampler: Policy | None = None
        if team.arranged.rollout_groups > 1:
            shard = bound(whole, self._backing.tensors(Side.ROLLOUT), trainable=False)
            ranks = rollout_ranks(team.job, team.arranged.rollout_tp, team.arranged.train_tp)
            self._sampler = Policy(shard, ranks if ranks.size > 1 else ALONE, chunk_tokens=policy.chunk_tokens)
        self._data: DataShards | None = None
        self.structure = _without_weights(whole)
        loaded = LoadedModel(self.structure, session.loaded.processor)
        self.session = replace(session, loaded=loaded, policy=self.policy)

    def reference(self, *, adapters_are_fresh: bool) -> Reference:
        """This process's shard as it is now, frozen."""
        return Reference(self.policy, adapters_are_fresh=adapters_are_fresh)

    def start(self, total_steps: int, checkpoint: Path | None) -> tuple[PolicyOptimizer, RestoredState | None]:
        """As HeldModel; of a checkpoint only the slices that are held here are read. It may be of any degree."""
        team, restored, backing = self.team, None, self._backing
        assert backing is not None  # `start` is called once
        if checkpoint is not None:
            restored = check_checkpoint(checkpoint, model=self.structure, config=self.config)
            with sliced_tensors(checkpoint) as slices:
                backing.load(slices, f"{checkpoint}")
        if team.replicas > 1:
            self._data = DataShards(self.policy, team.grid.data_mesh, team.grid.data)
        optimizer = ShardedOptimizer(
            self.policy.model,
            self.config.train,
            total_steps,
            tensors=self.plan.plan.tensors,
            ranks=team.grid.tensor,
            data=self._data,
            publish=self._publish(backing),
        )
        if checkpoint is not None and restored is not None:
            load_optimizer(checkpoint, optimizer, restored, part=self._part)
        if self._data is not None and self._sampler is None:
            self._backing = None  # FSDP2 has the weights now, and nobody samples from other ones
        return optimizer, restored

    def engines(self) -> Engines:
        """The local engine: on the weights of training, or on the rollout's views of them."""
        rows, team = self.config.rollout.max_decode_rows, self.team
        if self._sampler is None:
            return LocalEngines(self.policy, rows, decode_graphs(self.config, self.policy, processes=team.size))
        groups, block = team.arranged.rollout_groups, team.grid.tensor.peers
        # Ranks of one rollout group are `groups` apart in their block (parallel/groups.py).
        return BlockEngines(self._sampler, block, group=team.place % groups, groups=groups, max_rows=rows)

    def save(self, folder: Path, optimizer: PolicyOptimizer, trainer_state: Mapping[str, Any]) -> Path:
        """Rank 0 writes whole tensors, each gathered when its turn comes; the others wait until it is on disk."""
        whole = WholeState(self._stored_weights(), self._stored_optimizer(optimizer))
        if self.team.rank == 0:
            save_checkpoint(
                folder,
                model=self.structure,
                processor=self.session.loaded.processor,
                optimizer=optimizer,
                trainer_state=trainer_state,
                config=self.config,
                whole=whole,
            )
        else:
            whole.read()
        return self.team.of_rank_0(folder.absolute(), f"write of {folder.name}")

    def _publish(self, backing: Backing) -> Publish | None:
        """Hands new weights to the sampler; None: it reads those of training."""
        if self._sampler is None:
            return None
        sampler, model, data, views = self._sampler, self.policy.model, self._data, backing.tensors(Side.TRAIN)
        publisher = Publisher(self.plan, backing, self.team.grid.tensor.peers, dependents=[sampler.published])

        def publish(write: Callable[[], None]) -> None:
            def write_all() -> None:
                write()
                if data is not None:  # its weights are copies
                    store(model, views)

            publisher.publish(write_all)

        return publish

    def _stored_weights(self) -> list[StoredTensor]:
        model = self.policy.model
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        return [
            StoredTensor(name, like.numel() * like.element_size(), self._gather(name, parameters[name]))
            if name in parameters
            else StoredTensor.of(name, buffers[name])
            for name, like in stored_state(self.structure).items()
        ]

    def _stored_optimizer(self, optimizer: PolicyOptimizer) -> list[StoredTensor]:
        stored = []
        for key, tensor in optimizer.named_state().items():
            kind, name = key.split("/", 1)
            if kind == "step":  # a number, the same everywhere
                stored.append(StoredTensor.of(key, tensor))
                continue
            size = int(torch.Size(self.tensors.shape(name)).numel()) * tensor.element_size()
            stored.append(StoredTensor(key, size, self._gather(name, tensor, divided=self._data is not None)))
        return stored

    def _gather(self, name: str, part: torch.Tensor, *, divided: bool = False) -> Callable[[], torch.Tensor]:
        """Reads, on rank 0, the whole of what lies as weight `name` does; divided: FSDP2 has cut `part` further."""

        def read() -> torch.Tensor:
            rows = part if not divided or self._data is None else self._data.whole(name, part)
            return self.tensors.whole(name, rows) if self.team.replica == 0 else rows  # the others hold the same

        return read

    def _part(self, key: str, full: torch.Tensor) -> torch.Tensor:
        """What the optimizer here holds of one entry of its state."""
        kind, name = key.split("/", 1)
        if kind == "step":
            return full
        part = self.tensors.part(name, full)
        return part if self._data is None else self._data.rows(part)


def _without_weights(model: Any) -> Any:
    """`model` with its parameters on the meta device: names, sizes and configuration. Nothing that is bound to its
    buffers, or was to its parameters, changes."""
    model.to("meta")
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    return model
