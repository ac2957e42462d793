"""Rewards of complete groups, called exactly as TRL calls reward functions, off the main thread and with deadlines.

A function is called once per group with keywords: `prompts`, `completions`, `completion_ids`, every column of the row
as a list with one entry per completion, `images` and `videos` (the row's original media in order, one list per
completion), `trainer_state`, `log_extra(name, values)` and `log_metric(name, value)`. For a chat row a completion is a
list with one assistant message and the prompt's media parts carry their media; for a string row both are strings. It
returns one number or None per completion; None: it does not apply.
"""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from typing import Any

from rollplex.config import RewardConfig
from rollplex.errors import ConfigError, DeadlineError, RewardError, RowError, StateError
from rollplex.tasks.reward_lanes import HEARTBEAT_S, Call, FunctionLane, Overdue
from rollplex.tasks.reward_source import RewardFunction, is_async, resolve_reward, unique_names
from rollplex.types import Example, Group

logger = logging.getLogger(__name__)

OWN_KEYWORDS = ("prompts", "completions", "images", "videos", "trainer_state", "log_extra", "log_metric")
UNSEEN_COLUMNS = ("prompt", "completion", "completion_ids")  # TRL does not pass these on
_JOIN_S = 2.0  # for threads to end their calls at close


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions see as `trainer_state`."""

    global_step: int  # rollouts done
    max_steps: int


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Rewards of one group, one entry per response."""

    rewards: tuple[float | None, ...]  # weighted sum over the functions that applied; None: none did
    parts: Mapping[str, tuple[float | None, ...]]  # per function, unweighted
    extras: Mapping[str, tuple[Any, ...]]  # log_extra columns
    metrics: Mapping[str, tuple[float, ...]]  # log_metric values, in order; to be averaged over a logging step
    timeouts: int  # functions that passed their deadline (on_timeout: none)
    seconds: float  # from submit to the last function's answer


class RewardRunner:
    """Calls the reward functions of a run. Threads start with the first group and never keep the interpreter alive.

    A plain function is called for one group at a time, an async one for all groups at once; different functions run
    beside each other and beside everything else. Reward functions that use signals (`signal.alarm`) fail here, since
    signals belong to the main thread: use `rewards.timeout_s` instead.
    """

    def __init__(self, config: RewardConfig, task_reward_funcs: Sequence[RewardFunction | str] = ()) -> None:
        """`task_reward_funcs` are used when the configuration names none.

        Raises ConfigError for a function that cannot be found, none at all, or weights that do not fit.
        """
        chosen: Sequence[RewardFunction | str] = config.reward_funcs or task_reward_funcs
        if not chosen:
            raise ConfigError("rewards.reward_funcs is empty and the task has no reward of its own; name at least one")
        specs = [item if isinstance(item, str) else None for item in chosen]
        self._functions = tuple(resolve_reward(item) if isinstance(item, str) else item for item in chosen)
        self.names = unique_names(self._functions, specs)
        self.weights = _weights(config.reward_weights, self.names)
        self.timeout_s = config.timeout_s
        self.raise_on_timeout = config.on_timeout == "error"
        self._lanes = tuple(
            FunctionLane(name, is_async(function)) for name, function in zip(self.names, self._functions, strict=True)
        )
        self._closed = False

    def submit(self, group: Group, texts: Sequence[str], state: TrainerState) -> PendingScores:
        """Start scoring a complete group; returns at once.

        texts: the decoded completions, one per response. Raises RowError for a column whose name a keyword of the call
        already has, StateError after `close`.
        """
        if self._closed:
            raise StateError(f"rewards of rollout {group.rollout_id} submitted after the reward runner was closed")
        if len(texts) != len(group.responses):
            raise ValueError(f"rollout {group.rollout_id}: {len(texts)} texts for {len(group.responses)} responses")
        pending = PendingScores(group, self.weights, self.timeout_s, self.raise_on_timeout)
        for lane, name, function in zip(self._lanes, self.names, self._functions, strict=True):
            log = _Log(name, group)
            keywords = _keywords(group, texts, state, log)
            call = Call(_runner(function, keywords), self.timeout_s)
            pending.calls.append((name, call, log))
            lane.submit(call)
        return pending

    def close(self) -> None:
        """End the threads; calls that do not end within seconds are left behind. Safe to call twice."""
        self._closed = True
        threads = [thread for lane in self._lanes for thread in lane.close()]
        deadline_s = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if busy := [thread.name for thread in threads if thread.is_alive()]:
            logger.warning("left behind %g s after close: %s", _JOIN_S, ", ".join(busy))

    def longest_wait_s(self, num_groups: int) -> float:
        """Seconds after which `num_groups` groups submitted together are all scored or past their deadlines."""
        return (num_groups + 1) * (self.timeout_s + HEARTBEAT_S)


