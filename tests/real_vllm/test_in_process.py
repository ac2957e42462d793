"""vLLM in this process: exact log-probs while everything trains, pushes in place, keyed samples, sleep."""

from __future__ import annotations

from statistics import mean, variance
from typing import Any

import pytest
import torch
from vllm_rig import EXACT, GENERATIONS, MAX_TOKENS, NAMES, VllmRig, finish, low_ids

from numerics.cases import EXAMPLES
from rollplex.config import RewardConfig
from rollplex.errors import ConfigError, EngineError, StateError
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.collect import Collector, Slot
from rollplex.tasks.rewards import RewardRunner, TrainerState
from rollplex.types import Example, FinishReason


def test_log_probs_are_ours_while_the_vision_tower_trains(rig: VllmRig) -> None:
    """Steps 0 to 5 on the same media: a cache that outlived its weights would show as about 0.7."""
    updater = rig.trainer()
    before = {name: p.clone() for name, p in rig.policy.adapter.visual.named_parameters()}
    for step in range(6):
        sampled = rig.sample()
        assert len(sampled) == len(NAMES) * GENERATIONS
        assert rig.gap(sampled) < EXACT, f"step {step}"
        rig.train_on(updater, sampled)
    moved = {name: (p - before[name]).abs().max() for name, p in rig.policy.adapter.visual.named_parameters()}
    assert min(moved.values()) > 0


