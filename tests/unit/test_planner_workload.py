"""A recipe under an arrangement: what of its options reaches the simulated step."""

from __future__ import annotations

import math

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.hardware import hardware
from rollplex.planner.parallel import Parallel
from rollplex.planner.search import on_devices
from rollplex.planner.workload import SIMULATED, Arrangement, Assumptions, Workload
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.schedule.spec import Phase, Task

H800 = Assumptions(hardware("h800"), response_tokens=100, spread=0.7)
SMALL = (
    "model.build.num_layers=8", "rollout.prompts_per_step=8", "rollout.num_generations=4",
    "data.max_prompt_tokens=2048", "rollout.max_completion_length=512",
)  # fmt: skip


def _config(*overrides: str) -> Config:
    return load_config(packaged_recipe("rollplex_32b"), [*SMALL, *overrides])


def _workload(devices: int, *overrides: str) -> Workload:
    return Workload(on_devices(_config(*overrides), devices), H800)


COLOCATED = Arrangement("serial", Parallel(4, data=2), Parallel(2, data=4))
POOLS = Arrangement("disaggregated", Parallel(4), Parallel(2, data=2))


@pytest.mark.parametrize("plan", [COLOCATED, POOLS], ids=["blocks", "pools"])
def test_a_kl_in_the_reward_takes_a_pass_of_the_actor_before_the_update(plan: Arrangement) -> None:
    """As in a run (schedule/spec_from_config.py): old log-probs are taken on the actor's prefixes."""
    plain, scored = _workload(8), _workload(8, "algorithm.kl_in_reward=on")
    run = scored.on(plan).simulate(1, traced=(0,))
    ends = {(span.name, span.group): span for span in run.spans}
    for (name, group), span in ends.items():
        if name == Phase.REF_RESPONSE:
            assert span.start_s >= ends[Phase.ACTOR_PREFIX, group].end_s
    assert run.seconds_per_step > plain.on(plan).simulate(1).seconds_per_step
    once, twice = (w.cost(plan).task(Task(Phase.REF_RESPONSE, 0)).total for w in (plain, scored))
    assert twice == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("algorithm.scale_rewards=batch", {"stream", "rolloutpipe"}),
        ("algorithm.loss_type=reinforce_pp", {"stream", "rolloutpipe"}),
        ("algorithm.dynamic_sampling=resample", {"stream", "rolloutpipe"}),
        ("algorithm.kl_in_reward=on", {"hybrid"}),
        ("algorithm.beta=0", {"hybrid"}),
        ("algorithm.scale_rewards=none", set()),
    ],
)
def test_schedules_say_what_they_cannot_run(option: str, refused: set[str]) -> None:
    workload = _workload(8, option)
    assert {name for name in SIMULATED if workload.refusal(name)} == refused


def test_engines_take_whole_prompts() -> None:
    """Two groups to a block: eight engines prefill them no faster than two, each on one engine."""
    workload = _workload(32)
    few, many = (
        workload.on(Arrangement("serial", Parallel(8, data=4), Parallel(8 // engines, data=4 * engines)))
        for engines in (2, 8)
    )
    for arranged in (few, many):
        group = arranged.feed.groups(0, 1)[0]
        alone_s = arranged.cost.task(Task(Phase.PREFILL, 0)).total
        assert 2 * arranged.seconds(Phase.PREFILL, group) == pytest.approx(alone_s)
        run = arranged.simulate(1, traced=(0,))
        last_s = max(span.end_s for span in run.spans if span.name == Phase.PREFILL)
        assert last_s == pytest.approx(alone_s)


def test_places_that_a_recipe_limits_are_those_of_the_stages() -> None:
    """The table of stages and the simulation decode as many rows at once."""
    plan = Arrangement("serial", Parallel(4), Parallel(4))
    for rows in (4, 256):
        workload = _workload(4, f"rollout.max_decode_rows={rows}")
        generation = workload.stages(plan)[0]
        equal = Workload(workload.config, Assumptions(H800.hardware, response_tokens=100, spread=0.0))
        run = equal.on(plan).simulate(1).steps[0]
        assert generation.estimate_s == pytest.approx(run.decoded_s - run.start_s, rel=0.01)
        assert generation.lower_s <= generation.estimate_s <= generation.upper_s


def test_weights_travel_within_a_node_where_both_sides_are_in_it() -> None:
    inside, outside = (
        _workload(8).cost(POOLS),
        _workload(16).cost(Arrangement("disaggregated", Parallel(4, data=2), Parallel(2, data=4))),
    )
    assert inside.publish_within_node and not outside.publish_within_node
    assert inside.publish.total < outside.publish.total / 2
    stages_apart = Arrangement("serial", Parallel(4, 2, data=4), Parallel(4, data=8))
    assert not _workload(32).cost(stages_apart).publish_within_node  # the other stage is 16 devices away
    assert _workload(32).cost(Arrangement("serial", Parallel(8, data=4), Parallel(4, data=8))).publish_within_node


def test_replicas_that_share_no_optimizer_state_update_all_of_it() -> None:
    plan = Arrangement("serial", Parallel(2, data=4), Parallel(2, data=4))
    apart, shared = (_workload(8, f"memory.shard_optimizer={value}").cost(plan).optimizer for value in ("off", "on"))
    assert apart.activations == pytest.approx(4 * shared.activations, rel=1e-6)
    assert apart.network == pytest.approx(shared.network * 8 / 6, rel=1e-3)  # all-reduced in fp32, or gathered in bf16


def test_one_device_prefills_the_updates_own_prefix() -> None:
    """As the local engine does: the prompt is computed once for rollout and update."""
    plan = Arrangement("rollplex", Parallel(), Parallel())
    one, served = (
        _workload(1, *options).on(plan) for options in ((), ("rollout.engine=vllm", "rollout.vllm.enforce_eager=on"))
    )
    assert one.spec.prefill_is_actor_prefix and not served.spec.prefill_is_actor_prefix
    names = {span.name for span in one.simulate(1, traced=(0,)).spans}
    assert Phase.ACTOR_PREFIX not in names and Phase.PREFIX_BACKWARD in names
    assert one.simulate(1).seconds_per_step < served.simulate(1).seconds_per_step


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response_tokens": 0.0}, "--response-tokens is 0, needed a number above 0"),
        ({"response_tokens": math.inf}, "--response-tokens is inf"),
        ({"response_tokens": math.nan}, "--response-tokens is nan"),
        ({"spread": math.inf}, "--spread is inf"),
        ({"spread": -1.0}, "--spread is -1, needed a number of 0 or more"),
        ({"contention": math.nan}, "--contention is nan, needed a number of 1 or more"),
        ({"contention": math.inf}, "--contention is inf"),
    ],
)
def test_assumptions_are_numbers_in_range(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Assumptions(hardware("h800"), **given)
