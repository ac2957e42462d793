"""The local engine: greedy output of generate, its own log-probs, keyed samples, bans, stops, fresh weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from numerics.cases import (
    EXAMPLES,
    FAMILIES,
    config_of,
    groups_of,
    oracle_group,
    product_update,
    rig,
    sampled_tokens,
    tiny_rig,
)
from rollplex.config import LoraConfig
from rollplex.errors import StateError
from rollplex.models.load import LoadedModel
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.prefix_book import PrefixBook
from rollplex.types import FinishReason

# Of very different lengths. Slow videos are left out: there generate's own positions differ from a full forward's.
NAMES = ("short_text", "image", "two_images", "video", "text", "video_image", "image_video_image")


def _run(policy, specs, params, *, max_rows=64, order=None, source=None):
    """{(rollout id, index): response} and the number of steps taken."""
    engine = LocalEngine(policy, params, max_rows=max_rows, prefix_source=source)
    for number in order or range(len(specs)):
        engine.admit(number, specs[number])
    found, steps = {}, 0
    while engine.busy:
        for finished in engine.step():
            found[finished.rollout_id, finished.response.index] = finished.response
        steps += 1
        assert steps < 1000
    return found, steps


def _generate(made, spec, name, family, **options):
    """transformers' own greedy continuation of one prompt."""
    group = groups_of([spec], [name], [[1]], 10)[0]
    inputs = oracle_group(group, family).inputs
    out = made.policy.model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=12,
        suppress_tokens=list(made.policy.adapter.vision_token_ids),
        **options,
    )
    return tuple(out[0, spec.num_tokens :].tolist())


def _greedy(made, **options):
    ids = made.policy.adapter.vision_token_ids
    return SamplingParams(1, 12, greedy=True, banned_token_ids=ids, **options)


def _stops(made):
    """An id that greedy decoding soon meets, so that some responses stop and others do not."""
    with full_float64():
        found, _ = _run(made.policy, made.specs(("image",)), _greedy(made))
    return found[0, 0].token_ids[4]


def _with_lora(made, targets, dtype):
    """Adapters of this dtype that change something."""
    wrapped = add_lora(made.loaded.model, LoraConfig(r=4, target_modules=targets), seed=0, base_path=None)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                parameter.add_(0.1)
    return rig(LoadedModel(wrapped.eval(), made.loaded.processor))


def _variant(family, variant):
    if variant == "tied":
        return tiny_rig(family, tie_word_embeddings=True)
    if variant == "gqa":
        return tiny_rig(family, num_heads=8, num_kv_heads=2, num_layers=2)
    made = tiny_rig(family, torch.float64)
    if variant.startswith("lora"):
        return _with_lora(made, tuple(variant.split()[1:]) or LoraConfig().target_modules, torch.float64)
    return made


