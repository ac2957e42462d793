"""Prompts ahead of the step: order, overlap, deadlines, drops, exact resume, bounded memory, clean end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest

from rollplex.config import BuildConfig, DataConfig
from rollplex.errors import DeadlineError, MediaError, OverlongPromptError, RowError, StateError
from rollplex.models.build import build_model, build_processor
from rollplex.models.prompts import PromptBuilder
from rollplex.runtime.prefetch import Prefetcher
from rollplex.tasks.order import DataOrder
from rollplex.tasks.task import build_task
from rollplex.types import Example

ORDER = DataOrder(8, 3, True)
PATIENCE_S = 120.0  # for what comes at once unless something hangs


def load(index):
    return Example(index, "x")


def build(example):
    return f"spec {example.index}"


def make(load=load, build=build, order=ORDER, *, start=0, stop=None, ahead=None, **data):
    return Prefetcher(load, build, order, DataConfig(**data), start=start, stop=stop, ahead=ahead)


def rows(prefetcher, count):
    return [next(prefetcher)[0].index for _ in range(count)]


def refuse(bad):
    def build_or_refuse(example):
        if example.index in bad:
            raise OverlongPromptError(f"row {example.index}: too long")
        return build(example)

    return build_or_refuse


@pytest.mark.parametrize("workers", [1, 3])
def test_prompts_come_in_data_order_whatever_finishes_first(workers):
    def uneven(index):
        time.sleep(0.01 * (index % 3))
        return load(index)

    with make(load=uneven, media_workers=workers) as prompts:
        assert rows(prompts, 20) == [ORDER.row_at(i) for i in range(20)]
        assert prompts.position == 20 and prompts.dropped == 0


def test_stop_ends_the_iteration():
    with make(start=2, stop=5) as prompts:
        assert [spec for _, spec in prompts] == [f"spec {ORDER.row_at(i)}" for i in (2, 3, 4)]
        assert prompts.position == 5


@pytest.mark.parametrize("cut", range(7))
def test_resume_at_any_position_gives_exactly_the_rest(cut):
    options = {"build": refuse({1, 4, 5}), "overlong": "drop"}
    with make(**options) as whole:
        expected = rows(whole, 12)
        end = (whole.position, whole.dropped)
    with make(**options) as first:
        before = rows(first, cut)
    with make(**options, start=first.position) as second:
        after = rows(second, 12 - cut)
        assert before + after == expected
        assert (second.position, first.dropped + second.dropped) == end
    assert not {1, 4, 5} & set(expected)


def test_overlong_rows_stop_the_run_unless_dropped():
    first = ORDER.row_at(0)
    with make(build=refuse({first})) as prompts, pytest.raises(OverlongPromptError, match=f"^row {first}: too long"):
        next(prompts)
    with make(build=refuse({first}), overlong="drop") as prompts:
        assert rows(prompts, 1) == [ORDER.row_at(1)]
        assert (prompts.position, prompts.dropped) == (2, 1)


def test_other_row_errors_are_never_dropped():
    def broken(index):
        raise MediaError(f"row {index}: images[0]: cannot be read")

    with make(load=broken, overlong="drop") as prompts, pytest.raises(MediaError, match=f"^row {ORDER.row_at(0)}: "):
        next(prompts)


def test_an_epoch_of_overlong_rows_ends_with_an_error():
    with make(build=refuse(set(range(8))), overlong="drop") as prompts, pytest.raises(RowError, match="all 8 rows"):
        next(prompts)


def test_an_error_waits_for_its_turn():
    bad = ORDER.row_at(2)

    def load_or_fail(index):
        if index == bad:
            raise KeyError("lost")
        return load(index)

    with make(load=load_or_fail) as prompts:
        assert rows(prompts, 2) == [ORDER.row_at(0), ORDER.row_at(1)]
        with pytest.raises(RowError, match=f"^row {bad}: KeyError: 'lost'"):
            next(prompts)
        assert prompts.position == 2
        with pytest.raises(StateError, match="closed"):
            next(prompts)


def test_g09_slow_items_overlap_and_the_main_thread_stays_free():
    everyone = threading.Barrier(9, timeout=PATIENCE_S)

    def slow(index):
        everyone.wait()
        return load(index)

    with make(load=slow, media_workers=8, ahead=8) as prompts:
        everyone.wait()  # eight rows are under way at once, and the thread that asked for them is here
        rows(prompts, 8)
        everyone.abort()  # for the rows of the next step


class Freeing(Prefetcher):
    """Sets `hang` when it is closed, so that `close` need not wait for its own deadline."""

    def __init__(self, hang, *args, **options):
        self.hang = hang
        super().__init__(*args, **options)

    def close(self):
        self.hang.set()
        super().close()


def test_g09_row_over_its_deadline_is_named():
    hang, slow_row = threading.Event(), ORDER.row_at(1)

    def hanging(index):
        if index == slow_row:
            hang.wait(PATIENCE_S)
        return load(index)

    # The first row must not take as long, however busy the machine is.
    prompts = Freeing(hang, hanging, build, ORDER, DataConfig(media_workers=2, media_timeout_s=3.0))
    assert rows(prompts, 1) == [ORDER.row_at(0)]
    # The other worker goes on with later rows meanwhile; the hanging row's own clock counts.
    with pytest.raises(DeadlineError, match=rf"^row {slow_row}: .*media_timeout_s=3 s"):
        next(prompts)


def test_g09_slow_row_is_reported_while_the_step_waits(caplog):
    first = ORDER.row_at(0)

    def reported():
        return any(f"row {first}: its media are slow" in record.getMessage() for record in caplog.records)

    def slow(index):
        while index == first and not reported():
            time.sleep(0.01)
        return load(index)

    with make(load=slow, media_timeout_s=8.0, media_workers=1, ahead=1) as prompts:  # reported after a quarter of it
        assert rows(prompts, 1) == [first]
    assert reported()


def test_g09_decoder_that_hangs_for_ever_does_not_hold_the_process():
    code = """
