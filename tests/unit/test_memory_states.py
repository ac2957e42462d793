"""Legal and illegal residency moves, one after another, at random, and from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import StateError, TrainingError
from rollplex.memory.states import Residency, ResidencyStates


def test_a_step_in_order() -> None:
    states = ResidencyStates()
    with states.generating("decode"), states.reading("actor prefix") as version:
        assert version == 0
    states.release_kv()
    with states.reading("response pass"):
        assert states.kv is Residency.RELEASED
    with states.writing("optimizer"):
        assert states.version == 0
    assert states.version == 1
    states.release_weights()
    states.wake_weights()
    with states.loading("publish"):
        pass
    states.wake_kv()
    with states.generating("decode") as version:
        assert version == 2


def _generate(states: ResidencyStates) -> None:
    with states.generating("decode"):
        pass


def _load(states: ResidencyStates) -> None:
    with states.loading("publish"):
        pass


def _write(states: ResidencyStates) -> None:
    with states.writing("optimizer"):
        pass


@pytest.mark.parametrize(
    ("moves", "illegal", "message"),
    [
        ([ResidencyStates.release_kv], _generate, "decode cannot generate while the KV cache is released"),
        ([ResidencyStates.offload_kv], _generate, "KV cache is offloaded"),
        ([ResidencyStates.offload_weights], _generate, "decode needs weights that are offloaded; wake them first"),
        ([ResidencyStates.release_weights], _load, "publish would load into weights that are released; wake"),
        ([ResidencyStates.offload_weights], _write, "optimizer needs weights that are offloaded"),
        ([ResidencyStates.release_weights, ResidencyStates.wake_weights], _generate, "not loaded since"),
        ([ResidencyStates.release_weights, ResidencyStates.wake_weights], _write, "not loaded since"),
        (
            [ResidencyStates.release_weights, ResidencyStates.wake_weights],
            ResidencyStates.offload_weights,
            "not loaded",
        ),
        ([], ResidencyStates.wake_weights, "weights cannot be woken: resident already"),
        ([ResidencyStates.release_kv, ResidencyStates.wake_kv], ResidencyStates.wake_kv, "kv cannot be woken"),
        ([ResidencyStates.offload_weights], ResidencyStates.release_weights, "already offloaded"),
    ],
)
def test_illegal(
    moves: list[Callable[[ResidencyStates], None]], illegal: Callable[[ResidencyStates], None], message: str
) -> None:
    states = ResidencyStates()
    for move in moves:
        move(states)
    before = (states.weights, states.kv, states.version)
    with pytest.raises(StateError, match=message):
        illegal(states)
    assert (states.weights, states.kv, states.version) == before


def test_a_writer_beside_a_reader_is_refused() -> None:
    states = ResidencyStates()
    with states.reading("actor prefix"), pytest.raises(StateError, match="optimizer cannot start while actor prefix"):
        _write(states)
    with states.reading("actor prefix"), pytest.raises(StateError, match="publish cannot start while actor prefix"):
        _load(states)
    with states.writing("optimizer"), pytest.raises(StateError, match="decode cannot read .* while optimizer writes"):
        _generate(states)
    with states.writing("optimizer"), pytest.raises(StateError, match="publish cannot start while optimizer"):
        _load(states)
    _write(states)


def test_memory_in_use_is_not_moved() -> None:
    states = ResidencyStates()
    with states.reading("response pass"):
        with pytest.raises(StateError, match="weights to offloaded cannot start while response pass"):
            states.offload_weights()
        states.release_kv()  # nobody generates
    states.wake_kv()
    with states.generating("decode"), pytest.raises(StateError, match="kv cannot become released while decode"):
        states.release_kv()
    states.offload_weights()


def test_a_write_that_fails_leaves_no_valid_weights() -> None:
    states = ResidencyStates()
    with pytest.raises(ZeroDivisionError), states.writing("optimizer"):
        raise ZeroDivisionError
    assert states.version == 0
    with pytest.raises(StateError, match="half written"):
        _generate(states)
    _load(states)
    _generate(states)


def test_an_update_that_was_refused_before_it_wrote_leaves_the_weights_as_they_are() -> None:
    states = ResidencyStates()
    with pytest.raises(TrainingError), states.writing("optimizer"):
        raise TrainingError("the gradient norm is nan")
    assert states.version == 0
    _generate(states)


def test_offloaded_weights_come_back_valid() -> None:
    states = ResidencyStates()
    states.offload_weights()
    states.wake_weights()
    _generate(states)


@given(st.lists(st.sampled_from(["offload", "release", "wake", "load", "write", "read"]), max_size=30))
def test_reads_only_see_loaded_resident_weights(moves: list[str]) -> None:
    """Against a model of three facts: where the weights are, whether they are valid, how often they were written."""
    states, at, valid, version = ResidencyStates(), "resident", True, 0
    for move in moves:
        legal = {
            "offload": at == "resident" and valid,
            "release": at == "resident",
            "wake": at != "resident",
            "load": at == "resident",
            "write": at == "resident" and valid,
            "read": at == "resident" and valid,
        }[move]
        run: Callable[[], None] = {
            "offload": states.offload_weights,
            "release": states.release_weights,
            "wake": states.wake_weights,
            "load": lambda: _load(states),
            "write": lambda: _write(states),
            "read": lambda: _generate(states),
        }[move]
        if not legal:
            with pytest.raises(StateError):
                run()
            continue
        run()
        at = {"offload": "offloaded", "release": "released", "wake": "resident"}.get(move, at)
        valid = (valid and move != "release") or move == "load"
        version += move in ("load", "write")
        assert (states.weights, states.version) == (at, version)


def test_threads_never_read_while_one_writes() -> None:
    states, torn = ResidencyStates(), []
    weights = [0, 0]  # a writer makes them differ for a while; no reader may see that
    start = threading.Barrier(4)

    def read() -> None:
        start.wait(timeout=120)
        for _ in range(300):
            try:
                with states.reading("reader"):
                    torn.append(weights[0] != weights[1])
            except StateError:
                continue

    def write() -> None:
        start.wait(timeout=120)
        for _ in range(300):
            try:
                with states.writing("writer"):
                    weights[0] += 1
                    weights[1] += 1
            except StateError:
                continue

    threads = [threading.Thread(target=target) for target in (read, read, write, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not any(torn)
    assert weights[0] == weights[1] == states.version
