"""Greedy evaluation on a held-out split with the run's own rewards."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.collect import Collector, Slot
from rollplex.runtime.prefetch import Prefetcher
from rollplex.runtime.session import Session
from rollplex.tasks.order import DataOrder
from rollplex.tasks.rewards import TrainerState
from rollplex.tasks.task import build_task
from rollplex.train.prefix_book import PrefixBook

# Prompts decoded together; bounds the memory of their prefixes.
BATCH_PROMPTS = 64


def evaluate(session: Session, collector: Collector, params: SamplingParams, state: TrainerState) -> dict[str, float]:
    """eval_reward and eval_rewards/<func>/mean over the first run.eval_rows rows of data.eval_split, one greedy
    response each; eval_rows is how many of them were not dropped. Nothing of the training state changes."""
    config = session.config
    assert config.data.eval_split is not None  # the caller checked
    task = build_task(config.data, config.data.eval_split, config.run.seed)
    stop, evaluated = min(config.run.eval_rows, len(task)), 0
    greedy = replace(params, num_generations=1, greedy=True)
    totals: dict[str, list[float]] = {"eval_reward": []}
    order = DataOrder(len(task), config.run.seed, False)
    with Prefetcher(task.example, session.prompts.build, order, config.data, stop=stop, ahead=BATCH_PROMPTS) as feed:
        numbered = (Slot(number, example, spec) for number, (example, spec) in enumerate(feed))
        while batch := list(islice(numbered, BATCH_PROMPTS)):
            evaluated += len(batch)
            book = PrefixBook(session.policy, config.train.micro_batch_tokens)
            book.compute({slot.rollout_id: slot.spec for slot in batch}, "none")
            engine = LocalEngine(
                session.policy, greedy, max_rows=config.rollout.max_decode_rows, prefix_source=book.source
            )
            pending = collector.decode(engine, batch, 1, session.policy.weight_version, state)
            for item in collector.scored(pending):
                _add(totals, "eval_reward", item.scores.rewards)
                for name, values in item.scores.parts.items():
                    _add(totals, f"eval_rewards/{name}/mean", values)
    metrics = {name: sum(values) / len(values) for name, values in totals.items() if values}
    return metrics | {"eval_rows": float(evaluated)}


def _add(totals: dict[str, list[float]], name: str, values: tuple[float | None, ...]) -> None:
    totals.setdefault(name, []).extend(value for value in values if value is not None)
