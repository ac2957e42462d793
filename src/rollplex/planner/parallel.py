"""Data, tensor, pipeline, context and expert parallelism as axes of a plan: volumes, and shares of the weights.

Ranks are numbered as Megatron-Core does: tensor fastest, then context, then data, pipeline slowest; the experts' axis
lies inside context x data. What an axis sends is counted per device, for rings: an all-reduce of n bytes over g devices
sends 2 n (g - 1) / g, an all-gather, reduce-scatter or all-to-all half of that. However little it sends, a collective
takes log2 g latencies of its link, one between neighbours a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from rollplex.errors import ConfigError
from rollplex.memory.model_bytes import rank_parameters
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware

_GRADIENT_BYTES = 4  # summed across replicas in fp32


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of one side (training or rollout). Example: Parallel(tensor=8, data=4) on 32 devices.

    `sequence`: Megatron's sequence parallelism, which shards activations between norms among the tensor ranks; it sends
    what tensor parallelism sends (an all-gather and a reduce-scatter for each all-reduce).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = True

    def __post_init__(self) -> None:
        for axis in ("tensor", "pipeline", "data", "context", "expert"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis} parallelism is {getattr(self, axis)}, needed 1 or more")
        if self.context * self.data % self.expert:
            raise ConfigError(
                f"expert parallelism {self.expert} lies inside context x data = {self.context * self.data}: needed a "
                "divisor of it"
            )

    def __str__(self) -> str:
        """Example: "TP8 PP1 DP2 CP2"; context and expert parallelism only where there are any."""
        more = {"CP": self.context, "EP": self.expert}
        degrees = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data} | {k: n for k, n in more.items() if n > 1}
        return " ".join(f"{axis}{degree}" for axis, degree in degrees.items())

    @property
    def replica(self) -> int:
        """Devices that work on one group together."""
        return self.tensor * self.pipeline * self.context

    @property
    def devices(self) -> int:
        """All of them."""
        return self.replica * self.data

    def check(self, counts: ModelCounts) -> None:
        """Raises ConfigError where the degrees do not divide the model."""
        text = counts.shape.text
        if text.num_heads % self.tensor or text.intermediate_size % self.tensor:
            raise ConfigError(
                f"tensor parallelism {self.tensor} does not divide {text.num_heads} query heads and an MLP of "
                f"{text.intermediate_size}"
            )
        if self.pipeline > text.num_layers:
            raise ConfigError(f"pipeline parallelism {self.pipeline} is more than the {text.num_layers} layers")
        if self.expert > 1 and (counts.experts is None or counts.experts.count % self.expert):
            found = "a dense model" if counts.experts is None else f"{counts.experts.count} experts"
            raise ConfigError(f"expert parallelism {self.expert} does not divide {found}")

    def span(self, axis: str) -> int:
        """Devices from the first to the last of a group along `axis`, in rank order."""
        if axis == "data":  # what replicas sum, context ranks sum with them
            return (self.data * self.context - 1) * self.tensor + 1
        strides = {"tensor": 1, "context": self.tensor, "expert": self.tensor}
        strides |= {"pipeline": self.tensor * self.context * self.data}
        return int(getattr(self, axis) - 1) * strides[axis] + 1

    def parameters(self, counts: ModelCounts) -> tuple[int, int]:
        """(language model, vision tower) parameters on one device; the tower is whole, on the first pipeline stage."""
        whole = counts.expert_parameters
        dense = rank_parameters(counts.shape, self.tensor).text
        if counts.experts is not None:  # the dense plan has one expert, and no router
            text = counts.shape.text
            dense += text.num_layers * counts.experts.count * text.hidden_size
            dense -= ceil(whole / counts.experts.count / self.tensor)
        return ceil((dense + whole / self.tensor / self.expert) / self.pipeline), counts.vision_parameters

    def optimized(self, counts: ModelCounts, *, sharded: bool) -> float:
        """Trained parameters whose optimizer state one device has. sharded: replicas share it out, context ranks
        included; experts among those ranks that hold the same ones."""
        return sum(size / (copies if sharded else 1) for size, copies in self.trained_copies(counts))

    def trained_copies(self, counts: ModelCounts) -> tuple[tuple[float, int], ...]:
        """(parameters of one device, devices that hold the same ones), for those outside experts and for experts."""
        text, vision = self.parameters(counts)
        experts = counts.expert_parameters / self.tensor / self.expert / self.pipeline
        copies = self.data * self.context
        outside = text - experts + (vision if counts.vision_trained else 0)
        return (outside, copies), (experts, copies // self.expert)

    def kv_share(self, counts: ModelCounts) -> float:
        """Part of a token's keys and values on one device: whole heads, so 1 / K at least."""
        heads = counts.shape.text.num_kv_heads
        return ceil(heads / self.tensor) / heads / self.pipeline

    def bubble(self, micro_batches: int) -> float:
        """Factor by which a pipeline that starts and ends empty takes longer (1F1B): (m + p - 1) / m."""
        return (micro_batches + self.pipeline - 1) / micro_batches


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one device sends along one axis: bytes, and latencies one after another."""

    axis: str
    nbytes: float
    hops: float

    def seconds(self, plan: Parallel, hardware: Hardware) -> float:
        """Sending at the slowest link of the axis, nothing hidden behind computing."""
        link = hardware.link(plan.span(self.axis))
        return self.nbytes / (link.bandwidth * hardware.efficiency.link) + self.hops * link.latency_s


def sweep_traffic(
    counts: ModelCounts, plan: Parallel, tokens: float, sweeps: float = 1.0, *, ring_tokens: float | None = None
) -> tuple[Traffic, ...]:
    """What a pass of `tokens` tokens through all layers sends, by axis; axes of one device send nothing.

    sweeps: times that the layers are gone through; a backward is one more, and sends as much as the forward. Not so the
    context ring: it passes on the keys and values of `ring_tokens` tokens in all (absent: those of the pass, once a
    sweep), in a backward their gradients besides, and those of a prompt that responses attend to.
    """
    text, e, t, c = counts.shape.text, counts.dtype_bytes, plan.tensor, plan.context
    layers, own = text.num_layers / plan.pipeline, tokens / c
    ring = (sweeps * tokens if ring_tokens is None else ring_tokens) / c
    found = []
    if t > 1:
        reduced = own * text.hidden_size * e
        found.append(Traffic("tensor", sweeps * layers * 2 * 2 * reduced * (t - 1) / t, sweeps * layers * 2 * log2(t)))
    if c > 1:
        kv = ring * 2 * text.num_kv_heads * text.head_dim * e / min(t, text.num_kv_heads)
        found.append(Traffic("context", layers * (c - 1) * kv, sweeps * layers * (c - 1)))
    if plan.expert > 1 and counts.experts is not None:
        routed = own * counts.experts.active * text.hidden_size * e / t
        away = (plan.expert - 1) / plan.expert
        found.append(Traffic("expert", sweeps * layers * 2 * routed * away, sweeps * layers * 2 * log2(plan.expert)))
    if plan.pipeline > 1:
        found.append(Traffic("pipeline", sweeps * own * text.hidden_size * e / t, sweeps))
    return tuple(found)


def gradient_traffic(counts: ModelCounts, plan: Parallel, *, sharded: bool = True) -> tuple[Traffic, ...]:
    """Once per optimizer step, over the devices that hold the same parameters: data x context, of experts fewer.

    sharded: gradients reduce-scattered in fp32 and new weights all-gathered; off: gradients all-reduced.
    """
    each = _GRADIENT_BYTES + (counts.dtype_bytes if sharded else _GRADIENT_BYTES)
    nbytes = hops = 0.0
    for size, copies in plan.trained_copies(counts):
        if size and copies > 1:
            nbytes += size * each * (copies - 1) / copies
            hops += 2 * log2(copies)
    return (Traffic("data", nbytes, hops),) if nbytes else ()


def network_seconds(traffic: Sequence[Traffic], plan: Parallel, hardware: Hardware) -> float:
    """All of it, one after another."""
    return sum(part.seconds(plan, hardware) for part in traffic)
