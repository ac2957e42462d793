"""Seconds of every task of a step on given hardware: a roofline for each kind of kernel, and what the network adds.

    t = max(matmul / rate, weights / bandwidth) + max(attention / rate, cache / bandwidth)
      + activations / bandwidth + kernels x launch + collectives
Kernels of different kinds run one after another, so their times add; within a kind operations and bytes overlap. No
collective hides behind computing. `StepCost.durations` is what schedules run on in virtual time (schedule/scripted.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from rollplex.planner.decoding import Ends, Rows, decode_ends
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware
from rollplex.planner.load import GroupLoad
from rollplex.planner.parallel import Parallel, gradient_traffic, network_seconds, sweep_traffic
from rollplex.planner.passes import Algorithm, Pass, optimizer_bytes, passes
from rollplex.planner.work import Work
from rollplex.schedule.scripted import Durations
from rollplex.schedule.spec import REFERENCE, Phase, Task


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of a task goes; the parts add up to `total`. Of two that overlap only the longer is counted."""

    products: float = 0.0
    weights: float = 0.0  # reading them took longer than the products with them
    attention: float = 0.0
    cache: float = 0.0  # reading keys and values took longer than attention
    activations: float = 0.0
    launches: float = 0.0
    network: float = 0.0
    host: float = 0.0  # sampling and scheduling, copies to and from host memory, reward functions

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Seconds)))

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(getattr(self, f.name) for f in fields(Seconds)))

    @property
    def limit(self) -> str:
        """The largest part. Example: "weights" for decoding a few rows."""
        return max(fields(Seconds), key=lambda f: getattr(self, f.name)).name

    def scaled(self, factor: float) -> Seconds:
        """Every part times `factor`."""
        return Seconds(*(getattr(self, f.name) * factor for f in fields(Seconds)))


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds of tokens on their own: attention and cache reads overlapping and experts read by others anyway, or one
    after the other and each token's experts for it alone."""

    overlapped: float
    apart: float


def roofline(work: Work, hardware: Hardware) -> Seconds:
    """Time of `work` on one device that has all of it."""
    products, weights = work.matmul_flops / hardware.matmul_rate, work.weight_bytes / hardware.byte_rate
    attention, cache = work.attention_flops / hardware.attention_rate, work.kv_bytes / hardware.byte_rate
    return Seconds(
        products=products if products >= weights else 0.0,
        weights=weights if weights > products else 0.0,
        attention=attention if attention >= cache else 0.0,
        cache=cache if cache > attention else 0.0,
        activations=work.stream_bytes / hardware.byte_rate,
        launches=work.kernels * hardware.efficiency.kernel_s,
    )