@dataclass(eq=False)
class PendingScores:
    """Rewards of one group on their way; made by `RewardRunner.submit`."""

    group: Group
    weights: Sequence[float]
    timeout_s: float
    raise_on_timeout: bool
    calls: list[tuple[str, Call, _Log]] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        """Whether `result` would return (or raise) without waiting."""
        return self.failed() or all(call.future.done() for _, call, _ in self.calls)

    def failed(self) -> bool:
        """Whether `result` would raise without waiting, though functions may still run."""
        ended = [call.future for _, call, _ in self.calls if call.future.done()]
        return self.raise_on_timeout and any(f.cancelled() or f.exception(timeout=0) is not None for f in ended)

    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from whatever thread, each time that a function has answered (now, if it has already)."""
        for _, call, _ in self.calls:
            call.future.add_done_callback(lambda _: listener())

    def result(self, timeout_s: float) -> GroupScores:
        """Wait for all functions, at most `timeout_s` seconds from now.

        Raises RewardError (wrong length, not a number, NaN or infinite, or the function's own exception, chained),
        DeadlineError (a call over rewards.timeout_s with on_timeout=error, or this wait itself), and StateError when
        the runner was closed meanwhile. All name the function, the row and the rollout.
        """
        # With on_timeout=error any exception ends the wait at once; else an overdue call must not.
        until = FIRST_EXCEPTION if self.raise_on_timeout else ALL_COMPLETED
        done, waiting = wait([call.future for _, call, _ in self.calls], timeout_s, return_when=until)
        for name, call, _ in self.calls:
            if call.future in done:
                self._raise_failure(name, call)
        if waiting:
            names = [name for name, call, _ in self.calls if call.future in waiting]
            raise DeadlineError(f"{_where(', '.join(names), self.group)} still pending after a wait of {timeout_s:g} s")
        return self._combine()

    def _raise_failure(self, name: str, call: Call) -> None:
        if call.future.cancelled():
            raise StateError(f"{_where(name, self.group)}: the reward runner was closed before it returned")
        error = call.future.exception(timeout=0)
        if isinstance(error, Overdue):
            if self.raise_on_timeout:
                raise DeadlineError(
                    f"{_where(name, self.group)} did not return within rewards.timeout_s={self.timeout_s:g} s; "
                    "raise it, or set rewards.on_timeout=none to leave such rewards out"
                )
        elif error is not None:
            raise RewardError(f"{_where(name, self.group)} raised {type(error).__name__}: {error}") from error

    def _combine(self) -> GroupScores:
        parts: dict[str, tuple[float | None, ...]] = {}
        extras: dict[str, tuple[Any, ...]] = {}
        metrics: dict[str, list[float]] = {}
        timeouts = 0
        for name, call, log in self.calls:
            if call.future.exception(timeout=0) is not None:  # overdue: all other failures have been raised
                timeouts += 1
                logger.warning(
                    "%s did not return within %g s: its rewards are None", _where(name, self.group), self.timeout_s
                )
                parts[name] = (None,) * len(self.group.responses)
                continue
            parts[name] = _checked(name, self.group, call.future.result(timeout=0))
            extras |= {column: tuple(values) for column, values in log.extras.items()}
            for metric, value in log.metrics:
                metrics.setdefault(metric, []).append(value)
        rewards = _totals(list(parts.values()), self.weights)
        missing = [i for i, reward in enumerate(rewards) if reward is None]
        if missing:
            logger.warning(
                "%s gave None for responses %s: their advantage is 0", _where(", ".join(parts), self.group), missing
            )
        frozen = {metric: tuple(values) for metric, values in metrics.items()}
        ended = max(call.ended for _, call, _ in self.calls if call.ended is not None)
        return GroupScores(rewards, parts, extras, frozen, timeouts, ended - self.submitted)


class _Log:
    """log_extra and log_metric of one call; entries of a call that is given up are dropped with it."""

    def __init__(self, name: str, group: Group) -> None:
        self._name, self._group = name, group
        self.extras: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def extra(self, column: str, values: Sequence[Any]) -> None:
        items = list(values)
        if len(items) != len(self._group.responses):
            raise RewardError(
                f"{_where(self._name, self._group)}: log_extra({column!r}) got {len(items)} values, "
                f"needed {len(self._group.responses)}, one per completion"
            )
        self.extras[column] = items

    def metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))


def _weights(given: Sequence[float] | None, names: Sequence[str]) -> tuple[float, ...]:
    if given is None:
        return (1.0,) * len(names)
    if len(given) != len(names):
        raise ConfigError(
            f"rewards.reward_weights has {len(given)} entries, needed {len(names)}, one per reward function "
            f"({', '.join(names)})"
        )
    return tuple(given)


def _keywords(group: Group, texts: Sequence[str], state: TrainerState, log: _Log) -> dict[str, Any]:
    """The keywords of one call; every call gets lists and messages of its own, so no function can disturb another."""
    example, count = group.example, len(group.responses)
    columns = {key: value for key, value in example.columns.items() if key not in UNSEEN_COLUMNS}
    taken = sorted(set(columns) & set(OWN_KEYWORDS))
    if taken:
        raise RowError(
            f"row {example.index}: the columns {taken} have names that the reward call uses itself; rename them"
        )
    is_chat = not isinstance(example.prompt, str)
    return {
        "prompts": [_prompt(example) for _ in range(count)],
        "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in texts],
        "completion_ids": [list(response.token_ids) for response in group.responses],
        **{key: [value] * count for key, value in columns.items()},
        "images": [list(example.images) for _ in range(count)],
        "videos": [list(example.videos) for _ in range(count)],
        "trainer_state": state,
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _prompt(example: Example) -> Any:
    """The prompt as TRL gives it: a string, or messages whose media parts carry their media."""
    if isinstance(example.prompt, str):
        return example.prompt
    media = {"image": iter(example.images), "video": iter(example.videos)}
    messages = []
    for message in example.prompt:
        content = message.get("content")
        if isinstance(content, list):
            parts = [{**p, p["type"]: next(media[p["type"]])} if p["type"] in media else dict(p) for p in content]
            message = {**message, "content": parts}
        messages.append(dict(message))
    return messages


def _runner(function: RewardFunction, keywords: dict[str, Any]) -> Any:
    """What the lane runs; turning the answer into a list may run the function's code too (a generator)."""
    if is_async(function):

        async def run_async() -> Any:
            return _as_list(await function(**keywords))

        return run_async
    return lambda: _as_list(function(**keywords))


def _as_list(answer: Any) -> Any:
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping | set | frozenset):
        return list(answer)
    return answer


