"""The search over arrangements: what it considers, that pruning loses nothing, memory, reasons, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.models.shapes import Experts
from rollplex.planner.arrangements import Degrees, arrangements, splits
from rollplex.planner.breakdown import breakdown
from rollplex.planner.fit import needs
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import hardware
from rollplex.planner.memory import memory_section
from rollplex.planner.parallel import Parallel
from rollplex.planner.remedies import refusal
from rollplex.planner.search import (
    GIB,
    STEPS,
    Fitting,
    Search,
    cap_of,
    degrees_of,
    on_devices,
    search,
    step_seconds,
    to_consider,
)
from rollplex.planner.search_report import answer, search_facts, search_lines
from rollplex.planner.step_bound import StepBound
from rollplex.planner.workload import SIMULATED, Arrangement, Assumptions, Workload
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe

H800 = Assumptions(hardware("h800"), response_tokens=100, spread=0.7)
SMALL = (
    "model.build.num_layers=8", "rollout.prompts_per_step=8", "rollout.num_generations=4", "memory.cap_gib=70",
    "data.max_prompt_tokens=2048", "rollout.max_completion_length=512",
)  # fmt: skip


def _config(*overrides: str) -> Config:
    return load_config(packaged_recipe("rollplex_32b"), [*SMALL, *overrides])


@pytest.fixture(scope="module")
def found() -> Search:
    return search(_config(), 4, H800)


def _workload(devices: int, *overrides: str) -> Workload:
    return Workload(on_devices(_config(*overrides), devices), H800)


def test_every_arrangement_uses_all_devices_and_divides_the_model() -> None:
    workload = _workload(8)
    plans = arrangements(degrees_of(workload), 8, 8).plans
    assert {plan.schedule for plan in plans} == set(SIMULATED)
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.devices == 8
        plan.train.check(workload.counts)
        plan.rollout.check(workload.counts)
        if not plan.pools:  # one backing for both sides
            assert plan.train.tensor % plan.rollout.tensor == plan.train.pipeline % plan.rollout.pipeline == 0
    assert {side.tensor for side in degrees_of(workload).training(40)} == {
        1,
        2,
        4,
        8,
    }  # 5 divides 40 query, not 8 KV heads
    assert (splits(32), splits(2), splits(1)) == ([4, 8, 12, 16, 20, 24, 28], [1], [])
    assert splits(24) == [3, 6, 8, 9, 12, 15, 16, 18, 21]  # whole nodes too
    assert splits(7) == [1, 2, 3, 4, 5, 6] and splits(24, node=1) == [3, 6, 9, 12, 15, 18, 21]
    assert all(2 * plan.scoring.devices <= 8 for plan in plans if plan.scoring is not None)
    few = arrangements(degrees_of(workload), 3, 8)
    assert few.left_out["whose replicas do not divide the prompts"] > 0
    assert all(plan.schedule != "hybrid" for plan in arrangements(degrees_of(_workload(8, "beta=0")), 8, 8).plans)
    assert all(3 % plan.train.data == 0 for plan in few.plans if not plan.pools)


def test_context_and_experts_are_axes() -> None:
    workload = _workload(8, "data.max_prompt_tokens=16384")
    degrees = degrees_of(workload)
    assert {side.context for side in degrees.training(8)} == {1, 2, 4}  # parts of 4,096 tokens at least
    assert {side.context for side in degrees.rollout(8)} == {side.expert for side in degrees.training(8)} == {1}
    mixture = Degrees(ModelCounts(workload.counts.shape, 2, Experts(12, 2)), prompt_tokens=2048)
    assert {side.expert for side in mixture.training(8)} == {1, 2, 4}  # 8 does not divide 12 experts
    for side in (*degrees.training(8), *mixture.training(8), *mixture.rollout(8)):
        assert side.devices == 8
        side.check(mixture.counts if side.expert > 1 else degrees.counts)
    for plan in arrangements(mixture, 8, 8).plans:
        assert plan.pools or plan.train.expert % plan.rollout.expert == 0  # one backing: the rollout holds more
    with pytest.raises(ConfigError, match="does not divide 12 experts"):
        Parallel(data=8, expert=8).check(mixture.counts)


def test_sides_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="engines of 4 devices do not fill training replicas of 2"):
        Arrangement("serial", Parallel(2, data=2), Parallel(4))


def test_no_simulation_is_faster_than_its_bound() -> None:
    workload = _workload(8)
    bound = StepBound(workload, range(1, STEPS))
    plans = arrangements(degrees_of(workload), 8, 8).plans
    assert {plan.schedule for plan in plans} == set(SIMULATED)
    for plan in plans:
        assert 0.97 * bound.seconds(plan) <= step_seconds(workload, plan), plan


def test_pruning_loses_nothing(found: Search) -> None:
    """Against checking and simulating all of them."""
    fitting = Fitting(found.workload, found.cap_bytes)
    every: list[tuple[float, Arrangement]] = []
    for plan in arrangements(degrees_of(found.workload), 8, 4).plans:
        fits = fitting.of(plan)
        if fits is not None:
            every.append((step_seconds(found.workload, plan) + max(f.plan.exposed_s for f in fits), plan))
    wanted = sorted(seconds for seconds, plan in every if plan.on_policy)[:4]
    assert [ranked.seconds for ranked in found.best] == pytest.approx(wanted)
    for schedule in {plan.schedule for _, plan in every}:
        fastest = min(seconds for seconds, plan in every if plan.schedule == schedule)
        assert found.by_schedule[schedule].seconds == pytest.approx(fastest), schedule
    assert sum(found.left_out.values()) == found.considered
    assert found.left_out["simulated"] < len(every)


def test_off_policy_is_compared_and_never_recommended(found: Search) -> None:
    assert "async" in found.by_schedule
    assert all(ranked.plan.schedule != "async" for ranked in found.best)
    (row,) = (line for line in search_lines(search_facts(_config(), found)) if " async " in line)
    assert "OFF-POLICY" in row


def test_every_second_and_byte_is_accounted_for(found: Search) -> None:
    for ranked in (*found.best, *found.by_schedule.values()):
        where = breakdown(found.workload, ranked.plan, ranked.moves_s)
        assert where.seconds == pytest.approx(ranked.seconds)
        assert sum(where.causes.values()) == pytest.approx(ranked.seconds)
        assert sum(where.phases.values()) == pytest.approx(ranked.seconds)
        assert where.limit in where.causes
        for fit in ranked.fits:
            assert sum(fit.peak_by_class().values()) == fit.plan.peak_bytes <= found.cap_bytes
    facts = search_facts(_config(), found)
    runner_up = facts["runner_up"]
    assert sum(runner_up["more_s"].values()) == pytest.approx(runner_up["slower_s"])
    assert runner_up["slower_s"] >= 0 and runner_up["differs_in"]


def test_causes_add_up_where_a_typical_response_is_one_token() -> None:
    """The first token comes from the prompt: a typical group decodes for no time, longer ones do."""
    workload = Workload(on_devices(_config(), 4), Assumptions(hardware("h800"), response_tokens=1, spread=1.5))
    plan = Arrangement("serial", Parallel(4), Parallel(4))
    where = breakdown(workload, plan, 0.0)
    assert where.phases["decode"] > 0
    assert sum(where.causes.values()) == pytest.approx(sum(where.phases.values())) == pytest.approx(where.seconds)


def test_a_schedule_without_an_arrangement_says_why(found: Search) -> None:
    assert found.missing == {}
    one = search(_config(), 1, H800, keep=1)
    assert one.missing.keys() == {"hybrid", "disaggregated", "rolloutpipe", "async"}
    assert all(reason == f"{name} takes 2 devices or more, found --gpus 1" for name, reason in one.missing.items())
    seven = search(_config(), 7, H800, keep=1)  # replicas of 7 devices, or 7 of one: neither divides 8 prompts
    assert seven.missing.keys() == {"serial", "rollplex", "stream"}
    assert "no training replicas on 7 devices divide 8 prompts" in seven.missing["stream"]
    lines = [*search_lines(search_facts(_config(), seven))]
    assert sum("prompts_per_step" in line for line in lines) == 3
    tight = search(_config("memory.cap_gib=62"), 1, H800, keep=1)
    assert "fits nowhere under 62.00 GiB" in tight.missing["stream"] and "rollplex" in tight.by_schedule


@pytest.mark.parametrize(
    ("option", "missing"),
    [
        ("algorithm.scale_rewards=batch", {"stream": "scale_rewards=batch", "rolloutpipe": "use 'disaggregated'"}),
        ("algorithm.dynamic_sampling=resample", {"stream": "resample", "rolloutpipe": "use 'disaggregated'"}),
        ("algorithm.kl_in_reward=on", {"hybrid": "old log-probs"}),
        ("algorithm.beta=0", {"hybrid": "beta 0"}),
    ],
)
def test_schedules_that_cannot_run_the_step_are_missing_and_the_others_found(
    option: str, missing: dict[str, str]
) -> None:
    found = search(_config(option), 2, H800, keep=1)
    assert found.by_schedule.keys() | missing.keys() == set(SIMULATED)
    assert found.missing.keys() == missing.keys()
    assert all(words in found.missing[name] for name, words in missing.items())
    assert sum(found.left_out.values()) == found.considered


def test_hidden_time_is_the_schedules(found: Search) -> None:
    hidden = {name: breakdown(found.workload, ranked.plan, 0.0).hidden_s for name, ranked in found.by_schedule.items()}
    assert hidden["serial"] == hidden["disaggregated"] == 0
    assert min(hidden["rollplex"], hidden["stream"], hidden["async"]) > 0


def test_whoever_watches_a_search_sees_each_arrangement_once(found: Search) -> None:
    seen: list[int] = []

    def watched(items: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
        for item in items:
            yield item
            seen.append(item[1])

    again = search(_config(), 4, H800, watched=watched)
    assert sorted(seen) == list(range(len(to_consider(again.workload, 4).plans)))
    assert again.best == found.best


@pytest.mark.parametrize("schedule", ["serial", "rollplex", "stream"])
@pytest.mark.parametrize(
    ("devices", "train", "rollout"), [(8, Parallel(4, data=2), Parallel(2, data=4)), (1, Parallel(), Parallel())]
)
def test_memory_is_that_of_the_memory_section(schedule: str, devices: int, train: Parallel, rollout: Parallel) -> None:
    """Without a pipeline, colocated: the same records, whichever of the two commands counts them."""
    degrees = f"train_tp={train.tensor}", f"rollout_tp={rollout.tensor}"
    config = _config(*degrees, f"memory.devices={devices}", f"schedule.name={schedule}", "memory.cap_gib=null")
    workload = _workload(devices)
    plan = Arrangement(schedule, train, rollout)
    (need,) = needs(workload.shape, workload.counts, H800.hardware, plan)
    section = memory_section(config)
    assert need.naive_bytes / GIB == section["naive_gib"]
    assert need.smallest_cap / GIB == section["smallest_cap_gib"]
    assert need.least_bytes <= need.smallest_cap
    assert {record.name: record.nbytes for record in need.records} == {
        record["name"]: record["bytes"] for record in section["records"]
    }


def test_pools_share_no_weights_and_divide_the_records() -> None:
    workload = _workload(8)
    plan = Arrangement("disaggregated", Parallel(2, 2), Parallel(2, data=2))
    training, rollout = needs(workload.shape, workload.counts, H800.hardware, plan)
    names = {record.name for record in rollout.records}
    assert names == {"actor weights, rollout layout", "rollout KV cache", "rollout workspace"}
    assert not names & {record.name for record in training.records}
    assert "actor weights, training layout" in {record.name for record in training.records}
    choices = [c.policy for need in (training, rollout) for r in need.records if "actor w" in r.name for c in r.choices]
    assert choices == ["keep", "keep"]


def test_a_reference_of_its_own_takes_its_memory_and_its_passes_along() -> None:
    workload = _workload(8)
    reference = Parallel(2, data=2)
    plan = Arrangement("hybrid", Parallel(4), Parallel(2, data=2), reference)
    block, pool = needs(workload.shape, workload.counts, H800.hardware, plan)
    assert not any(record.name.startswith("reference") for record in block.records)
    assert {"reference weights", "reference boundary", "logits"} <= {record.name for record in pool.records}
    assert not any("actor" in record.name or "optimizer" in record.name for record in pool.records)
    weights = {record.name: record.nbytes for need in (block, pool) for record in need.records}
    assert weights["reference weights"] > weights["actor weights, training layout"]  # TP2 against TP4
    run = workload.on(plan).simulate(1, traced=(0,))
    apart = {span.lane for span in run.spans if span.name in ("ref_prefix", "ref_response")}
    assert apart == {"window"}
    without = _workload(8, "beta=0").on(Arrangement("serial", plan.train, plan.rollout)).simulate(1)
    assert run.seconds_per_step == without.seconds_per_step  # all of it is hidden


@pytest.mark.parametrize(
    ("schedule", "scoring", "message"),
    [
        ("hybrid", None, "'hybrid' needs them"),
        ("serial", Parallel(2), "the others have none"),
        ("hybrid", Parallel(1, data=3), "3 replicas of the reference cannot be shared evenly by 2 blocks"),
    ],
)
def test_references_that_nobody_or_not_all_can_use(schedule: str, scoring: Parallel | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arrangement(schedule, Parallel(2, data=2), Parallel(2, data=2), scoring)


def test_a_cap_of_the_recipe_or_of_the_device() -> None:
    assert cap_of(_config(), H800) == 70 * GIB
    assert cap_of(_config("memory.cap_gib=null"), H800) == 80e9
    with pytest.raises(ConfigError, match=r"memory\.cap_gib is 90.*80 GB"):
        cap_of(_config("memory.cap_gib=90"), H800)


def test_the_change_that_a_refusal_names_fits_and_a_smaller_one_does_not() -> None:
    config = _config("memory.cap_gib=6", "train.micro_batch_tokens=512")
    with pytest.raises(ConfigError, match="the smallest change that would fit") as refused:
        answer(config, 2, H800)
    assert str(refused.value) == str(refusal(config, 2, H800))
    changes = re.findall(r"(?:fit|or): (\S+=\S+|--gpus \d+)", str(refused.value))
    gpus = [int(change.split()[1]) for change in changes if "--gpus" in change]
    caps = [float(change.split("=")[1]) for change in changes if "cap_gib" in change]
    assert gpus and caps
    assert search(config, gpus[0], H800, keep=1).best
    for fewer in range(2, gpus[0]):
        assert not search(config, fewer, H800, keep=1).by_schedule
    assert search(_config(f"memory.cap_gib={caps[0]}", "train.micro_batch_tokens=512"), 2, H800, keep=1).best
    lower = _config(f"memory.cap_gib={caps[0] - 0.011:.3f}", "train.micro_batch_tokens=512")
    assert not search(lower, 2, H800, keep=1).by_schedule
    for change in changes:
        if change.startswith(("memory.", "train.", "rollout.")):
            changed = _config("memory.cap_gib=6", "train.micro_batch_tokens=512", change)
            assert search(changed, 2, H800, keep=1).by_schedule, change


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus is 0"):
        search(_config(), 0, H800)
    with pytest.raises(ConfigError, match=r"--gpus 11: no arrangement divides the model and 1 prompts"):
        search(_config("rollout.prompts_per_step=1", "model.build.num_layers=1"), 11, H800)
    with pytest.raises(ConfigError, match=r"num_iterations"):
        search(_config("algorithm.num_iterations=2"), 4, H800)


def test_no_smaller_change_of_an_option_would_fit() -> None:
    tight = ("memory.sequence_parallel=on", "memory.shard_optimizer=on", "train.micro_batch_tokens=16384")
    message = str(refusal(_config("memory.cap_gib=26", *tight), 2, H800))
    (tokens,) = re.findall(r"train\.micro_batch_tokens=(\d+)", message)
    for value, fits in ((int(tokens), True), (int(tokens) + 1, False)):
        config = _config("memory.cap_gib=26", *tight[:2], f"train.micro_batch_tokens={value}")
        assert bool(search(config, 2, H800, keep=1).by_schedule) is fits, value