@dataclass(frozen=True)
class Side:
    """Training or rollout: a model on devices of one kind under one plan. Raises ConfigError for a plan that does not
    divide the model."""

    counts: ModelCounts
    hardware: Hardware
    plan: Parallel

    def __post_init__(self) -> None:
        self.plan.check(self.counts)

    def seconds(self, one: Pass, micro_batches: int = 1) -> Seconds:
        """One pass on one replica; a pipeline is kept full by `micro_batches` of them."""
        text, vision = roofline(self._text(one.text), self.hardware), roofline(self._vision(one.vision), self.hardware)
        traffic = sweep_traffic(self.counts, self.plan, one.tokens, one.sweeps, ring_tokens=one.ring_tokens)
        network = Seconds(network=network_seconds(traffic, self.plan, self.hardware))
        return (text + network).scaled(self.plan.bubble(micro_batches)) + vision

    def decode_step(self, rows: Rows) -> Seconds:
        """One token for each row, on one engine; a pipeline passes all rows through its stages one after another."""
        work = self._text(self.counts.decode_step(rows.rows, rows.pairs, rows.cached_tokens))
        traffic = sweep_traffic(self.counts, self.plan, rows.rows)
        host = Seconds(host=self.hardware.efficiency.decode_step_s)
        network = Seconds(network=network_seconds(traffic, self.plan, self.hardware))
        return (roofline(work, self._decoding) + network).scaled(self.plan.pipeline) + host

    def decode_work(self, rows: Rows) -> TokenSeconds:
        """What the tokens of `rows` take of an engine on their own; weights of all rows, launches and latencies left
        aside."""
        work = self._text(self.counts.decode_step(rows.rows, rows.pairs, rows.cached_tokens))
        hardware = self._decoding
        products = work.matmul_flops / hardware.matmul_rate
        attention, cache = work.attention_flops / hardware.attention_rate, work.kv_bytes / hardware.byte_rate
        sent = network_seconds(
            [replace(part, hops=0.0) for part in sweep_traffic(self.counts, self.plan, rows.rows)], self.plan, hardware
        )
        rest = work.stream_bytes / hardware.byte_rate + sent
        factor = self.plan.pipeline
        # Rows that go to the same experts read them together; at worst no two do.
        experts = rows.rows * self.counts.token_expert_bytes * self._weight_share / hardware.byte_rate
        return TokenSeconds(
            (products + max(attention, cache) + rest) * factor, (products + attention + cache + rest + experts) * factor
        )

    @cached_property
    def _decoding(self) -> Hardware:
        return self.hardware.decoding

    @cached_property
    def _weight_share(self) -> float:
        return self.plan.parameters(self.counts)[0] / self.counts.text_parameters

    def _text(self, work: Work) -> Work:
        """A device's share of the language model's work: tokens x heads x layers are divided, weights by their plan."""
        plan, share = self.plan, 1.0 / self.plan.replica
        whole = 0.0 if plan.sequence else self.counts.norm_share  # each tensor rank moves all that is between norms
        return Work(
            matmul_flops=work.matmul_flops * share,
            attention_flops=work.attention_flops * share,
            weight_bytes=work.weight_bytes * self._weight_share,
            stream_bytes=work.stream_bytes * share * (1.0 + whole * (plan.tensor - 1)),
            kv_bytes=work.kv_bytes * plan.kv_share(self.counts) / plan.context,
            kernels=work.kernels / plan.pipeline,
        )

    def _vision(self, work: Work) -> Work:
        """Of the tower each device of a stage encodes its share of the frames, with all of the weights."""
        parts = self.plan.tensor * self.plan.context
        return replace(work * (1.0 / parts), weight_bytes=work.weight_bytes, kernels=work.kernels)


