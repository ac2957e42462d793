"""What a run leaves behind of its steps, in one place: the run folder and the trackers. One process of a run has it."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rollplex.config import Config
from rollplex.runtime.learner import StepOutcome
from rollplex.runtime.run_folder import RunFolder
from rollplex.runtime.trackers import Trackers
from rollplex.types import StepReport


class Records:
    """Both, open for the block."""

    def __init__(self, config: Config, resume_step: int | None):
        """resume_step: the step that the run goes on after; None: it begins. Raises as they do."""
        self._run = config.run
        with ExitStack() as stack:
            self.folder = RunFolder.open(config, resume_step=resume_step)
            stack.callback(self.folder.close)
            self._trackers = Trackers(config, resume_step=resume_step)
            stack.callback(self._trackers.close)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def after_step(self, report: StepReport, outcome: StepOutcome) -> None:
        """Everything but the line of metrics, which comes first (`folder.log`)."""
        self._trackers.log(report)
        every = self._run.log_completions_steps
        if every > 0 and report.step % every == 0:
            self.folder.log_completions(report.step, outcome.groups, outcome.texts)
        if report.step in self._run.trace_steps:
            self.folder.log_spans(outcome.spans)
        if outcome.ledger is not None:
            self.folder.log_ledger(report.step, outcome.ledger)
