"""A tiny model with vLLM engines on it, and what the tests of this folder do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from numerics.cases import EXAMPLES, config_of, rig, tiny_rig
from rollplex.config import LoraConfig
from rollplex.models.load import LoadedModel
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.rollout.engine import RolloutEngine, SamplingParams
from rollplex.rollout.engines import VllmEngines
from rollplex.rollout.hosting import Host
from rollplex.train.advantage import compute_advantages
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.update import Updater
from rollplex.types import Group, PromptSpec, Response, ScoredGroup

# Wide enough to be cut in two: an even number of key/value heads, and vLLM's kernels want heads of 32 at least.
# Largest difference of a log-prob in float32: other kernels, the same numbers. Log-probs reach -9, where a last bit is
# 1e-6, and vLLM's batches, and with them its sums, differ from run to run: 5e-6 to 1.3e-5 were seen in eight steps.
EXACT = 3e-5
SIZES = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vision_hidden_size": 64}
NAMES = ("image", "two_images", "video", "text", "video_image", "slow_video", "same_image")
MAX_TOKENS, GENERATIONS = 12, 4
Sampled = dict[tuple[int, int], Response]


class VllmRig:
    """`options`: those of rollout.vllm; `tp`: sharing.rollout_tp; `temperature`: the engine's; `lora`: the policy's."""

    def __init__(
        self, family: str, *, tp: int = 1, temperature: float = 1.0, lora: LoraConfig | None = None, **options: Any
    ):
        self.rig = tiny_rig(family, torch.float32, **SIZES)
        if lora is not None:
            loaded = self.rig.loaded
            self.rig = rig(LoadedModel(add_lora(loaded.model, lora, seed=0, base_path=None), loaded.processor))
        self.policy: Policy = self.rig.policy
        vllm = {"enforce_eager": True, "kv_cache_gib": 0.125, "max_sequence_tokens": 512, **options}
        rollout = {"engine": "vllm", "vllm": vllm, "max_decode_rows": 64, "temperature": temperature}
        train = {"learning_rate": 2e-3, "max_grad_norm": 10.0}
        self.config = config_of(rollout=rollout, sharing={"rollout_tp": tp}, train=train)
        self.specs = self.rig.specs(NAMES)
        self.engines = VllmEngines(self.config, self.policy, self.rig.loaded.processor)

    @property
    def hosts(self) -> list[Host]:
        """The engines behind the engine."""
        return [place.host for place in self.engines.hosted.places]

    def params(self, **changes: Any) -> SamplingParams:
        """Sampling of all tests: every vision id banned, no stop id unless asked."""
        wanted: dict[str, Any] = {
            "num_generations": GENERATIONS,
            "max_tokens": MAX_TOKENS,
            "temperature": self.config.rollout.temperature,
            "banned_token_ids": self.policy.adapter.vision_token_ids,
            "seed": 5,
        }
        return SamplingParams(**wanted | changes)

    def sample(self, specs: Sequence[PromptSpec] | None = None, *, first_id: int = 0, **changes: Any) -> Sampled:
        """One rollout of `specs` (all by default)."""
        engine = self.engines.open(self.params(**changes))
        return finish(engine, self.specs if specs is None else specs, first_id)

    def gap(self, sampled: Sampled, specs: Sequence[PromptSpec] | None = None) -> float:
        """Largest |vLLM's log-prob - ours|, ours from whole sequences on the policy; rollout ids index `specs` (the
        rig's by default)."""
        specs = self.specs if specs is None else specs
        rows = [(specs[rollout_id], response.token_ids) for (rollout_id, _), response in sampled.items()]
        ours = full_sequence_logps(self.policy, rows, self.config.rollout.temperature, with_grad=False).logps
        theirs = torch.tensor([logp for response in sampled.values() for logp in response.logps])
        return float((ours - theirs).abs().max())

    def trainer(self, max_steps: int = 10) -> Updater:
        """An update of the policy, vision tower and all."""
        return Updater(self.policy, PolicyOptimizer(self.policy.model, self.config.train, max_steps), None, self.config)

    def train_on(self, updater: Updater, sampled: Sampled) -> float:
        """One GRPO step that prefers low token ids; the mean reward before it."""
        scored = [self._scored(rollout_id, sampled) for rollout_id in sorted({key[0] for key in sampled})]
        updater.update(scored, None, updater.frozen_logps([item.group for item in scored], None))
        rewards = [reward for item in scored for reward in item.rewards if reward is not None]
        return sum(rewards) / len(rewards)

    def close(self) -> None:
        """End the engines."""
        self.engines.close()

    def _scored(self, rollout_id: int, sampled: Sampled) -> ScoredGroup:
        number = rollout_id % len(NAMES)
        responses = tuple(response for (owner, _), response in sorted(sampled.items()) if owner == rollout_id)
        group = Group(rollout_id, EXAMPLES[NAMES[number]], self.specs[number], responses, self.policy.weight_version)
        rewards = tuple(low_ids(response) for response in responses)
        return ScoredGroup(group, rewards, {}, compute_advantages([rewards], estimator="group").values[0])


def low_ids(response: Response) -> float:
    """Share of a response's tokens among the first 64 ids."""
    return sum(token < 64 for token in response.token_ids) / len(response.token_ids)


def finish(engine: RolloutEngine, specs: Sequence[PromptSpec], first_id: int = 0) -> Sampled:
    """All responses of `specs`, by (rollout id, response index); none comes twice."""
    for number, spec in enumerate(specs):
        engine.admit(first_id + number, spec)
    sampled: Sampled = {}
    while engine.busy:
        for item in engine.step():
            key = (item.rollout_id, item.response.index)
            assert key not in sampled
            sampled[key] = item.response
    return sampled