@pytest.mark.parametrize("cache", ["reset_encoder_cache", "reset_prefix_cache"])
def test_a_cache_that_outlives_its_weights_would_be_seen(
    rig: VllmRig, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.sample()
    monkeypatch.setattr(rig.hosts[0].engine, cache, lambda: True)  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in rig.policy.adapter.visual.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    rig.policy.bump()
    stale = rig.sample()
    # Whole blocks alone are kept, so a stale prefix shows on long prompts only.
    assert rig.gap(stale) > 0.05
    monkeypatch.undo()
    rig.engines.hosted.publish()
    assert rig.gap(rig.sample()) < EXACT


def test_a_push_of_the_same_weights_changes_no_output(rig: VllmRig) -> None:
    first = rig.sample()
    for _ in range(2):
        rig.engines.hosted.publish()
        assert rig.sample() == first


def test_a_sample_depends_on_its_key_alone(rig: VllmRig) -> None:
    together = rig.sample()
    for number in (0, 4):
        alone = rig.sample([rig.specs[number]], first_id=number)
        assert {key: r.token_ids for key, r in alone.items()} == {
            key: r.token_ids for key, r in together.items() if key[0] == number
        }
    drawn = [response.token_ids for response in together.values()]
    assert len(set(drawn)) == len(drawn)
    other = rig.sample(seed=6)
    assert all(other[key].token_ids != together[key].token_ids for key in together)


def test_stop_ids_end_a_response_and_belong_to_it(rig: VllmRig) -> None:
    free = rig.sample()
    stop = free[0, 0].token_ids[3]
    stopped = rig.sample(stop_token_ids=(stop,))
    for key, response in stopped.items():
        tokens = free[key].token_ids
        if stop in tokens:
            assert response.finish is FinishReason.STOP
            assert response.token_ids == tokens[: tokens.index(stop) + 1]
        else:
            assert (response.finish, len(response.token_ids)) == (FinishReason.LENGTH, MAX_TOKENS)


def test_greedy_equals_the_local_engine(rig: VllmRig) -> None:
    params = rig.params(greedy=True, num_generations=1)
    local = finish(LocalEngine(rig.policy, params, max_rows=64), rig.specs)
    theirs = finish(rig.engines.open(params), rig.specs)
    assert {key: r.token_ids for key, r in theirs.items()} == {key: r.token_ids for key, r in local.items()}


def test_filters_do_not_touch_the_log_probs(rig: VllmRig) -> None:
    sampled = rig.sample(top_k=4, top_p=0.9, repetition_penalty=1.3)
    assert rig.gap(sampled) < EXACT


def test_a_banned_id_is_never_sampled(rig: VllmRig) -> None:
    """Ban what would have come: the first tokens of all responses."""
    first = {response.token_ids[0] for response in rig.sample().values()}
    banned = tuple(sorted(first | set(rig.policy.adapter.vision_token_ids)))
    sampled = rig.sample(banned_token_ids=banned)
    assert not {token for response in sampled.values() for token in response.token_ids} & set(banned)
    assert rig.gap(sampled) < EXACT  # of the distribution before the ban


def test_a_prompt_that_does_not_fit_is_refused_by_its_row(rig: VllmRig) -> None:
    engine = rig.engines.open(rig.params(max_tokens=512))
    with pytest.raises(EngineError, match=r"row 0: .* at most 512; raise rollout.vllm.max_sequence_tokens"):
        engine.admit(0, rig.specs[0])


def test_prompts_that_one_pass_of_vllm_cannot_hold_wait_whole(rig: VllmRig) -> None:
    """More than the 2048 tokens that vLLM takes at a time: a part of a prompt would draw a number for nothing."""
    question = "How many red squares are in the image? "
    texts = ["Count. " * number + question * 30 for number in range(8)]
    examples = [Example(number, [{"role": "user", "content": [{"type": "text", "text": text}]}], (), ())
                for number, text in enumerate(texts)]  # fmt: skip
    specs = [rig.rig.builder.build(example) for example in examples]
    assert sum(spec.num_tokens for spec in specs) > 2048
    sampled = rig.sample(specs)
    assert rig.gap(sampled, specs) < EXACT
    alone = rig.sample(specs[6:7], first_id=6)
    assert {key: r.token_ids for key, r in alone.items()} == {k: sampled[k].token_ids for k in alone}


def test_weights_stand_still_while_responses_are_sampled(rig: VllmRig) -> None:
    engine = rig.engines.open(rig.params())
    engine.admit(0, rig.specs[0])
    with pytest.raises(StateError, match="vLLM hold the weights"):
        rig.engines.hosted.publish()
    rig.policy.bump()
    with pytest.raises(StateError, match="open a new rollout"):
        engine.admit(1, rig.specs[1])
    while engine.busy:
        engine.step()


def test_sleep_frees_memory_and_waking_brings_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker ignores sleep. Here it does what the one for CUDA does, on the memory that it can reach. In
    another dtype than training's, so that vLLM's weights are its own."""
    freed: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def sleep(worker: Any, level: int = 1) -> None:
        assert level == 2
        runner = worker.model_runner
        tensors = {"kv_cache": runner.kv_caches, "weights": [p.data for p in runner.get_model().parameters()]}
        for tag, held in tensors.items():
            storages = {t.data_ptr(): t.untyped_storage() for t in held if t.numel()}
            freed[tag] = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in freed[tag]:
                storage.resize_(0)

    def wake_up(_worker: Any, tags: list[str]) -> None:
        for tag in tags:
            for storage, size in freed.pop(tag):
                storage.resize_(size)
                # NaN in weights: one that the push forgets would be seen. Old keys and values are masked by a factor 0.
                garbage = 0xFF if tag == "weights" else 0
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(garbage)  # type: ignore[call-overload]

    monkeypatch.setattr("vllm.v1.worker.cpu_worker.CPUWorker.sleep", sleep)
    monkeypatch.setattr("vllm.v1.worker.cpu_worker.CPUWorker.wake_up", wake_up)
    rig = VllmRig("qwen2_5_vl", engine_dtype="bfloat16")
    try:
        before = rig.sample()
        held = rig.engines.open(rig.params())
        rig.engines.hosted.sleep()
        assert sum(size for _, size in freed["kv_cache"]) > 0.12 * 2**30
        assert sum(size for _, size in freed["weights"]) > 2**17
        with pytest.raises(StateError, match="holds weights vNone"):
            held.admit(0, rig.specs[0])
        assert rig.sample() == before
        assert not freed
    finally:
        rig.close()


def test_sleep_that_the_platform_cannot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)options of rollout.vllm: .*Sleep mode"):
        VllmRig("qwen2_5_vl", sleep=True)


def test_the_collector_gets_whole_groups_with_rewards(rig: VllmRig) -> None:
    rewards = RewardRunner(RewardConfig(), [lambda completions, **_: [float(len(c)) for c in completions]])
    collector = Collector(rig.rig.loaded.processor.tokenizer, rewards)
    slots = [Slot(7 + number, EXAMPLES[name], rig.specs[number]) for number, name in enumerate(NAMES)]
    engine = rig.engines.open(rig.params())
    version = rig.policy.weight_version
    raw = collector.scored(collector.decode(engine, slots, GENERATIONS, version, TrainerState(0, 1)))
    rewards.close()
    assert [item.group.rollout_id for item in raw] == [slot.rollout_id for slot in slots]
    for item in raw:
        assert [response.index for response in item.group.responses] == list(range(GENERATIONS))
        assert len(item.scores.rewards) == GENERATIONS
    alone = rig.sample([rig.specs[3]], first_id=10)
    assert [r.token_ids for r in raw[3].group.responses] == [alone[10, index].token_ids for index in range(GENERATIONS)]


@pytest.mark.parametrize("engine_of_family", ["qwen2_5_vl"], indirect=True)
def test_five_steps_learn_as_with_the_local_engine(rig: VllmRig) -> None:
    """Mean reward after five GRPO steps over three seeds each; the random numbers differ between the engines."""
    start = {name: tensor.clone() for name, tensor in rig.policy.model.state_dict().items()}
    ends: dict[str, list[float]] = {"vllm": [], "local": []}
    begins: dict[str, list[float]] = {"vllm": [], "local": []}
    for engine in ends:
        for seed in range(3):
            curve = _curve(rig, start, engine, seed)
            begins[engine].append(curve[0])
            ends[engine].append(curve[-1])
    assert abs(mean(begins["vllm"]) - mean(begins["local"])) < 0.03, begins  # one distribution, 336 responses each
    assert min(mean(ends[engine]) - mean(begins[engine]) for engine in ends) > 0.1, (begins, ends)
    spread = (variance(ends["vllm"]) + variance(ends["local"])) ** 0.5
    assert abs(mean(ends["vllm"]) - mean(ends["local"])) < 3 * spread / 3**0.5 + 0.02, ends


def _curve(rig: VllmRig, start: dict[str, torch.Tensor], engine: str, seed: int) -> list[float]:
    """Mean rewards before and after each of five steps from the weights `start`."""
    with torch.no_grad():
        for name, tensor in rig.policy.model.state_dict().items():
            tensor.copy_(start[name])
    rig.policy.bump()
    updater, curve = rig.trainer(), []
    for step in range(6):
        params = rig.params(num_generations=16, seed=100 * seed + step)
        opened = rig.engines.open(params) if engine == "vllm" else LocalEngine(rig.policy, params, max_rows=512)
        sampled = finish(opened, rig.specs)
        curve.append(sum(map(low_ids, sampled.values())) / len(sampled))
        if step < 5:
            rig.train_on(updater, sampled)
    return curve
