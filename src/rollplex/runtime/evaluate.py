"""Greedy evaluation on a held-out split with the run's own rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count, islice

from rollplex.parallel.team import ALONE, Team
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.collect import Collector, Slot
from rollplex.runtime.prefetch import Prefetcher
from rollplex.runtime.session import Session
from rollplex.tasks.order import DataOrder
from rollplex.tasks.rewards import GroupScores, TrainerState
from rollplex.tasks.task import build_task
from rollplex.train.prefix_book import PrefixBook

# Prompts decoded together; bounds the memory of their prefixes. Under memory.cap_gib at most those of a rollout, whose
# decoding, of more responses each, is in the plan, and passes of its budget.
BATCH_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class _Scored:
    """The scores of one row's response."""

    number: int  # of the row among those that were not dropped
    scores: GroupScores


def evaluate(
    session: Session, collector: Collector, params: SamplingParams, state: TrainerState, team: Team = ALONE
) -> dict[str, float]:
    """eval_reward and eval_rewards/<func>/mean over the first run.eval_rows rows of data.eval_split, one greedy
    response each; eval_rows is how many of them were not dropped. Nothing of the training state changes. Replicas of a
    team take batches in turn."""
    config = session.config
    assert config.data.eval_split is not None  # the caller checked
    task = build_task(config.data, config.data.eval_split, config.run.seed)
    stop = min(config.run.eval_rows, len(task))
    greedy = replace(params, num_generations=1, greedy=True)
    own: list[_Scored] = []
    at_once, pack_tokens = BATCH_PROMPTS, config.train.micro_batch_tokens
    if config.memory.cap_gib is not None:
        at_once = min(at_once, config.rollout.prompts_per_step)
        pack_tokens = min(pack_tokens, config.schedule.unit_tokens)
    order = DataOrder(len(task), config.run.seed, False)
    with Prefetcher(task.example, session.prompts.build, order, config.data, stop=stop, ahead=at_once) as feed:
        numbered = (Slot(number, example, spec) for number, (example, spec) in enumerate(feed))
        for turn in count():
            batch = list(islice(numbered, at_once))
            if not batch:
                break
            if turn % team.replicas != team.replica:
                continue
            book = PrefixBook(session.policy, pack_tokens)
            book.compute({slot.rollout_id: slot.spec for slot in batch}, "none")
            engine = LocalEngine(
                session.policy, greedy, max_rows=config.rollout.max_decode_rows, prefix_source=book.source
            )
            pending = collector.decode(engine, batch, 1, session.policy.weight_version, state)
            own += [_Scored(raw.group.rollout_id, raw.scores) for raw in collector.scored(pending)]
    everyone = sorted(team.of_replicas(own, "evaluation of all replicas"), key=lambda item: item.number)
    totals: dict[str, list[float]] = {"eval_reward": []}
    for item in everyone:
        _add(totals, "eval_reward", item.scores.rewards)
        for name, values in item.scores.parts.items():
            _add(totals, f"eval_rewards/{name}/mean", values)
    metrics = {name: sum(values) / len(values) for name, values in totals.items() if values}
    return metrics | {"eval_rows": float(len(everyone))}


def _add(totals: dict[str, list[float]], name: str, values: tuple[float | None, ...]) -> None:
    totals.setdefault(name, []).extend(value for value in values if value is not None)