import threading
from rollplex.config import DataConfig
from rollplex.runtime.prefetch import Prefetcher
from rollplex.tasks.order import DataOrder
never = threading.Event()
prompts = Prefetcher(lambda row: never.wait(), str, DataOrder(4, 0, False), DataConfig(media_timeout_s=3))
next(prompts)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "DeadlineError: row 0: its media and prompt were not ready" in done.stderr


def test_memory_is_bounded_by_ahead():
    begun, lock, most = [], threading.Lock(), 4

    def counted(index):
        with lock:
            begun.append(index)
        return load(index)

    with make(load=counted, media_workers=3, ahead=most) as prompts:
        for consumed in range(1, 10):
            next(prompts)
            time.sleep(0.02)
            assert len(begun) <= consumed + most


def test_close_ends_the_threads():
    before = media_threads()
    prompts = make(media_workers=4)
    rows(prompts, 3)
    assert len(media_threads() - before) == 4
    prompts.close()
    prompts.close()
    assert media_threads() <= before


def test_threads_that_wait_keep_no_prompt():
    """A thread that drops the last tensor while the interpreter ends takes the process down with it."""

    class Pixels:
        pass

    built = []

    def build_pixels(_):
        pixels = Pixels()
        built.append(weakref.ref(pixels))
        return pixels

    with make(build=build_pixels, media_workers=3, stop=9) as prompts:
        rows(prompts, 9)
        deadline = time.monotonic() + 5.0
        while any(pixels() is not None for pixels in built) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(built) == 9 and [pixels() for pixels in built] == [None] * 9


def media_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("rollplex-media")}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_threads_make_the_same_prompts_as_one_call_after_another(family):
    data = DataConfig(task="mixed", num_rows=8, media_workers=4)
    task = build_task(data, "train", 0)
    processor = build_processor(family, task.texts(), 400)
    config = build_model(BuildConfig(family=family, hidden_size=32, num_layers=1), processor, seed=0).config
    builder = PromptBuilder(processor, config, data)
    with Prefetcher(task.example, builder.build, ORDER, data, ahead=8) as prompts:
        digests = [next(prompts)[1].digest for _ in range(24)]
    assert digests == [builder.build(task.example(ORDER.row_at(i))).digest for i in range(24)]


def test_g26_dropping_counts_expanded_length_with_real_prompts():
    data = DataConfig(task="mixed", num_rows=8, max_prompt_tokens=80, overlong="drop")
    task = build_task(data, "train", 0)
    processor = build_processor("qwen2_5_vl", task.texts(), 400)
    config = build_model(BuildConfig(hidden_size=32, num_layers=1), processor, seed=0).config
    builder = PromptBuilder(processor, config, data)
    with Prefetcher(task.example, builder.build, DataOrder(8, 0, False), data, stop=8) as prompts:
        kept = [example.index for example, _ in prompts]
        assert prompts.dropped == 8 - len(kept) and prompts.position == 8
    lengths = {i: PromptBuilder(processor, config, DataConfig()).build(task.example(i)).num_tokens for i in range(8)}
    assert kept == [i for i in range(8) if lengths[i] <= 80]
    assert 0 < len(kept) < 8