@dataclass(frozen=True)
class StepCost:
    """Times of the tasks of one step.

    reward_s: a group's reward functions. shared_prompts: the engine reads a prompt's cache once for its group
    (decoding.py). engines: rollout engines, `rollout.plan.data` of them; group g decodes on engine g mod engines, with
    all groups of that engine. publish_bytes: what the busiest rollout device receives (publishing.py), over the link
    within a node or between nodes. host_state_bytes: optimizer state of a device that streams from the host and back.
    shard_optimizer: replicas share the optimizer state out; off: each has and moves all of it. scoring: where the
    reference has devices of its own; None: on training's.
    """

    train: Side
    rollout: Side
    algorithm: Algorithm
    groups: tuple[GroupLoad, ...]
    reward_s: float = 0.0
    shared_prompts: bool = True
    max_rows: int | None = None
    publish_bytes: float = 0.0
    publish_within_node: bool = True
    host_state_bytes: float = 0.0
    shard_optimizer: bool = True
    scoring: Side | None = None

    def side(self, phase: Phase) -> Side:
        """The devices that run a pass of `phase`."""
        if phase is Phase.PREFILL:
            return self.rollout
        return self.scoring if self.scoring is not None and phase in REFERENCE else self.train

    def micro_batches(self, side: Side) -> int:
        """Tasks of a phase that follow each other through a pipeline: groups of a replica."""
        return max(1, len(self.groups) // side.plan.data)

    def task(self, task: Task) -> Seconds:
        """Where the time of one task goes. PREFILL, DECODE: on one engine; other passes: on one training replica."""
        if task.phase is Phase.OPTIMIZER:
            return self.optimizer
        if task.phase is Phase.PUBLISH:
            return self.publish
        assert task.group is not None  # only the two above are the whole step's
        if task.phase is Phase.DECODE:
            return self.decode(task.group)
        if task.phase is Phase.REWARD:
            return Seconds(host=self.reward_s)
        side = self.side(task.phase)
        found = passes(task.phase, self.groups[task.group], side.counts, self.algorithm)
        batches = self.micro_batches(side)
        return sum((side.seconds(one, batches) for one in found), Seconds())

    def durations(self) -> Durations:
        """Seconds of each task, computed once."""
        known: dict[tuple[Phase, int | None], float] = {}

        def seconds(task: Task) -> float:
            key = (task.phase, task.group)
            if key not in known:
                known[key] = self.task(task).total
            return known[key]

        return seconds

    def decode(self, group: int) -> Seconds:
        """From the engine's first step to the group's last token: all groups of the engine decode from the start."""
        end_s = self.engine_ends[group % self.engines].groups[group // self.engines]
        return _split(self.typical_step(group), end_s)

    @property
    def engines(self) -> int:
        """Rollout engines."""
        return self.rollout.plan.data

    @cached_property
    def engine_ends(self) -> tuple[Ends, ...]:
        """What each engine decodes, in seconds from its first step."""

        def step(rows: Rows) -> float:
            return self.rollout.decode_step(rows).total

        return tuple(
            decode_ends(
                self.groups[engine :: self.engines], step, shared_prompts=self.shared_prompts, max_rows=self.max_rows
            )
            for engine in range(self.engines)
        )

    @cached_property
    def optimizer(self) -> Seconds:
        """Gradients summed across replicas, AdamW on a device's state, and where that is a share of it, weights
        gathered; for PPO the critic's besides."""
        side, plan = self.train, self.train.plan
        own = plan.optimized(side.counts, sharded=self.shard_optimizer)
        moved = Work(stream_bytes=optimizer_bytes(own, side.counts.dtype_bytes), kernels=10)
        traffic = gradient_traffic(side.counts, plan, sharded=self.shard_optimizer)
        once = roofline(moved, side.hardware) + Seconds(network=network_seconds(traffic, plan, side.hardware))
        models = 2 if self.algorithm.kind == "ppo" else 1
        streamed = Seconds(host=self.host_state_bytes / side.hardware.host_bandwidth)  # both directions at once
        return once.scaled(models) + streamed

    @cached_property
    def publish(self) -> Seconds:
        """New weights to the rollout devices."""
        hardware = self.rollout.hardware
        if not self.publish_bytes:
            return Seconds()
        link = hardware.intra if self.publish_within_node else hardware.inter
        return Seconds(network=self.publish_bytes / (link.bandwidth * hardware.efficiency.link) + link.latency_s)

    def typical_step(self, group: int) -> Seconds:
        """A decode step of the group's engine with all rows half way, for where the time goes."""
        members = self.groups[group % self.engines :: self.engines]
        rows = sum(len(g.responses) for g in members)
        if self.max_rows is not None:
            rows = min(rows, self.max_rows)
        mean = sum(g.response_tokens for g in members) / sum(len(g.responses) for g in members)
        prompt = sum(g.prompt.tokens * len(g.responses) for g in members) / sum(len(g.responses) for g in members)
        read = prompt * (len(members) if self.shared_prompts else rows)
        return self.rollout.decode_step(Rows(rows, len(members), rows * (prompt + mean / 2), read + rows * mean / 2))


def _split(like: Seconds, total: float) -> Seconds:
    """`total` seconds in the proportions of `like`."""
    return like.scaled(total / like.total)
