"""Which passes of which model each phase of a step runs, for GRPO and for PPO.

| phase | GRPO | PPO besides |
|---|---|---|
| PREFILL | engine's prompt pass (or the actor's own prefix) | - |
| REF_PREFIX | reference prefix | critic prefix |
| ACTOR_PREFIX | actor prefix | - |
| REF_RESPONSE | reference log-probs; old log-probs if wanted | critic values |
| ACTOR_RESPONSE | forward, loss, backward | the critic's |
| PREFIX_BACKWARD | actor | critic |
| OPTIMIZER, PUBLISH | once per step | OPTIMIZER of the critic too |
The critic is a model of the same sizes with one output in place of the vocabulary. GAE, group advantages and the loss
itself are elementwise over response tokens and counted as nothing. DECODE is no pass: decoding.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from rollplex.planner.flops import Activations, ModelCounts
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.work import NOTHING, Work
from rollplex.schedule.spec import PREFIXES, Phase, PrefixMode


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a step computes, whatever the hardware. `kind` "ppo" has a critic; everything else is an option of both.

    pack_groups: groups whose prompts run as one pass, and their responses on it, as far as train.micro_batch_tokens
    reaches: they share the reading of weights and the launches.
    """

    kind: Literal["grpo", "ppo"] = "grpo"
    reference: bool = True
    old_logps: bool = False
    prefix: PrefixMode = PrefixMode.SHARED
    activations: Activations = "checkpoint"
    prefill_is_actor_prefix: bool = False  # the engine in this process; off: an engine with a prompt pass of its own
    micro_batch_tokens: int = 8192
    pack_groups: int = 1


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one model. `sweeps`: times that `tokens` tokens go through the layers, for collectives. `cut`: run in
    micro-batches; prompts are not cut. `ring_tokens`: those whose keys and values go around a context ring, in all
    sweeps together (parallel.py)."""

    name: str
    text: Work
    vision: Work
    tokens: float
    sweeps: float = 1.0
    ring_tokens: float | None = None
    cut: bool = False


def passes(phase: Phase, group: GroupLoad, counts: ModelCounts, algorithm: Algorithm) -> tuple[Pass, ...]:
    """The passes of `phase` for one group; none for DECODE, for REWARD, and for what is done once per step."""
    return tuple(_Group(group, counts, algorithm).of(phase))


@dataclass(frozen=True, slots=True)
class _Group:
    group: GroupLoad
    counts: ModelCounts
    algorithm: Algorithm

    def of(self, phase: Phase) -> Iterator[Pass]:
        """The passes of `phase`."""
        algorithm = self.algorithm
        critic = ("critic", algorithm.kind == "ppo")
        runs: dict[Phase, tuple[Callable[[str], Pass], tuple[tuple[str, bool], ...]]] = {
            Phase.PREFILL: (self._prefill, (("engine", True),)),
            Phase.REF_PREFIX: (self._prefix, (("reference", algorithm.reference), critic)),
            Phase.ACTOR_PREFIX: (self._prefix, (("actor", True),)),
            Phase.REF_RESPONSE: (
                self._score,
                (("reference", algorithm.reference), ("actor", algorithm.old_logps), critic),
            ),
            Phase.ACTOR_RESPONSE: (self._train, (("actor", True), critic)),
            Phase.PREFIX_BACKWARD: (self._prefix_backward, (("actor", True), critic)),
        }
        whole = algorithm.prefix is PrefixMode.WHOLE
        if phase not in runs or (whole and phase in (*PREFIXES, Phase.PREFIX_BACKWARD)):
            return
        make, models = runs[phase]
        yield from (self._packed(make(who)) for who, wanted in models if wanted)

    @property
    def _copies(self) -> int:
        """How often a prompt is computed."""
        return 1 if self.algorithm.prefix is PrefixMode.SHARED else len(self.group.responses)

    @property
    def _fed(self) -> int:
        return sum(n - 1 for n in self.group.responses)

    @property
    def _attended(self) -> int:
        """Tokens whose keys and values the responses attend to: their own, and the prompt's in every micro-batch."""
        batches = max(1, ceil(self._fed / self.algorithm.micro_batch_tokens))
        return self._fed + batches * self._copies * self.group.prompt.tokens

    def _prefill(self, who: str) -> Pass:
        prompt = self.group.prompt
        if self.algorithm.prefill_is_actor_prefix:
            return dataclasses.replace(self._prefix(who), name="engine's prompt pass, the actor's prefix")
        return Pass(f"{who}'s prompt pass", self.counts.prefill([prompt]), self.counts.vision([prompt]), prompt.tokens)

    def _prefix(self, who: str) -> Pass:
        prompt, copies = self.group.prompt, self._copies
        text, vision = copies * self.counts.prefix([prompt]), copies * self.counts.vision([prompt])
        return Pass(f"{who} prefix", text, vision, copies * prompt.tokens)

    def _prefix_backward(self, who: str) -> Pass:
        prompt, copies, mode = self.group.prompt, self._copies, self.algorithm.activations
        tower = self.counts.vision_backward([prompt]) + self.counts.vision_again([prompt], mode)
        text = self.counts.prefix_backward([Prompt(prompt.tokens)], mode)
        name = f"{who} prefix backward ({mode})"
        sweeps, tokens = 1.0 if mode == "graph" else 2.0, copies * prompt.tokens
        return Pass(name, copies * text, copies * tower, tokens, sweeps, ring_tokens=(sweeps + 1) * tokens)

    def _score(self, who: str) -> Pass:
        if self.algorithm.prefix is PrefixMode.WHOLE:
            return self._whole(f"{who} scoring, whole sequences", who, with_grad=False)
        text = self.counts.response([self.group], head=who != "critic")
        return Pass(f"{who} scoring", text, NOTHING, self._fed, ring_tokens=self._attended, cut=True)

    def _train(self, who: str) -> Pass:
        if self.algorithm.prefix is PrefixMode.WHOLE:
            return self._whole(f"{who} training, whole sequences", who, with_grad=True)
        counts, group = self.counts, [self.group]
        text = counts.response(group) + counts.response_backward(group)
        if who == "critic":
            text = text + -1.0 * self._head_training()
        name = f"{who} responses, forward and backward"
        return Pass(name, text, NOTHING, self._fed, 2.0, ring_tokens=3 * self._attended, cut=True)

    def _whole(self, name: str, who: str, *, with_grad: bool) -> Pass:
        counts, group = self.counts, self.group
        prompts = [group.prompt] * len(group.responses)
        tower = counts.vision(prompts)
        text = counts.full([group]) + -1.0 * tower
        sweeps = 1.0
        if with_grad:
            back = counts.vision_backward(prompts)
            text = text + counts.full_backward([group]) + -1.0 * back
            tower, sweeps = tower + back, 2.0
            if self.algorithm.activations != "graph":  # whole layers are run again before their backward
                text, tower = (
                    text + counts.full([group]) + -1.0 * counts.vision(prompts),
                    tower + counts.vision(prompts),
                )
                text, sweeps = text + -1.0 * counts.head(group.response_tokens), 3.0
        if who == "critic":
            text = text + -1.0 * (self._head_training() if with_grad else counts.head(group.response_tokens))
        tokens = sum(group.prompt.tokens + n for n in group.responses)
        ring = (sweeps + with_grad) * tokens
        return Pass(name, text, tower, tokens, sweeps, ring_tokens=ring, cut=True)

    def _head_training(self) -> Work:
        head = self.counts.head(self.group.response_tokens)
        return head + head + self.counts.backward(head)

    def _packed(self, one: Pass) -> Pass:
        """This group's share of the weights read and the kernels launched: once for each micro-batch of its pack."""
        pack = self.algorithm.pack_groups
        times = max(1, ceil(pack * one.tokens / self.algorithm.micro_batch_tokens)) if one.cut else 1
        return dataclasses.replace(one, text=_repeated(one.text, times / pack), vision=_repeated(one.vision, 1 / pack))


def _repeated(work: Work, times: float) -> Work:
    return dataclasses.replace(work, weight_bytes=work.weight_bytes * times, kernels=work.kernels * times)


def optimizer_bytes(parameters: float, dtype_bytes: int) -> float:
    """What AdamW moves for `parameters` of one device: the fp32 gradient twice (norm, update), master weight and both
    moments read and written, new weights written where the master is not what the passes read."""
    return parameters * (2 * 4 + 3 * 2 * 4 + (dtype_bytes if dtype_bytes < 4 else 0))
