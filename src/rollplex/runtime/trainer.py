"""The outer loop: prompts in data order, steps, reports, evaluations, checkpoints, resume.

    session -> warm start -> reference -> [step -> report -> (completions) -> (evaluate) -> (checkpoint)] x max_steps
Everything that decides the weights is keyed by the seed and the position in the data, so a run that was killed and
resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.parallel.launch import launched
from rollplex.parallel.team import ALONE, ProcessTeam, Team
from rollplex.runtime.collect import Collector
from rollplex.runtime.divided_model import DividedModel
from rollplex.runtime.evaluate import evaluate
from rollplex.runtime.folder_claim import claimed
from rollplex.runtime.held_model import HeldModel, WholeModel
from rollplex.runtime.joining import joined
from rollplex.runtime.learner import Learner, StepOutcome, check_schedule
from rollplex.runtime.records import Records
from rollplex.runtime.replica_rewards import ReplicaRewards
from rollplex.runtime.run_folder import refuse_other_run
from rollplex.runtime.run_memory import check_memory_options
from rollplex.runtime.session import PromptFeed, Session, build_session
from rollplex.runtime.termination import EXIT_STATUS, StepEnd, exit_on_sigterm, noted_sigterm
from rollplex.runtime.warm_model import ensure_warm_start, kept_warm_start
from rollplex.tasks.rewards import RewardRunner, TrainerState
from rollplex.train.checkpoint import RestoredState
from rollplex.train.checkpoint_folder import prune, recover, step_of
from rollplex.train.resume import resolve_resume
from rollplex.types import StepReport

T = TypeVar("T")


class Observer(Protocol):
    """What a run tells while it goes on. runtime/progress.py shows it in a terminal."""

    def on_run_start(self, config: Config, total_steps: int) -> None: ...
    def on_warm_start_step(self, step: int, total: int, metrics: Mapping[str, float]) -> None: ...
    def on_step(self, report: StepReport) -> None: ...
    def on_checkpoint(self, path: Path) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_run_end(self, result: RunResult) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a finished run left what it made."""

    output_dir: Path
    steps: int
    rewards: tuple[float, ...]  # mean reward of each step of this process
    checkpoint: Path | None  # the newest one
    evaluation: Mapping[str, float]  # of the final weights; empty without data.eval_split


