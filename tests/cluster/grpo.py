"""GRPO steps on one copy of the weights: training at one tensor-parallel degree, the rollout at another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cluster.training import SIZES
from numerics.cases import EXAMPLES, Rig, config_of, tiny_rig
from rollplex.config import Config, SharingConfig
from rollplex.models.policy import Policy
from rollplex.models.shard_plan import shard_plan
from rollplex.parallel.groups import Job, block_peers, rollout_ranks, train_grid
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.train.advantage import compute_advantages
from rollplex.train.metric_sums import merge_metrics
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.sharded_optimizer import ShardedOptimizer
from rollplex.train.update import FrozenLogps, PassResult, Updater
from rollplex.types import Group, PromptSpec, Response, ScoredGroup
from rollplex.weights.bind import bound, shape_of_model
from rollplex.weights.layout import SharingPlan, plan_sharing
from rollplex.weights.publish import Publisher
from rollplex.weights.share import Backing, Side

NAMES = ("image", "text", "video_image", "short_text")
STEPS = 5
Sampled = dict[int, tuple[Response, ...]]


def grpo_config() -> Config:
    """Plain GRPO. A wide epsilon: AdamW's step is smooth where a gradient is rounding only."""
    return config_of(
        train={"micro_batch_tokens": 60, "learning_rate": 3e-3, "adam_epsilon": 1e-3, "max_grad_norm": 1.0},
        rollout={"num_generations": 4, "max_completion_length": 6},
    )


def grpo_plan(rig: Rig, train_tp: int, rollout_tp: int) -> SharingPlan:
    """Training holds each matrix apart, the rollout multiplies q, k and v at once."""
    sharing = SharingConfig(train_tp=train_tp, rollout_tp=rollout_tp, rollout_layout="vllm")
    return plan_sharing(shard_plan(shape_of_model(rig.loaded.model)), sharing)


def in_one_process(family: str) -> list[dict[str, Any]]:
    """The steps with one policy that samples and trains."""
    rig, config = tiny_rig(family, torch.float32, **SIZES), grpo_config()
    optimizer = PolicyOptimizer(rig.loaded.model, config.train, STEPS)
    updater = Updater(rig.policy, optimizer, None, config)
    specs = rig.specs(NAMES)
    steps = []
    for number in range(STEPS):
        sampled = _sample(rig.policy, config, rig, specs, number, range(len(specs)))
        step = _learn(updater, config, specs, sampled, number, lambda write: write())
        weights = {name: p.detach().clone() for name, p in rig.loaded.model.named_parameters()}
        steps.append({**step, "weights": weights, "sampled": sampled})
    return steps


def on_ranks(job: Job, family: str, train_tp: int, rollout_tp: int) -> list[dict[str, Any]]:
    """The steps on `job.world` devices that hold one copy of the weights."""
    rig, config = tiny_rig(family, torch.float32, **SIZES), grpo_config()
    devices = max(train_tp, rollout_tp)
    grid, block = train_grid(job, train_tp, devices), block_peers(job, devices)
    sampling_ranks = rollout_ranks(job, rollout_tp, devices)
    plan = grpo_plan(rig, train_tp, rollout_tp)
    backing = Backing.create(plan, block.rank, torch.float32, torch.device("cpu"))
    backing.load(dict(rig.loaded.model.named_parameters()), "start")
    actor = Policy(bound(rig.loaded.model, backing.tensors(Side.TRAIN), trainable=True), grid.tensor)
    sampler = Policy(bound(rig.loaded.model, backing.tensors(Side.ROLLOUT), trainable=False), sampling_ranks)
    optimizer = ShardedOptimizer(actor.model, config.train, STEPS, tensors=plan.plan.tensors, ranks=grid.tensor)
    updater = Updater(actor, optimizer, None, config)
    publisher = Publisher(plan, backing, block, dependents=[sampler.published], bucket_bytes=4096, check=True)
    reports: list[Any] = []
    specs, replicas = rig.specs(NAMES), devices // rollout_tp
    steps = []
    for number in range(STEPS):
        with backing.version.reading("rollout") as version:
            assert version == number + 1  # 1 was the load
            own = _sample(sampler, config, rig, specs, number, range(block.rank % replicas, len(specs), replicas))
        sampled: Sampled = {}
        for part in block.exchange(own, "responses of all rollout replicas"):
            for key, responses in part.items():
                assert sampled.setdefault(key, responses) == responses, "ranks of one replica sampled differently"
        step = _learn(updater, config, specs, sampled, number, lambda write: reports.append(publisher.publish(write)))
        held = {name: view.clone() for name, view in backing.parameters(Side.ROLLOUT).items()}
        steps.append({**step, "weights": held, "sampled": sampled, "received": reports[-1].received_bytes})
    pointers = [{name: p.data_ptr() for name, p in policy.model.named_parameters()} for policy in (actor, sampler)]
    store = next(iter(backing.stores.values()))
    inside = [
        store.data_ptr() <= pointer < store.data_ptr() + store.nbytes for side in pointers for pointer in side.values()
    ]
    return [*steps, {"inside": all(inside), "buffers": backing.layout.buffer_numel}]


def _sample(  # noqa: PLR0917 - what a rollout needs
    policy: Policy, config: Config, rig: Rig, specs: Sequence[PromptSpec], step: int, mine: range
) -> Sampled:
    params = SamplingParams.from_config(
        config, stop_token_ids=(rig.plain_vocab,), banned_token_ids=policy.adapter.vision_token_ids
    )
    engine = LocalEngine(policy, params, max_rows=16)
    for index in mine:
        engine.admit(step * len(specs) + index, specs[index])
    found: dict[int, list[Response]] = {}
    while engine.busy:
        for finished in engine.step():
            found.setdefault(finished.rollout_id, []).append(finished.response)
    return {key: tuple(sorted(responses, key=lambda r: r.index)) for key, responses in found.items()}


def _learn(  # noqa: PLR0913, PLR0917 - a step's inputs
    updater: Updater,
    config: Config,
    specs: Sequence[PromptSpec],
    sampled: Sampled,
    step: int,
    publish: Callable[[Callable[[], None]], None],
) -> dict[str, Any]:
    """One update from the sampled responses; `publish` runs the optimizer step."""
    groups = []
    for index, spec in enumerate(specs):
        responses = sampled[step * len(specs) + index]
        rewards = tuple(sum(token % 3 == 0 for token in r.token_ids) / len(r.token_ids) for r in responses)
        group = Group(step * len(specs) + index, EXAMPLES[NAMES[index]], spec, responses, updater.policy.weight_version)
        groups.append(ScoredGroup(group, rewards, {}, compute_advantages([rewards], estimator="group").values[0]))
    book = PrefixBook(updater.policy, config.train.micro_batch_tokens)
    book.compute({s.group.rollout_id: s.group.spec for s in groups}, config.train.prefix_activations)
    by_id = {scored.group.rollout_id: scored for scored in groups}
    results: list[PassResult] = []
    for use in book.uses(list(by_id)):
        members = [by_id[rollout_id] for rollout_id in use.numbers]
        results += updater.respond(use, members, FrozenLogps(None, None), updater.totals(groups))
        updater.push_prefix(use, members)
    publish(lambda: updater.apply(groups) and None)
    metrics = merge_metrics(metrics for metrics, _ in results).values()
    return {
        "loss": metrics["loss"],
        "ratios": (metrics["ratio/min"], metrics["ratio/max"]),
        "rewards": [reward for scored in groups for reward in scored.rewards],
        "gap": max(stats.gap_max for _, stats in results),
    }