def _checked(name: str, group: Group, answer: Any) -> tuple[float | None, ...]:
    count = len(group.responses)
    if not isinstance(answer, list):
        raise RewardError(
            f"{_where(name, group)} returned {type(answer).__name__}, needed a list of {count} numbers or None"
        )
    if len(answer) != count:
        raise RewardError(f"{_where(name, group)} returned {len(answer)} rewards, needed {count}, one per completion")
    return tuple(_number(name, group, i, value) for i, value in enumerate(answer))


def _number(name: str, group: Group, position: int, value: Any) -> float | None:
    if value is None:
        return None
    # Numbers, and 0-d arrays and tensors; a string that looks like a number is a bug of the function.
    is_number = isinstance(value, numbers.Real) or (hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0)
    try:
        if not is_number:
            raise TypeError(f"a {type(value).__name__} is no number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"{_where(name, group)} returned {value!r:.80} for completion {position}, needed a number or None ({error})"
        ) from error
    if not math.isfinite(number):
        raise RewardError(
            f"{_where(name, group)} returned {number} for completion {position}, needed a finite number; "
            "None says that the function does not apply"
        )
    return number


def _totals(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> tuple[float | None, ...]:
    totals: list[float | None] = []
    for scores in zip(*parts, strict=True):
        applied = [w * s for w, s in zip(weights, scores, strict=True) if s is not None]
        totals.append(math.fsum(applied) if applied else None)
    return tuple(totals)


def _where(name: str, group: Group) -> str:
    return f"row {group.example.index} (rollout {group.rollout_id}): reward function {name!r}"