@pytest.mark.parametrize(
    "variant", ["plain", "tied", "gqa", "lora", "lora q_proj", "lora gate_proj", "lora o_proj down_proj"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, variant):
    """Token by token for prompts of all kinds decoded together, with a stop id that only some of them reach."""
    made = _variant(family, variant)
    specs, stop = made.specs(NAMES), _stops(made)
    with full_float64():
        found, _ = _run(made.policy, specs, _greedy(made, stop_token_ids=(stop,)))
        for number, name in enumerate(NAMES):
            wanted = _generate(made, specs[number], name, family, eos_token_id=stop, pad_token_id=stop)
            assert found[number, 0].token_ids == wanted
    assert {r.finish for r in found.values()} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_in_float32_with_repetition_penalty(family):
    made = tiny_rig(family, torch.float32)
    specs = made.specs(NAMES)
    found, _ = _run(made.policy, specs, _greedy(made, repetition_penalty=1.3))
    for number, name in enumerate(NAMES):
        wanted = _generate(made, specs[number], name, family, eos_token_id=-1, pad_token_id=0, repetition_penalty=1.3)
        assert found[number, 0].token_ids == wanted


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_g21_log_probs_are_those_of_the_full_sequence(family, dtype, bound, lora):
    """At the sampling temperature, before any filter, whatever the filters and the ban leave. Adapters of a model in 16
    bits are in 32."""
    made = tiny_rig(family, dtype)
    if lora:
        made = _with_lora(made, LoraConfig().target_modules, torch.promote_types(dtype, torch.float32))
    specs = made.specs(NAMES)
    params = SamplingParams(
        num_generations=3,
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        repetition_penalty=1.1,
        stop_token_ids=(3, 40, 41),
        banned_token_ids=made.policy.adapter.vision_token_ids,
    )
    with full_float64():
        found, _ = _run(made.policy, specs, params)
        for (number, _), response in found.items():
            row = [(specs[number], response.token_ids)]
            wanted = full_sequence_logps(made.policy, row, 0.7, with_grad=False).logps
            torch.testing.assert_close(torch.tensor(response.logps, dtype=wanted.dtype), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_composition_never_changes_a_sample(family):
    """Other row limits, another order of prompts, prompts alone, prefixes from one pack: the same tokens."""
    made = tiny_rig(family, num_layers=2)
    specs = made.specs(NAMES)
    stop = tuple(range(0, made.plain_vocab, 17))  # responses of very different lengths
    params = SamplingParams(num_generations=3, max_tokens=20, stop_token_ids=stop, seed=5)
    with full_float64():
        wanted, _ = _run(made.policy, specs, params)
        assert len({len(r.token_ids) for r in wanted.values()}) > 5
        book = PrefixBook(made.policy, 4096)
        book.compute(dict(enumerate(specs)), "none")
        others = [
            _run(made.policy, specs, params, max_rows=1)[0],
            _run(made.policy, specs, params, max_rows=3)[0],
            _run(made.policy, specs, params, max_rows=5, order=list(reversed(range(len(specs)))))[0],
            _run(made.policy, specs, params, source=book.source)[0],
        ]
        for number in (0, 3):
            alone, _ = _run(made.policy, specs, params, order=[number])
            others.append({key: alone.get(key, value) for key, value in wanted.items()})
    for other in others:
        assert {key: r.token_ids for key, r in other.items()} == {key: r.token_ids for key, r in wanted.items()}
        assert all(other[key].finish == r.finish for key, r in wanted.items())
        for key, response in wanted.items():
            assert other[key].logps == pytest.approx(response.logps, abs=1e-11)


def test_prompts_may_join_while_others_decode():
    made = tiny_rig("qwen2_5_vl", num_layers=2)
    specs = made.specs(NAMES)
    params = SamplingParams(num_generations=2, max_tokens=12, stop_token_ids=tuple(range(0, 200, 9)))
    with full_float64():
        wanted, _ = _run(made.policy, specs, params)
        engine, found, waiting = LocalEngine(made.policy, params, max_rows=4), {}, list(range(len(specs)))
        while engine.busy or waiting:
            if waiting:
                engine.admit(waiting[0], specs[waiting.pop(0)])
            for finished in engine.step():
                found[finished.rollout_id, finished.response.index] = finished.response
    assert {key: r.token_ids for key, r in found.items()} == {key: r.token_ids for key, r in wanted.items()}


def test_seed_rollout_and_index_key_the_samples():
    made = tiny_rig("qwen3_vl", torch.float32, num_layers=2)
    spec = made.specs(("image",))[0]
    params = SamplingParams(num_generations=4, max_tokens=16)
    found, _ = _run(made.policy, [spec, spec], params)
    assert len({r.token_ids for r in found.values()}) == 8  # equal prompts, different rollouts and indices
    other, _ = _run(made.policy, [spec, spec], replace(params, seed=1))
    assert not {r.token_ids for r in other.values()} & {r.token_ids for r in found.values()}
    again, _ = _run(made.policy, [spec, spec], params)
    assert again == found


@pytest.mark.parametrize("greedy", [True, False])
def test_g01_vision_ids_are_never_sampled(greedy):
    """A head that wants nothing but vision ids: without the ban they come, with it never."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    ids = made.policy.adapter.vision_token_ids
    spec = made.specs(("image",))[0]
    params = SamplingParams(num_generations=1 if greedy else 8, max_tokens=8, greedy=greedy)
    before, _ = _run(made.policy, [spec], replace(params, greedy=True, num_generations=1))
    with torch.no_grad():
        for vision in ids:
            made.policy.adapter.lm_head.weight[vision] = (
                20 * made.policy.adapter.lm_head.weight[before[0, 0].token_ids[0]]
            )
    free, _ = _run(made.policy, [spec], params)
    assert any(set(r.token_ids) & set(ids) for r in free.values())
    banned, _ = _run(made.policy, [spec], replace(params, banned_token_ids=ids))
    assert not any(set(r.token_ids) & set(ids) for r in banned.values())


def test_a_stop_id_ends_a_response_at_once():
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    specs = made.specs(("image", "text"))
    free, _ = _run(made.policy, specs, SamplingParams(num_generations=4, max_tokens=16))
    stop = free[0, 1].token_ids[2]
    params = SamplingParams(num_generations=4, max_tokens=16, stop_token_ids=(stop,))
    engine = LocalEngine(made.policy, params, max_rows=64)
    for number, spec in enumerate(specs):
        engine.admit(number, spec)
    step = 0
    while engine.busy:
        step += 1
        for finished in engine.step():
            response = finished.response
            assert len(response.token_ids) == step  # handed out by the very step that ended it
            whole = free[finished.rollout_id, response.index].token_ids
            cut = whole.index(stop) + 1 if stop in whole else 16
            assert response.token_ids == whole[:cut]
            assert response.finish == (FinishReason.STOP if stop in whole else FinishReason.LENGTH)
        assert len(engine.rows) == sum(stop not in r.token_ids[:step] for r in free.values()) * (step < 16)


@pytest.mark.parametrize("max_rows", [1, 64])
def test_responses_of_one_token(max_rows):
    made = tiny_rig("qwen3_vl", torch.float32, num_layers=2)
    specs = made.specs(("image", "text"))
    found, steps = _run(made.policy, specs, SamplingParams(num_generations=3, max_tokens=1), max_rows=max_rows)
    assert len(found) == 6 and {len(r.token_ids) for r in found.values()} == {1}
    assert steps == (6 if max_rows == 1 else 1)


def _addresses(engine: LocalEngine) -> list[int]:
    """Of the fused matrices that it decodes with."""
    return [layer.qkv[0].matrix_CX.data_ptr() for layer in engine.model.weights.layers]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_g11_after_an_optimizer_step_the_new_weights_decode(family, frozen):
    """No cache of older weights survives: not the fused matrices, not prefixes, not features of a trained tower."""
    made = tiny_rig(family, num_layers=2)
    if frozen:
        made.loaded.model.model.visual.requires_grad_(False)
        made = rig(made.loaded)
    policy = made.policy
    specs = made.specs(NAMES)
    params = SamplingParams(num_generations=2, max_tokens=8, temperature=0.7)
    with full_float64():
        _run(policy, specs, params)  # fuses the weights
        features = policy.encode(specs).embeds.clone()
        storage = _addresses(LocalEngine(policy, params, max_rows=2))
        scored = groups_of(specs, NAMES, [[3, 4]] * len(NAMES), made.plain_vocab)
        product_update(policy, scored, config_of(train={"learning_rate": 3e-3}))
        assert torch.equal(policy.encode(specs).embeds, features) == frozen
        engine = LocalEngine(policy, params, max_rows=64)
        assert _addresses(engine) == storage  # still views: nothing copied
        found, _ = _run(policy, specs, params)
        fresh = Policy(copy.deepcopy(policy.model))
        assert {k: r.token_ids for k, r in found.items()} == {
            k: r.token_ids for k, r in _run(fresh, specs, params)[0].items()
        }
        for (number, _), response in found.items():
            wanted = full_sequence_logps(fresh, [(specs[number], response.token_ids)], 0.7, with_grad=False).logps
            assert response.logps == pytest.approx(wanted.tolist(), abs=1e-11)


def test_weights_may_not_change_while_responses_are_sampled():
    made = tiny_rig("qwen2_5_vl", torch.float32)
    engine = LocalEngine(made.policy, SamplingParams(num_generations=1, max_tokens=4), max_rows=4)
    engine.admit(0, made.specs(("text",))[0])
    engine.step()
    made.policy.bump()
    with pytest.raises(StateError, match=r"v0.*v1"):
        engine.step()


def test_a_prefix_of_older_weights_is_refused():
    made = tiny_rig("qwen2_5_vl", torch.float32)
    spec = made.specs(("text",))[0]
    book = PrefixBook(made.policy, 4096)
    book.compute({0: spec}, "none")
    made.policy.bump()
    engine = LocalEngine(made.policy, SamplingParams(1, 4), max_rows=4, prefix_source=book.source)
    with pytest.raises(StateError, match="v0"):
        engine.admit(0, spec)


def test_an_engine_can_be_used_again():
    """The next rollout's samples do not depend on what the engine decoded before."""
    made = tiny_rig("qwen3_vl", num_layers=2)
    specs = made.specs(NAMES)
    params = SamplingParams(
        num_generations=2, max_tokens=9, repetition_penalty=1.2, stop_token_ids=tuple(range(0, 200, 7))
    )
    with full_float64():
        wanted, _ = _run(made.policy, specs, params)
        engine = LocalEngine(made.policy, params, max_rows=5)
        for number in (6, 2):
            engine.admit(number, specs[number])
        while engine.busy:
            engine.step()
        made.policy.bump()
        found = sampled_tokens(engine, specs)
    assert found == {key: r.token_ids for key, r in wanted.items()}


def test_the_examples_used_here_have_media_of_every_kind():
    kinds = {(bool(EXAMPLES[name].images), bool(EXAMPLES[name].videos)) for name in NAMES}
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}