class Trainer:
    """A run in memory: `run_step` is one rollout with its optimizer steps, `train` the whole run with its folder."""

    def __init__(self, config: Config, observer: Observer | None = None, team: Team = ALONE):
        """Build everything and bring the weights to where training starts or resumes. team: the processes of the run,
        each with a Trainer of its own; rank 0 alone reads and writes the run folder."""
        self.config, self.observer, self.team = config, observer, team
        check_schedule(config)  # before anything slow happens
        check_memory_options(config, processes=team.size)
        self.resumed_from = self._of_rank_0(lambda: resolve_resume(config.run), "checkpoint to resume from")
        needs_start = self.resumed_from is None or config.algorithm.beta > 0
        kept = self._of_rank_0(lambda: kept_warm_start(config), "warm-started model") if needs_start else None
        session = build_session(config, processor_path=self.resumed_from or kept, processes=team.size)
        if needs_start:
            ensure_warm_start(session, kept, self._on_warm_start_step, team)
        self.model = _held(config, session, team)
        self.session: Session = self.model.session
        self.reference = None
        if config.algorithm.beta > 0:
            self.reference = self.model.reference(adapters_are_fresh=config.warm_start.steps == 0)
        updates = config.algorithm.num_iterations * config.algorithm.steps_per_generation
        self.optimizer, restored = self.model.start(config.train.max_steps * updates, self.resumed_from)
        self.step = 0
        self.num_tokens = 0.0
        self.dropped_before = 0  # rows left out before the checkpoint that this run resumed from
        # RL goes on where the warm start stopped in the data: rows that it has been given the answers of teach little.
        position, next_rollout_id = config.warm_start.steps * config.warm_start.batch_size, 0
        if restored is not None:
            position, next_rollout_id = self._restore(restored)
        runner = RewardRunner(config.rewards, self.session.task.reward_funcs)
        # Ranks that hold one model together must see rewards at one place in their work.
        self.rewards = runner if team.size == team.replicas else ReplicaRewards(runner, team)
        self.collector = Collector(self.session.tokenizer, self.rewards)
        self.engines = self.model.engines()
        try:
            self.learner = Learner(
                self.session.policy,
                self.optimizer,
                self.reference,
                self.collector,
                config,
                stop_token_ids=self.session.stop_token_ids,
                engines=self.engines,
                memory=self.model.memory.moving(self.reference),
                team=team,
            )
        except BaseException:
            self.engines.close()
            raise
        # Last: its threads run from now on, and `close` cannot be called on a Trainer that was never made.
        self.feed = PromptFeed(self.session, position=position, next_rollout_id=next_rollout_id)

    def run_step(self) -> tuple[StepReport, StepOutcome]:
        """One rollout and its optimizer steps."""
        state = TrainerState(global_step=self.step, max_steps=self.config.train.max_steps)
        outcome = self.learner.step(self.feed.take, state)
        self.step += 1
        self.num_tokens += outcome.metrics.get("num_tokens", 0.0)
        metrics = {
            **outcome.metrics,
            "num_tokens": self.num_tokens,
            "epoch": self.feed.epoch,
            "data/dropped_rows": float(self.dropped_before + self.feed.dropped),
        }
        return StepReport(self.step, metrics), outcome

    def train(self, stop_wanted: Callable[[], bool] = lambda: False) -> RunResult:
        """Run to `train.max_steps`, writing the run folder. With several processes, one whose `stop_wanted` is true
        ends all after the step: with a checkpoint, and SystemExit(143)."""
        config = self.config
        output_dir = Path(config.run.output_dir)
        with ExitStack() as stack:  # whatever fails, threads that run on would crash the interpreter at its exit
            stack.callback(self.close)
            resume_step = self.step if self.resumed_from is not None else None
            records = None
            if self.team.rank == 0:
                recover(output_dir)
                records = stack.enter_context(Records(config, resume_step))
            result = self._run(records, stop_wanted)
        self._tell("on_run_end", result)
        return result

    def save(self, counters: Mapping[str, Any] | None = None) -> Path:
        """Write checkpoint-<step> and drop old ones beyond run.save_total_limit; all processes of the run must call it.
        `counters` of an earlier moment may be given while the weights are still those of that moment."""
        output_dir = Path(self.config.run.output_dir)
        state = self._counters() if counters is None else counters
        folder = self.model.save(output_dir / f"checkpoint-{state['step']}", self.optimizer, state)
        if self.team.rank == 0:
            prune(output_dir, self.config.run.save_total_limit)
        self._tell("on_checkpoint", folder)
        return folder

    def _counters(self) -> dict[str, Any]:
        """All that a resume needs beside weights and optimizer state."""
        return {
            "step": self.step,
            "weight_version": self.session.policy.weight_version,
            "position": self.feed.position,
            "next_rollout_id": self.feed.next_rollout_id,
            "num_tokens": self.num_tokens,
            "dropped_rows": self.dropped_before + self.feed.dropped,
            "seed": self.config.run.seed,
        }

    def evaluate(self) -> dict[str, float]:
        """Greedy evaluation on data.eval_split."""
        state = TrainerState(global_step=self.step, max_steps=self.config.train.max_steps)
        return evaluate(self.session, self.collector, self.learner.params, state, self.team)

    def close(self) -> None:
        """Stop media, reward and window threads, and the engines."""
        with ExitStack() as stack:  # in the reverse order, each whatever becomes of the others
            stack.callback(self.engines.close)
            stack.callback(self.learner.close)
            stack.callback(self.rewards.close)
            stack.callback(self.feed.close)

    def _run(self, records: Records | None, stop_wanted: Callable[[], bool]) -> RunResult:
        rewards: list[float] = []
        checkpoint: Path | None = self.resumed_from
        evaluated: dict[str, float] = {}
        self._tell("on_run_start", self.config, self.config.train.max_steps)
        reported, updates = self._counters(), self.optimizer.num_steps
        ends = StepEnd(lambda: (reported["step"], updates) != (self.step, self.optimizer.num_steps))
        try:
            with ends.handling() if self.team.size == 1 else nullcontext():
                while self.step < self.config.train.max_steps:
                    report, outcome = self.run_step()
                    evaluated = {}
                    try:
                        with ends.at_once():
                            evaluated = self._evaluate_if_due(self.step, self.config.run.eval_steps)
                    finally:  # an evaluation that fails or is interrupted does not undo the step
                        report = StepReport(report.step, {**report.metrics, **evaluated})
                        if records is not None:
                            records.folder.log(report)
                        reported, updates = self._counters(), self.optimizer.num_steps
                    ends.check()
                    if "reward" in report.metrics:
                        rewards.append(report.metrics["reward"])
                    checkpoint = self._after_step(report, outcome, records) or checkpoint
                    if self.team.size > 1 and self.team.any(stop_wanted(), f"end of step {self.step}"):
                        self._stop(checkpoint)
        except BaseException as error:
            if updates == self.optimizer.num_steps:  # no weight has moved since
                self._rescue(reported, checkpoint, error)
            raise
        evaluation = evaluated or self._evaluate_if_due(1, 1)  # the last step's, where it was due
        result = RunResult(Path(self.config.run.output_dir), self.step, tuple(rewards), checkpoint, evaluation)
        if records is not None:
            records.folder.finish(evaluation)
        return result

    def _after_step(self, report: StepReport, outcome: StepOutcome, records: Records | None) -> Path | None:
        """Everything that a finished step is told to; the checkpoint if one was due."""
        run = self.config.run
        if records is not None:
            records.after_step(report, outcome)
        self._tell("on_step", report)
        if _due(self.step, run.save_steps) or self.step == self.config.train.max_steps:
            return self.save()
        return None

    def _stop(self, checkpoint: Path | None) -> NoReturn:
        """End all processes together, which alone can save what they hold."""
        if checkpoint is None or step_of(checkpoint) != self.step:
            self.save()
        sys.exit(EXIT_STATUS)

    def _rescue(self, reported: Mapping[str, Any], checkpoint: Path | None, error: BaseException) -> None:
        """Keep the steps since the last checkpoint of a run that ends early. Never hides `error`."""
        if self.team.size > 1:  # the others are in the middle of something else
            if isinstance(error, SystemExit):
                return
            error.add_note("steps since the last checkpoint are lost: several processes save together (run.save_steps)")
            return
        saved = step_of(checkpoint) if checkpoint is not None else None
        if reported["step"] in (0, saved) or isinstance(error, CheckpointError):
            return
        try:
            with noted_sigterm():  # a scheduler and a launcher may both send it, and this is all that is left to do
                folder = self.save(reported)
        except Exception as second:  # the disk may be what failed in the first place
            error.add_note(f"the steps since the last checkpoint could not be saved either: {second}")
        else:
            error.add_note(f"the run so far is in {folder}; go on with run.resume_from_checkpoint=auto")

    def _evaluate_if_due(self, step: int, every: int) -> dict[str, float]:
        if self.config.data.eval_split is None or not _due(step, every):
            return {}
        return self.evaluate()

    def _restore(self, restored: RestoredState) -> tuple[int, int]:
        """Counters of a checkpoint; (data position, next rollout id)."""
        state = restored.trainer_state
        try:
            self.step = int(state["step"])
            self.num_tokens = float(state["num_tokens"])
            self.dropped_before = int(state["dropped_rows"])
            self.session.policy.weight_version = int(state["weight_version"])
            return int(state["position"]), int(state["next_rollout_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.resumed_from}/trainer_state.json lacks or garbles {error} (run.resume_from_checkpoint)"
            ) from error

    def _of_rank_0(self, read: Callable[[], T], what: str) -> T:
        """What rank 0 reads from the run folder, which others must not look into while it writes there."""
        return cast(T, self.team.of_rank_0(read() if self.team.rank == 0 else None, what))

    def _on_warm_start_step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        self._tell("on_warm_start_step", step, total, metrics)

    def _tell(self, event: str, *args: Any) -> None:
        if self.observer is not None:
            getattr(self.observer, event)(*args)


def train(config: Config, *, observer: Observer | None = None) -> RunResult:
    """Train by `config` from start (or checkpoint) to end."""
    with ExitStack() as stack:
        team = stack.enter_context(joined(config, launched(os.environ)))
        if team.rank == 0:  # before anything slow happens
            output_dir = Path(config.run.output_dir)
            refuse_other_run(output_dir, config)
            stack.enter_context(claimed(output_dir))
        if team.size == 1:
            stack.enter_context(exit_on_sigterm())
            return Trainer(config, observer).train()
        stop_wanted = stack.enter_context(noted_sigterm())
        return Trainer(config, observer if team.rank == 0 else None, team).train(stop_wanted)


def _held(config: Config, session: Session, team: Team) -> HeldModel:
    return DividedModel(config, session, team) if isinstance(team, ProcessTeam) else WholeModel(config, session)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
