"""Rollout of one training replica by several groups of its ranks: each decodes a share of the prompts, all get all.

With training at TP 4 and the rollout at TP 2, ranks 0 and 2 of a replica decode one half of its prompts and ranks 1 and
3 the other. No group waits for another before its own share is sampled; then the responses change hands once.
"""

from __future__ import annotations

from rollplex.models.policy import Policy
from rollplex.parallel.waits import Peers
from rollplex.rollout.engine import Finished, NothingToPublish, SamplingParams
from rollplex.rollout.local_engine import LocalEngine, PrefixSource
from rollplex.types import PromptSpec, Response


class BlockEngine:
    """RolloutEngine of a replica's `block` of ranks. All of them must admit the same prompts in the same order.

    `inner` samples on this rank's group; of the prompts it takes every `groups`-th, from number `group` on. Responses
    appear when all are sampled, in the order of prompts and of their indices.
    """

    def __init__(self, inner: LocalEngine, block: Peers, group: int, groups: int):
        self.inner, self.block, self.group, self.groups = inner, block, group, groups
        self._open: list[int] = []  # rollout ids whose responses have not been handed out
        self._own: list[Finished] = []

    @property
    def busy(self) -> bool:
        """Whether any response is unfinished, or has not changed hands."""
        return bool(self._open)

    def admit(self, rollout_id: int, spec: PromptSpec) -> None:
        """Queue all responses of a prompt, on the group whose turn it is."""
        if len(self._open) % self.groups == self.group:
            self.inner.admit(rollout_id, spec)
        self._open.append(rollout_id)

    def step(self) -> list[Finished]:
        """One token for every live response of this group; with its last one, all responses of all groups."""
        if self.inner.busy:
            self._own += self.inner.step()
        if self.inner.busy or not self._open:
            return []
        told = self.block.exchange(
            [(item.rollout_id, item.response) for item in self._own], "responses of all rollout groups"
        )
        found: dict[tuple[int, int], Response] = {}
        for part in told:  # ranks of one group have the same ones
            found |= {(rollout_id, response.index): response for rollout_id, response in part}
        order = {rollout_id: number for number, rollout_id in enumerate(self._open)}
        self._open, self._own = [], []
        keys = sorted(found, key=lambda key: (order[key[0]], key[1]))
        return [Finished(key[0], found[key]) for key in keys]


class BlockEngines(NothingToPublish):
    """Engines on the rollout's own views of the weights, `sampler`: prompts are computed at its degree too.

    group, groups: which share of a replica's prompts this rank's group decodes.
    """

    reads_prefixes = False

    def __init__(self, sampler: Policy, block: Peers, *, group: int, groups: int, max_rows: int):
        self.sampler, self.block, self.group, self.groups, self.max_rows = sampler, block, group, groups, max_rows

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> BlockEngine:
        """`prefix_source` has training's heads, and is not asked."""
        inner = LocalEngine(self.sampler, params, max_rows=self.max_rows)
        return BlockEngine(inner, self.block, self.group, self.groups)

    def sleep(self) -> None:
        """Nothing is held between rollouts."""

    def close(self) -> None:
        """Nothing was started."""
