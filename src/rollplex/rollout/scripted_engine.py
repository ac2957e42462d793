"""An engine that samples nothing: it hands out given responses in a given order. For tests, and to replay a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollplex.errors import EngineError
from rollplex.rollout.engine import Finished, NothingToPublish, SamplingParams
from rollplex.rollout.local_engine import PrefixSource
from rollplex.types import PromptSpec, Response


class ScriptedEngines(NothingToPublish):
    """`rollout.engines.Engines` that opens the same script for every rollout."""

    reads_prefixes = True  # it needs none, but the update's prefix passes are then those of the local engine

    def __init__(self, responses: Mapping[int, Sequence[Response]], order: Sequence[tuple[int, int]] = ()):
        self._responses, self._order = responses, order

    def open(self, _params: SamplingParams, _prefix_source: PrefixSource | None = None) -> ScriptedEngine:
        """The script from its beginning."""
        return ScriptedEngine(self._responses, self._order)

    def sleep(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing was started."""


class ScriptedEngine:
    """RolloutEngine whose every step ends one response: of those admitted, the first in `order`.

    responses: those of each rollout id. order: (rollout id, response index), each response once; those it leaves out
    come last, as they were admitted.

    Example: ScriptedEngine({7: (a, b)}, order=[(7, 1), (7, 0)]) ends b first.
    """

    def __init__(self, responses: Mapping[int, Sequence[Response]], order: Sequence[tuple[int, int]] = ()):
        self._responses = {i: {r.index: r for r in group} for i, group in responses.items()}
        self._rank = {place: number for number, place in enumerate(order)}
        self._live: list[tuple[int, int]] = []

    @property
    def busy(self) -> bool:
        """Whether any response was not handed out."""
        return bool(self._live)

    def admit(self, rollout_id: int, spec: PromptSpec) -> None:
        """Queue a prompt. Raises EngineError for one that the script does not know."""
        if rollout_id not in self._responses:
            raise EngineError(f"row {spec.row}: the script has no responses for rollout id {rollout_id}")
        self._live += [(rollout_id, index) for index in self._responses[rollout_id]]

    def step(self) -> list[Finished]:
        """The next response."""
        if not self._live:
            return []
        place = min(self._live, key=lambda item: self._rank.get(item, len(self._rank)))
        self._live.remove(place)
        return [Finished(place[0], self._responses[place[0]][place[1]])]
