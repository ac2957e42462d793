"""Reward runner: TRL's call, None semantics, deadlines, isolation, errors that name function, row and rollout."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rollplex.config import RewardConfig
from rollplex.errors import ConfigError, DeadlineError, RewardError, RowError, StateError
from rollplex.tasks.rewards import GroupScores, RewardRunner, TrainerState
from rollplex.types import Example, FinishReason, Group, PromptSpec, Response, VideoClip

STATE = TrainerState(global_step=3, max_steps=9)
RED = Image.new("RGB", (3, 2), (255, 0, 0))
BLUE = Image.new("RGB", (5, 4), (0, 0, 255))
PATIENCE_S = 120.0  # for what comes at once unless something hangs
CLIP = VideoClip(np.zeros((2, 4, 4, 3), np.uint8), 2.0, (0, 1), 2, "clip")


def make_group(
    row: int = 7, rollout_id: int = 42, count: int = 3, columns: dict[str, Any] | None = None, prompt: Any = "say"
) -> Group:
    has_media = not isinstance(prompt, str)
    images = (RED, BLUE) if has_media else ()
    videos = (CLIP,) if has_media else ()
    example = Example(row, prompt, images, videos, columns or {})
    ids, positions = torch.tensor([1]), torch.zeros(3, 1, dtype=torch.int64)
    spec = PromptSpec(row, ids, positions, 1, torch.zeros(1, dtype=torch.int32), None, None, None, None, "d")
    responses = tuple(Response(i, (i, 9), (-0.5, -0.1), FinishReason.STOP) for i in range(count))
    return Group(rollout_id, example, spec, responses, 0)


def score(runner: RewardRunner, group: Group | None = None, texts: list[str] | None = None) -> GroupScores:
    group = group or make_group()
    texts = texts or [f"text {i}" for i in range(len(group.responses))]
    try:
        return runner.submit(group, texts, STATE).result(timeout_s=PATIENCE_S)
    finally:
        runner.close()


def run(*functions: Any, group: Group | None = None, **config: Any) -> GroupScores:
    return score(RewardRunner(RewardConfig(**config), functions), group)


def test_chat_row_gets_trl_keywords_with_media_in_order() -> None:
    seen: dict[str, Any] = {}

    def reward(**keywords: Any) -> list[float]:
        seen.update(keywords)
        keywords["log_extra"]("note", ["a", "b", "c"])
        keywords["log_metric"]("speed", 2)
        keywords["log_metric"]("speed", 4.0)
        return [1.0, 2.0, 3.0]

    parts = [{"type": "image"}, {"type": "video"}, {"type": "image"}, {"type": "text", "text": "Which?"}]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    group = make_group(prompt=prompt, columns={"answer": "red", "prompt_id": 5})
    scores = run(reward, group=group)

    assert seen["completions"] == [[{"role": "assistant", "content": f"text {i}"}] for i in range(3)]
    assert seen["completion_ids"] == [[0, 9], [1, 9], [2, 9]]
    assert seen["answer"] == ["red"] * 3 and seen["prompt_id"] == [5] * 3
    assert seen["images"] == [[RED, BLUE]] * 3 and seen["images"][0][0] is RED
    assert seen["videos"] == [[CLIP]] * 3
    assert seen["trainer_state"].global_step == 3
    user = seen["prompts"][2][1]["content"]
    assert user[0]["image"] is RED and user[1]["video"] is CLIP and user[2]["image"] is BLUE
    assert seen["prompts"][0][0] == {"role": "system", "content": "Be brief."}
    assert len(seen["prompts"]) == 3
    assert group.example.prompt[1]["content"] == parts == [  # type: ignore[index]
        {"type": "image"}, {"type": "video"}, {"type": "image"}, {"type": "text", "text": "Which?"}
    ]  # fmt: skip
    assert scores.rewards == (1.0, 2.0, 3.0) and scores.parts == {"reward": (1.0, 2.0, 3.0)}
    assert scores.extras == {"note": ("a", "b", "c")} and scores.metrics == {"speed": (2.0, 4.0)}


def test_string_row_gets_strings_and_no_hidden_columns() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **rest: Any) -> list[int]:
        seen.update(rest, prompts=prompts, completions=completions)
        return [1, 2, 3]

    run(reward, group=make_group(columns={"completion": "gold", "n": 1}))
    assert seen["prompts"] == ["say"] * 3 and seen["completions"] == ["text 0", "text 1", "text 2"]
    assert "completion" not in seen and "prompt" not in seen and seen["n"] == [1, 1, 1]
    assert seen["images"] == [[], [], []]


def test_functions_cannot_disturb_each_other_through_their_arguments() -> None:
    spoilt = threading.Event()

    def vandal(prompts: Any, completions: Any, completion_ids: Any, images: Any, answer: Any, **_: Any) -> list[float]:
        prompts[0][0]["content"].clear()
        completions[0][0]["content"] = "spoilt"
        completion_ids[0].clear()
        images[0].clear()
        answer.clear()
        spoilt.set()
        return [0.0] * len(completions)

    def honest(prompts: Any, completions: Any, completion_ids: Any, images: Any, answer: Any, **_: Any) -> list[float]:
        assert spoilt.wait(PATIENCE_S)
        whole = len(prompts[0][0]["content"]) == 3 and completions[0][0]["content"] == "text 0"
        return [float(whole and len(ids) == 2 and len(i) == 2 and len(answer) == 3) for ids, i in
                zip(completion_ids, images, strict=True)]  # fmt: skip

    content = [{"type": "image"}, {"type": "image"}, {"type": "video"}]
    group = make_group(prompt=[{"role": "user", "content": content}], columns={"answer": "x"})
    assert run(vandal, honest, group=group).parts["honest"] == (1.0, 1.0, 1.0)


def test_none_is_left_out_and_weights_apply(caplog: pytest.LogCaptureFixture) -> None:
    def a(completions: Any, **_: Any) -> list[float | None]:
        return [1.0, None, None]

    async def b(completions: Any, **_: Any) -> list[float | None]:
        await asyncio.sleep(0.01)
        return [10.0, 20.0, None]

    with caplog.at_level(logging.WARNING):
        scores = run(a, b, reward_weights=(2.0, 0.5))
    assert scores.rewards == (7.0, 10.0, None)
    assert scores.parts == {"a": (1.0, None, None), "b": (10.0, 20.0, None)}
    assert "rollout 42" in caplog.text and "responses [2]" in caplog.text


@pytest.mark.parametrize(
    ("answer", "needed"),
    [
        ([1.0, 2.0], "returned 2 rewards, needed 3"),
        ([1.0, float("nan"), 0.0], "returned nan for completion 1"),
        ([1.0, 0.0, float("inf")], "returned inf for completion 2"),
        ([1.0, "1.0", 0.0], "returned '1.0' for completion 1"),
        ([1.0, 2j, 0.0], "needed a number or None"),
        ([1.0, np.ones(1), 0.0], "needed a number or None"),
        ([10**400, 0.0, 0.0], "for completion 0"),
        (0.5, "returned float, needed a list of 3"),
        (None, "returned NoneType"),
        ({"a": 1, "b": 2, "c": 3}, "returned dict"),
        ("abc", "returned str"),
    ],
)
def test_wrong_answers_name_function_row_and_rollout(answer: Any, needed: str) -> None:
    def bad(**_: Any) -> Any:
        return answer

    with pytest.raises(RewardError) as caught:
        run(bad)
    message = str(caught.value)
    assert needed in message and "row 7" in message and "rollout 42" in message and "'bad'" in message


@pytest.mark.parametrize(
    "answer",
    [(1, 2, 3), np.array([1, 2, 3], np.float32), torch.tensor([1, 2, 3]), [np.float32(1), torch.tensor(2.0), 3],
     (float(x) for x in (1, 2, 3))],
    ids=["tuple", "numpy", "torch", "scalars", "generator"],
)  # fmt: skip
def test_all_sorts_of_numbers_are_taken(answer: Any) -> None:
    assert run(lambda **_: answer).rewards == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom"), asyncio.CancelledError("boom")])
@pytest.mark.parametrize("is_async", [False, True])
def test_exception_is_chained_and_the_runner_stays_usable(error: BaseException, is_async: bool) -> None:
    calls = []

    def bad(**_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return [1.0] * 3

    async def bad_async(**keywords: Any) -> list[float]:
        return bad(**keywords)

    runner = RewardRunner(RewardConfig(), [bad_async if is_async else bad])
    first = runner.submit(make_group(), ["a", "b", "c"], STATE)
    with pytest.raises(RewardError, match=r"row 7 \(rollout 42\).*'bad.*boom") as caught:
        first.result(timeout_s=PATIENCE_S)
    assert type(caught.value.__cause__) is type(error)
    assert score(runner).rewards == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_seconds_end_with_the_answer_not_with_the_wait(is_async: bool) -> None:
    def quick(prompts: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    async def quick_async(prompts: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    runner = RewardRunner(RewardConfig(), [quick_async if is_async else quick])
    began = time.monotonic()
    pending = runner.submit(make_group(), ["a", "b", "c"], STATE)
    while not pending.done():
        time.sleep(0.01)
    answered = time.monotonic() - began
    time.sleep(0.3)
    assert 0.0 < pending.result(timeout_s=PATIENCE_S).seconds <= answered


def test_log_extra_of_wrong_length_is_an_error() -> None:
    def bad(log_extra: Any, **_: Any) -> list[float]:
        log_extra("column", [1])
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"log_extra\('column'\) got 1 values, needed 3"):
        run(bad)


def test_column_named_like_a_keyword_is_refused() -> None:
    with pytest.raises(RowError, match=r"row 7.*\['completions', 'trainer_state'\]"):
        run(lambda **_: [0.0] * 3, group=make_group(columns={"completions": 1, "trainer_state": 2}))


# Deadline of calls one of which hangs. The others return at once, and a busy machine must not keep them for as long.
LIMIT_S = 3.0


def hang_on_rollout_0(release: threading.Event, ended: list[int]) -> Any:
    def hang(prompts: Any, rollout: Any, **_: Any) -> list[float]:
        if rollout[0] == 0:
            release.wait(PATIENCE_S)
        ended.append(rollout[0])
        return [float(rollout[0])] * len(prompts)

    return hang


@pytest.mark.parametrize("kind", ["sync", "async", "async_that_blocks_its_loop"])
def test_G24_endless_call_is_bounded_marked_and_leaves_others_unharmed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """G24: one sample's reward never returns; its rewards are None and counted, all others are scored."""
    release, ended = threading.Event(), list[int]()
    hang = hang_on_rollout_0(release, ended)

    async def hang_async(prompts: Any, rollout: Any, **_: Any) -> list[float]:
        await asyncio.sleep(PATIENCE_S if rollout[0] == 0 else 0.05)
        ended.append(rollout[0])
        return [float(rollout[0])] * len(prompts)

    async def block(**keywords: Any) -> list[float]:
        await asyncio.sleep(0.05)
        return hang(**keywords)  # type: ignore[no-any-return]

    def other(prompts: Any, **_: Any) -> list[float]:
        return [100.0] * len(prompts)

    function = {"sync": hang, "async": hang_async, "async_that_blocks_its_loop": block}[kind]
    runner = RewardRunner(RewardConfig(timeout_s=LIMIT_S, on_timeout="none"), [function, other])
    groups = [make_group(row=i, rollout_id=i, columns={"rollout": i}) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        pending = [runner.submit(group, ["a", "b", "c"], STATE) for group in groups]
        scores = [p.result(runner.longest_wait_s(4)) for p in pending]
    assert 0 not in ended  # nobody has waited for the end of that call
    name = function.__name__
    assert scores[0].parts == {name: (None,) * 3, "other": (100.0,) * 3} and scores[0].timeouts == 1
    assert scores[0].rewards == (100.0,) * 3
    for i in (1, 2, 3):
        assert scores[i].rewards == (100.0 + i,) * 3 and scores[i].timeouts == 0
    assert "row 0 (rollout 0)" in caplog.text and name in caplog.text
    late = runner.submit(make_group(rollout_id=5, columns={"rollout": 5}), ["a", "b", "c"], STATE)
    release.set()
    assert late.result(timeout_s=PATIENCE_S).rewards == (105.0,) * 3
    runner.close()


def test_G24_timeout_error_mode_names_all_and_ends_the_wait_at_once() -> None:
    release, ended = threading.Event(), list[str]()

    def hang(**_: Any) -> list[float]:
        release.wait(PATIENCE_S)
        return []

    def slow(**_: Any) -> list[float]:
        release.wait(PATIENCE_S)
        ended.append("slow")
        return [0.0] * 3

    def broken(**_: Any) -> list[float]:
        raise KeyError("x")

    runner = RewardRunner(RewardConfig(timeout_s=0.3), [hang])
    with pytest.raises(DeadlineError, match=r"row 7 \(rollout 42\).*'hang'.*timeout_s=0.3.*on_timeout=none"):
        score(runner)
    with pytest.raises(RewardError, match="broken"):
        run(slow, broken)
    assert ended == []  # the error has not waited for the slow one
    release.set()


def test_G24_works_off_the_main_thread_and_an_alarm_based_checker_is_an_error_not_a_zero() -> None:
    def uses_alarm(**_: Any) -> list[float]:
        import signal

        signal.signal(signal.SIGALRM, lambda *_: None)
        return [1.0] * 3

    seen: list[Any] = []

    def call() -> None:
        seen.append(run(lambda **_: [threading.current_thread() is not threading.main_thread()] * 3).rewards)
        try:
            run(uses_alarm)
        except RewardError as error:
            seen.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE_S)
    assert seen[0] == (1.0, 1.0, 1.0)
    assert isinstance(seen[1], RewardError) and "main thread" in str(seen[1])


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_G24_a_hung_reward_does_not_keep_the_interpreter_alive(kind: str) -> None:
    program = f"""
        import sys, time
        from rollplex.config import RewardConfig
        from rollplex.errors import DeadlineError
        from rollplex.tasks.rewards import RewardRunner, TrainerState
        from rollplex.types import Example, FinishReason, Group, Response
        assert "torch" not in sys.modules
        group = Group(0, Example(0, "say"), None, (Response(0, (1,), (0.0,), FinishReason.STOP),), 0)
        {kind} hang(**_):
            while True:
                time.sleep(0.05)
        pending = RewardRunner(RewardConfig(timeout_s=0.2), [hang]).submit(group, ["a"], TrainerState(0, 1))
        try:
            pending.result(timeout_s=100)
        except DeadlineError:
            print("bounded", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.strip() == "bounded", done.stderr  # its function never returns


def test_waiting_has_its_own_deadline_and_close_ends_it() -> None:
    release = threading.Event()

    def hang(**_: Any) -> list[float]:
        release.wait(PATIENCE_S)
        return [0.0] * 3

    runner = RewardRunner(RewardConfig(), [hang])
    pending = runner.submit(make_group(), ["a", "b", "c"], STATE)
    assert not pending.done()
    with pytest.raises(DeadlineError, match=r"row 7 \(rollout 42\).*hang.*pending after a wait of 0.1 s"):
        pending.result(timeout_s=0.1)
    runner.close()
    with pytest.raises(StateError, match="closed"):
        pending.result(timeout_s=PATIENCE_S)
    with pytest.raises(StateError, match="rollout 42"):
        runner.submit(make_group(), ["a", "b", "c"], STATE)
    release.set()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ends", ["answer", "error", "late"])
def test_waiting_threads_keep_no_group_and_close_ends_them(is_async: bool, ends: str) -> None:
    """A thread that drops the last tensor while the interpreter ends takes the process down with it."""
    release = threading.Event()

    def reward(**_: Any) -> list[float]:
        if ends == "error":
            raise ValueError("no")
        if ends == "late":
            release.wait(PATIENCE_S)
        return [0.0] * 3

    async def reward_async(**_: Any) -> list[float]:
        return reward()

    before = set(threading.enumerate())
    runner = RewardRunner(RewardConfig(timeout_s=0.2), [reward_async if is_async else reward])
    group = make_group()
    held = weakref.ref(group.spec.input_ids)
    pending = runner.submit(group, ["a", "b", "c"], STATE)
    with pytest.raises((RewardError, DeadlineError)) if ends != "answer" else contextlib.nullcontext():
        pending.result(timeout_s=PATIENCE_S)
    release.set()  # what was given up ends too
    del group, pending
    _until(lambda: held() is None, "the group is gone")
    runner.close()
    assert set(threading.enumerate()) <= before


def test_close_names_the_threads_that_it_leaves_behind(caplog: pytest.LogCaptureFixture) -> None:
    began, release = threading.Event(), threading.Event()

    def hang(**_: Any) -> list[float]:
        began.set()
        release.wait(PATIENCE_S)
        return [0.0] * 3

    runner = RewardRunner(RewardConfig(), [hang])
    runner.submit(make_group(), ["a", "b", "c"], STATE)
    assert began.wait(PATIENCE_S)
    before_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        runner.close()
        assert time.monotonic() - before_s < 60.0
        runner.close()
    assert caplog.text.count("left behind") == 1 and "reward-hang" in caplog.text
    release.set()


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 5.0
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_async_calls_run_together_and_share_one_loop_and_sync_calls_never_overlap() -> None:
    loops = set()
    running, overlaps, waiting = [0], [0], [0]
    all_there = asyncio.Event()

    async def judge(**_: Any) -> list[float]:
        loops.add(id(asyncio.get_running_loop()))
        waiting[0] += 1
        if waiting[0] == 6:
            all_there.set()
        await all_there.wait()  # one after the other they would never all be there
        return [0.0] * 3

    def plain(**_: Any) -> list[float]:
        running[0] += 1
        overlaps[0] += running[0] > 1
        time.sleep(0.02)
        running[0] -= 1
        return [0.0] * 3

    runner = RewardRunner(RewardConfig(), [judge, plain])
    for pending in [runner.submit(make_group(rollout_id=i), ["a", "b", "c"], STATE) for i in range(6)]:
        pending.result(timeout_s=PATIENCE_S)
    assert len(loops) == 1 and overlaps == [0]
    runner.close()


def test_resolves_modules_and_files_and_keeps_equal_names_apart(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        source = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: float\n"
        source += f"def reward(completions, **_):\n    return [P({value}).x] * len(completions)\n"
        (tmp_path / name / "mine.py").write_text(source)
    specs = (f"{tmp_path}/one/mine.py:reward", f"{tmp_path}/two/mine.py:reward", "rollplex.tasks.verify:exact_match")
    runner = RewardRunner(RewardConfig(reward_funcs=specs), [])
    assert runner.names == (specs[0], specs[1], "exact_match")
    scores = score(runner, make_group(columns={"answer": "text 1"}))
    assert scores.rewards == (3.0, 4.0, 3.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_match", "is not 'module:function'"),
        ("a:b:", "is not 'module:function'"),
        ("no_such_module_x:f", "no module 'no_such_module_x'"),
        ("rollplex.tasks.nothing:f", "no module 'rollplex.tasks.nothing'"),
        ("rollplex.tasks.verify:exact_mtch", "did you mean 'exact_match'"),
        ("rollplex.tasks.verify:__name__", "is a str, needed a function"),
        ("DIR/mind.py:reward", "did you mean 'DIR/mine.py'"),
        ("DIR/none/mine.py:reward", "the folder DIR/none does not exist"),
        ("DIR/mine.py:rewards", "did you mean 'reward'"),
        ("DIR/broken.py:reward", "importing DIR/broken.py failed: SyntaxError"),
        ("DIR/needs.py:reward", "no_such_module_y"),
    ],
)
def test_unresolvable_specs_say_what_exists(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("def reward(**_): return []\n")
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "needs.py").write_text("import no_such_module_y\n")
    with pytest.raises(ConfigError) as caught:
        RewardRunner(RewardConfig(reward_funcs=(spec.replace("DIR", str(tmp_path)),)), [])
    assert message.replace("DIR", str(tmp_path)) in str(caught.value)


def test_setup_errors() -> None:
    def f(**_: Any) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="name at least one"):
        RewardRunner(RewardConfig(), [])
    with pytest.raises(ConfigError, match=r"has 2 entries, needed 1.*\(f\)"):
        RewardRunner(RewardConfig(reward_weights=(1.0, 2.0)), [f])
    with pytest.raises(ConfigError, match="'f' is given 2 times"):
        RewardRunner(RewardConfig(), [f, functools.partial(f, k=1)])


class Judge:
    """A callable object: TRL names it by its class and awaits an async __call__."""

    async def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [float(len(completions))] * len(completions)


def test_callable_objects_and_partials() -> None:
    def base(completions: Any, scale: float, **_: Any) -> list[float]:
        return [scale] * len(completions)

    scores = run(Judge(), functools.partial(base, scale=0.5))
    assert scores.parts == {"Judge": (3.0,) * 3, "base": (0.5,) * 3}
