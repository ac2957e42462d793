"""The answer of `rollplex plan RECIPE --gpus N --hardware NAME` as plain data, and that data as text. Pure.

Everything printed is in the data; `--explain` prints more of it: where each second, GiB and byte sent goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollplex.config import Config
from rollplex.planner.bounds import Stage
from rollplex.planner.breakdown import Breakdown, breakdown
from rollplex.planner.fit import Fit
from rollplex.planner.hardware import hardware_facts
from rollplex.planner.parallel import Parallel
from rollplex.planner.remedies import refusal
from rollplex.planner.search import GIB, Ranked, Search, Watched, search
from rollplex.planner.sharing import sharing_facts
from rollplex.planner.workload import Assumptions
from rollplex.weights.layout import Sharing

Facts = Mapping[str, Any]
_AXES = ("tensor", "pipeline", "data", "context", "expert")
_COLUMNS = f"{'':3}{'s/step':>8}  {'schedule':<14}{'training':<21}{'rollout':<21}{'GiB':>12}{'moves s':>9}  limit"


def answer(config: Config, devices: int, assumed: Assumptions, watched: Watched = iter) -> dict[str, Any]:
    """Search and report. Raises ConfigError with the smallest change that would fit where nothing does."""
    found = search(config, devices, assumed, watched=watched)
    if not found.by_schedule:
        raise refusal(config, devices, assumed)
    return search_facts(config, found)


def search_facts(config: Config, found: Search) -> dict[str, Any]:
    """Plain data for JSON. `found` has an answer (remedies.refusal says what to do where it has none)."""
    assumed, workload = found.workload.assumed, found.workload
    known: dict[int, dict[str, Any]] = {}

    def facts(ranked: Ranked) -> dict[str, Any]:
        if id(ranked) not in known:
            known[id(ranked)] = _plan_facts(config, found, ranked)
        return known[id(ranked)]

    return {
        "source": "simulated",
        "gpus": found.devices,
        "hardware": hardware_facts(assumed.hardware),
        "cap_gib": found.cap_bytes / GIB,
        "cap_from": "the sheet" if config.memory.cap_gib is None else "memory.cap_gib",
        "assumed": {
            "response_tokens": workload.median,
            "most_response_tokens": workload.shape.response_tokens,
            "spread": assumed.spread,
            "contention": assumed.contention,
            "seed": assumed.seed,
        },
        "considered": found.considered,
        "came_of_them": dict(found.left_out),
        "plans": [facts(ranked) for ranked in found.best],
        "by_schedule": {name: facts(ranked) for name, ranked in found.by_schedule.items()},
        "missing": dict(found.missing),
        "runner_up": _comparison(*map(facts, found.best[:2])) if len(found.best) > 1 else None,
    }


def _plan_facts(config: Config, found: Search, ranked: Ranked) -> dict[str, Any]:
    plan, where = ranked.plan, breakdown(found.workload, ranked.plan, ranked.moves_s)
    return {
        "schedule": plan.schedule,
        "on_policy": plan.on_policy,
        "pools": plan.pools,
        "training": _degrees(plan.train),
        "rollout": _degrees(plan.rollout),
        "reference": None if plan.scoring is None else _degrees(plan.scoring),
        "seconds": ranked.seconds,
        "simulated_s": ranked.simulated_s,
        "moves_s": ranked.moves_s,
        "bound_s": ranked.bound_s,
        "stages": [_stage_facts(stage) for stage in found.workload.stages(plan)],
        "limit": where.limit,
        "causes": dict(where.causes),
        "phases": dict(where.phases),
        "hidden_s": where.hidden_s,
        "traffic_bytes": dict(where.traffic),
        "memory": [_fit_facts(fit) for fit in ranked.fits],
        "sharing": _sharing(config, found, ranked, where),
    }


def _stage_facts(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "devices": stage.devices,
        "lower_s": stage.lower_s,
        "estimate_s": stage.estimate_s,
        "upper_s": stage.upper_s,
        "depth_s": stage.depth_s,
    }


def _degrees(plan: Parallel) -> dict[str, int]:
    return {**{axis: getattr(plan, axis) for axis in _AXES}, "devices": plan.devices}


def _fit_facts(fit: Fit) -> dict[str, Any]:
    plan, held = fit.plan, fit.at_peaks()
    return {
        "where": fit.where,
        "peak_gib": plan.peak_bytes / GIB,
        "naive_gib": fit.naive.peak_bytes / GIB,
        "fullest": plan.fullest_phases,
        "naive_fullest": fit.naive.fullest_phases,
        "classes_gib": {kind: size / GIB for kind, size in fit.peak_by_class().items()},
        "exposed_s": plan.exposed_s,
        "host_gib": sum(choice.host_bytes for choice in plan.choices.values()) / GIB,
        "moved": fit.moved,
        "records": [
            {
                "name": record.name,
                "class": str(record.kind),
                "gib": record.nbytes / GIB,
                "at_peak_gib": held[record.name][0] / GIB,
                "at_naive_peak_gib": held[record.name][1] / GIB,
                "host_gib": plan.choices[record.name].host_bytes / GIB,
                "formula": record.formula,
                "policy": str(plan.choices[record.name].policy),
                "policy_detail": plan.choices[record.name].detail,
                "restore_s": plan.choices[record.name].restore_s,
            }
            for record in plan.records
        ],
    }


def _sharing(config: Config, found: Search, ranked: Ranked, where: Breakdown) -> dict[str, Any] | None:
    """Parts of the language model by class, and what the weights of both sides take of a device; None: pools share
    nothing, and a mixture of experts has no layout yet (weights/layout.py)."""
    if ranked.plan.pools or found.workload.counts.experts is not None:
        return None
    train, rollout = ranked.plan.train.tensor, ranked.plan.rollout.tensor
    degrees = {"train_tp": train, "rollout_tp": rollout}
    table = sharing_facts(config.model_copy(update={"sharing": config.sharing.model_copy(update=degrees)}))
    plan = ranked.fits[0].plan
    sizes = {r.name: (r.nbytes, max(plan.choices[r.name].held.values())) for r in plan.records if "actor w" in r.name}
    return {
        **degrees,
        **{str(kind): table[str(kind)] for kind in Sharing},
        "tensors": [{key: row[key] for key in ("name", "class", "share", "reason")} for row in table["tensors"]],
        "weights_gib": {name: {"whole": size / GIB, "held": held / GIB} for name, (size, held) in sizes.items()},
        "published_bytes": where.traffic.get("weights published to the rollout", 0.0),
    }


def _comparison(best: Facts, second: Facts) -> dict[str, Any]:
    """What the second loses and gains against the first, by cause; the differences add up to `slower_s`."""
    causes = {*best["causes"], *second["causes"]}
    more = {cause: second["causes"].get(cause, 0.0) - best["causes"].get(cause, 0.0) for cause in causes}
    ordered = dict(sorted(more.items(), key=lambda item: -item[1]))
    differs = [key for key in ("schedule", "training", "rollout", "reference") if best[key] != second[key]]
    return {"slower_s": second["seconds"] - best["seconds"], "differs_in": differs, "more_s": ordered}


def search_lines(facts: Facts, *, explain: bool = False) -> Iterator[str]:
    """What `search_facts` gave, as text."""
    device, assumed, plans = facts["hardware"], facts["assumed"], facts["plans"]
    cap = f"at most {facts['cap_gib']:.2f} GiB each ({facts['cap_from']})"
    yield f"{facts['gpus']} x {device['name']}, {cap}; simulated"
    yield (
        f"responses: median {assumed['response_tokens']:g}, at most {assumed['most_response_tokens']} tokens, spread "
        f"{assumed['spread']:g}; contention {assumed['contention']:g}"
    )
    outcome = ", ".join(f"{count} {what}" for what, count in facts["came_of_them"].items())
    yield f"{facts['considered']} arrangements: {outcome}"
    yield from ("", "fastest", _COLUMNS)
    yield from (_row(str(number), plan) for number, plan in enumerate(plans, start=1))
    yield from ("", "fastest of each schedule", _COLUMNS)
    yield from (_row("", plan) for plan in facts["by_schedule"].values())
    yield from (f"{'-':>11}  {name:<14}{reason}" for name, reason in facts["missing"].items())
    if facts["runner_up"] is not None:
        yield ""
        yield from _runner_up_lines(facts["runner_up"])
    if plans:
        yield ""
        yield from _memory_lines(plans[0])
        yield from _sharing_lines(plans[0])
    if explain:
        rows = {str(number): plan for number, plan in enumerate(plans, start=1)}
        rows |= {f"fastest {name}": plan for name, plan in facts["by_schedule"].items() if plan not in plans}
        for name, plan in rows.items():
            yield ""
            yield from _explained(name, plan)


def _row(number: str, plan: Facts) -> str:
    train, rollout = (_parallel(plan[side]) for side in ("training", "rollout"))
    peaks = " + ".join(f"{fit['peak_gib']:.1f}" for fit in plan["memory"])
    limit = f"{plan['limit']} {plan['causes'][plan['limit']] / plan['seconds']:.0%}"
    note = "" if plan["on_policy"] else "; OFF-POLICY, for comparison"
    if plan["reference"] is not None:
        note += f"; reference on {plan['reference']['devices']} more, {_parallel(plan['reference'])}"
    row = f"{number:<3}{plan['seconds']:>8.4g}  {plan['schedule']:<14}{train:<21}{rollout:<21}{peaks:>12}"
    return f"{row}{plan['moves_s']:>9.3f}  {limit}{note}"


def _parallel(degrees: Facts) -> str:
    return str(Parallel(**{axis: degrees[axis] for axis in _AXES}))


def _runner_up_lines(facts: Facts) -> Iterator[str]:
    parts = ", ".join(f"{seconds:+.3g} s {cause}" for cause, seconds in facts["more_s"].items() if abs(seconds) > 5e-4)
    yield f"2 lost to 1 by {facts['slower_s']:.3g} s a step ({', '.join(facts['differs_in'])} differ): {parts}"


def _memory_lines(plan: Facts) -> Iterator[str]:
    for fit in plan["memory"]:
        peaks = f"{fit['peak_gib']:.2f} GiB (naive {fit['naive_gib']:.2f})"
        yield f"memory of 1, {fit['where']}: {peaks} while {fit['fullest']}"
        yield from (f"{size:10.2f}  {kind}" for kind, size in fit["classes_gib"].items() if size)
        moved = ", ".join(f"{name}: {policy}" for name, policy in fit["moved"].items()) or "nothing: all is kept"
        yield f"{'':12}moved at {fit['exposed_s']:.3g} s a step and {fit['host_gib']:.2f} GiB of host memory: {moved}"


def _sharing_lines(plan: Facts) -> Iterator[str]:
    facts = plan["sharing"]
    if facts is None:
        why = "none, the pools hold a copy each" if plan["pools"] else "not counted for a mixture of experts"
        yield f"sharing of 1: {why}"
        return
    shares = ", ".join(f"{facts[str(kind)]:.2%} {kind}" for kind in Sharing)
    yield f"sharing of 1, training at TP {facts['train_tp']} and rollout at TP {facts['rollout_tp']}: {shares}"
    for name, sizes in facts["weights_gib"].items():
        yield f"{sizes['held']:10.2f}  {name} (alone {sizes['whole']:.2f} GiB)"
    yield f"{facts['published_bytes'] / GIB:10.2f}  GiB received by a device at publish"


def _explained(name: str, plan: Facts) -> Iterator[str]:
    """Every number of a row: what adds up to it."""
    train, rollout = (_parallel(plan[side]) for side in ("training", "rollout"))
    yield f"{name}: {plan['schedule']}, training at {train}, rollout at {rollout}"
    yield (
        f"  {plan['seconds']:.4g} s = {plan['simulated_s']:.4g} simulated + {plan['moves_s']:.4g} moved for memory; no "
        f"faster than {plan['bound_s']:.4g} by its bound"
    )
    yield "  time by cause, s"
    yield from _table(plan["causes"], 1.0)
    yield f"  time by phase, s ({plan['hidden_s']:.4g} s of it with the other side busy too)"
    yield from _table(plan["phases"], 1.0)
    yield "  stages on their own with typical responses, s: W / p <= T <= W / p + D (docs/cost-model.md)"
    for stage in plan["stages"]:
        bound = f"{stage['lower_s']:10.3f} <= {stage['estimate_s']:.3f} <= {stage['upper_s']:.3f}"
        yield f"{bound}  {stage['name']}, D {stage['depth_s']:.3f}, p {stage['devices']}"
    for fit in plan["memory"]:
        yield from _explained_memory(fit)
    yield from _explained_sharing(plan["sharing"])
    yield "  sent by a device in a step, GiB"
    yield from _table(plan["traffic_bytes"], 1 / GIB)


def _explained_memory(fit: Facts) -> Iterator[str]:
    """What each object has of both peaks, and on the host: columns that add up (docs/memory.md has the formulas)."""
    yield f"  memory, {fit['where']}, GiB: while {fit['fullest']}; naive, while {fit['naive_fullest']}; on the host"
    for record in fit["records"]:
        cost = f", {record['restore_s']:.3g} s" if record["restore_s"] else ""
        held = "".join(f"{record[f'{at}_gib']:10.2f}" for at in ("at_peak", "at_naive_peak", "host"))
        how = ": ".join(filter(None, (record["policy"], record["policy_detail"])))
        yield f"{held}  {record['name']:<32}{how}{cost}; {record['formula']}"


def _explained_sharing(facts: Facts | None) -> Iterator[str]:
    """Which tensors make up the parts of each class."""
    if facts is None:
        return
    yield f"  sharing, parts of the language model's weights at TP {facts['train_tp']} and TP {facts['rollout_tp']}"
    for row in facts["tensors"]:
        why = f": {row['reason']}" if row["reason"] else ""
        yield f"{row['share']:>10.2%}  {row['name']}, {row['class']}{why}"


def _table(values: Mapping[str, float], factor: float) -> Iterator[str]:
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        yield f"{value * factor:10.3f}  {name}"
