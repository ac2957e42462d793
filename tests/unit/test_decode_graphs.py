"""Which runs decode in captured steps, what makes them capture anew, and what a failed rollout leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from numerics.cases import Rig, config_of, groups_of, product_update, sampled_tokens, tiny_rig
from rollplex.config import Config, LoraConfig
from rollplex.errors import ConfigError, EngineError, StateError
from rollplex.models.lora import add_lora
from rollplex.rollout.decode_graphs import DecodeGraphs, decode_graphs
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.engines import local_engines
from rollplex.rollout.fixed_step import _enlarged as enlarged
from rollplex.rollout.local_engine import LocalEngine

NAMES = ("image", "text", "video")
PARAMS = SamplingParams(num_generations=2, max_tokens=9, stop_token_ids=tuple(range(0, 300, 11)))


@pytest.fixture
def made() -> Rig:
    return tiny_rig("qwen3_vl", torch.float32, num_layers=2)


def _tokens(made: Rig, graphs: DecodeGraphs | None) -> dict[tuple[int, int], tuple[int, ...]]:
    engine = LocalEngine(made.policy, PARAMS, max_rows=8, graphs=graphs)
    return sampled_tokens(engine, made.specs(NAMES))


def test_auto_is_off_on_a_cpu_and_on_is_on(made: Rig) -> None:
    assert decode_graphs(config_of(), made.policy) is None
    assert decode_graphs(config_of(rollout={"decode_graphs": "off"}), made.policy) is None
    config = config_of(rollout={"decode_graphs": "on"})
    assert isinstance(decode_graphs(config, made.policy), DecodeGraphs)
    assert isinstance(local_engines(config, made.policy).graphs, DecodeGraphs)


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"memory": {"cap_gib": 1.0}, "data": {"max_prompt_tokens": 64}}, "memory.cap_gib"),
        ({"run": {"memory_steps": [1]}}, "run.memory_steps"),
    ],
)
def test_counted_memory_and_graphs_are_refused_together(made: Rig, sections: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=rf"decode_graphs is on, but {option} is set, .*; leave one of them out"):
        decode_graphs(config_of(rollout={"decode_graphs": "on"}, **sections), made.policy)


def test_processes_that_share_the_work_are_refused(made: Rig) -> None:
    with pytest.raises(ConfigError, match="decode_graphs is on, but 2 processes share the work"):
        decode_graphs(config_of(rollout={"decode_graphs": "on"}), made.policy, processes=2)


def test_vllm_has_graphs_of_its_own() -> None:
    tree = {"model": {"path": "x"}, "rollout": {"engine": "vllm", "decode_graphs": "on"}}
    with pytest.raises(ValueError, match=r"rollout.decode_graphs on does nothing .* rollout.vllm.enforce_eager"):
        Config.model_validate(tree)


def test_ranks_that_share_layers_are_refused(made: Rig) -> None:
    class Two:
        rank, size = 0, 2

    made.policy.adapter.ranks = Two()  # type: ignore[assignment]  # only its size is asked for
    with pytest.raises(ConfigError, match=r"2 tensor-parallel ranks .* rollout.decode_graphs=off"):
        DecodeGraphs(made.policy)


def test_an_optimizer_step_captures_nothing_anew(made: Rig) -> None:
    """Weights change where they are: the same recorded steps give the new samples."""
    graphs = DecodeGraphs(made.policy)
    before = _tokens(made, graphs)
    steps, caches = dict(graphs.steps), graphs.caches
    addresses = [parameter.data_ptr() for parameter in made.policy.model.parameters()]
    scored = groups_of(made.specs(NAMES), NAMES, [[3, 4]] * len(NAMES), made.plain_vocab)
    product_update(made.policy, scored, config_of(train={"learning_rate": 3e-3}))
    assert [parameter.data_ptr() for parameter in made.policy.model.parameters()] == addresses
    after = _tokens(made, graphs)
    assert after == _tokens(made, None) != before
    assert graphs.caches is caches and steps.items() <= graphs.steps.items()


def _move_one(made: Rig) -> None:
    weight = made.policy.adapter.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 1.5


def _move_head(made: Rig) -> None:
    made.policy.adapter.lm_head.weight.data = made.policy.adapter.lm_head.weight.data.flip(0).clone()


def _adapt(made: Rig) -> None:
    wrapped = add_lora(made.loaded.model, LoraConfig(r=4), seed=0, base_path=None)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)


@pytest.mark.parametrize("move", [_move_one, _move_head, _adapt])
def test_weights_that_moved_are_read_where_they_are(made: Rig, move: Callable[[Rig], None]) -> None:
    graphs = DecodeGraphs(made.policy)
    before, caches = _tokens(made, graphs), graphs.caches
    move(made)
    after = _tokens(made, graphs)
    assert graphs.caches is not caches
    assert after == _tokens(made, None) != before


def test_a_rollout_of_broken_weights_leaves_nothing_behind(made: Rig) -> None:
    """Its keys and values are not numbers, and 0 times them is none either."""
    graphs = DecodeGraphs(made.policy)
    wanted = _tokens(made, graphs)
    engine = LocalEngine(made.policy, PARAMS, max_rows=8, graphs=graphs)
    for number, spec in enumerate(made.specs(NAMES)):
        engine.admit(number, spec)
    for _ in range(4):
        engine.step()  # what is written from here on, the next rollout sees masked before it writes there
    weight = made.policy.adapter.layers[1].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="response token 6"):
        for _ in range(2):
            engine.step()
    assert graphs.caches is not None and bool(graphs.caches.suffix_values.isnan().any())
    with torch.no_grad():
        weight.copy_(kept)
    assert _tokens(made, graphs) == wanted


def test_caches_that_could_not_grow_claim_no_more_than_they_have(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = DecodeGraphs(made.policy)

    def full(old: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if old.ndim == 2:  # of the logits, the last that are made
            raise torch.OutOfMemoryError
        return enlarged(old, shape)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr("rollplex.rollout.fixed_step._enlarged", full)
        _tokens(made, graphs)
    assert _tokens(made, graphs) == _tokens(made, None)


def test_the_last_engine_to_open_has_the_buffers(made: Rig) -> None:
    graphs = DecodeGraphs(made.policy)
    older, newer = (LocalEngine(made.policy, PARAMS, max_rows=8, graphs=graphs) for _ in range(2))
    for engine in (older, newer):
        engine.admit(0, made.specs(("image",))[0])
    newer.step()
    with pytest.raises(StateError, match="one that opened later"):
        older.step()
    graphs.release()
    with pytest.raises(StateError, match="released"):
        newer.step()


def test_closed_engines_hold_nothing(made: Rig) -> None:
    engines = local_engines(config_of(rollout={"decode_graphs": "on"}), made.policy)
    engine = engines.open(PARAMS)
    engine.admit(0, made.specs(("image",))[0])
    engine.step()
    assert engines.graphs is not None and engines.graphs.steps
    engines.sleep()
    assert engines.graphs.steps  # the next rollout has the same shapes
    assert engines.graphs.caches is not None
    engines.graphs.rest(engines.graphs.caches.nbytes)
    assert engines.graphs.steps
    engines.graphs.rest(engines.graphs.caches.nbytes - 1)  # too large to keep from an update
    assert not engines.graphs.steps and engines.graphs.caches is None
    engines.open(PARAMS).admit(1, made.specs(("image",))[0])
    engines.close()
    assert not engines.graphs.steps and engines.graphs.caches is None


def test_few_steps_are_kept(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end, so the rollout takes more buckets than may stay."""
    graphs = DecodeGraphs(made.policy)
    wanted = _tokens(made, graphs)
    assert len(graphs.steps) > 1
    monkeypatch.setattr("rollplex.rollout.decode_graphs.MOST_STEPS", 1)
    assert _tokens(made, graphs) == wanted
    few = DecodeGraphs(made.policy)
    assert _tokens(made, few) == wanted and len(few.steps) == 1
