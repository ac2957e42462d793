"""The prefixes of one rollout: computed once, read by the engine, the scoring passes and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollplex.errors import StateError
from rollplex.models.policy import Policy
from rollplex.models.prefix import Activations, PrefixPack, compute_prefix
from rollplex.train.microbatch import pack_by_tokens
from rollplex.types import PromptSpec


@dataclass(frozen=True, slots=True)
class PackUse:
    """A pack and the place of each prompt that is wanted from it."""

    pack: PrefixPack
    numbers: dict[int, int]  # rollout id -> number in the pack
    per_response: bool = False  # the pack holds a prompt once per response, one after another from its number on

    def number(self, rollout_id: int, response: int) -> int:
        """The prompt in the pack that a response continues."""
        return self.numbers[rollout_id] + (response if self.per_response else 0)


class PrefixBook:
    """Prefix packs by rollout id. A pack never holds prompts of two optimizer steps."""

    def __init__(self, policy: Policy, budget_tokens: int):
        self.policy, self.budget_tokens = policy, budget_tokens
        self.places: dict[int, tuple[PrefixPack, int]] = {}

    def compute(self, prompts: Mapping[int, PromptSpec], activations: Activations) -> None:
        """Run the prompt pass of `prompts` (rollout id -> prompt), packed up to the token budget.

        Equally long prompts become neighbours: their attention shares one call.
        """
        ids = sorted(prompts, key=lambda rollout_id: prompts[rollout_id].num_tokens)
        for members in pack_by_tokens([prompts[i].num_tokens for i in ids], self.budget_tokens):
            pack = compute_prefix(self.policy, [prompts[ids[m]] for m in members], activations)
            for number, member in enumerate(members):
                self.places[ids[member]] = (pack, number)

    def source(self, rollout_id: int, _spec: PromptSpec) -> tuple[PrefixPack, int]:
        """The engine's PrefixSource."""
        return self.place(rollout_id)

    def place(self, rollout_id: int) -> tuple[PrefixPack, int]:
        """The pack of a prompt and its number in it. Raises StateError when it was never computed."""
        if rollout_id not in self.places:
            raise StateError(f"no prefix was computed for rollout id {rollout_id}")
        return self.places[rollout_id]

    def trainable(self, rollout_id: int) -> bool:
        """Whether a backward can still start from this prompt's prefix: current weights, not consumed."""
        if rollout_id not in self.places:
            return False
        pack, _ = self.places[rollout_id]
        current = pack.weight_version == self.policy.weight_version
        return current and not pack.consumed and pack.activations != "none"

    def uses(self, rollout_ids: Sequence[int]) -> list[PackUse]:
        """The distinct packs that hold `rollout_ids`, each with its prompts in the pack's own order."""
        found: dict[int, PackUse] = {}
        for rollout_id in sorted(rollout_ids, key=lambda i: self.place(i)[1]):
            pack, number = self.place(rollout_id)
            found.setdefault(id(pack), PackUse(pack, {})).numbers[rollout_id] = number
        return list(found.values())
