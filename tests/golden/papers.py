"""Both papers' settings, as this planner runs them. Every assumption stands here or in docs/papers.md; none is per row.

`python tests/golden/papers.py` writes the golden files anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from published_models import QWEN_32B
from rollplex.models.shapes import shape_from_hf
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.decoding import Rows
from rollplex.planner.engine import StepTable
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware, hardware
from rollplex.planner.lengths import LogNormal
from rollplex.planner.load import GroupLoad, Prompt, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.pass_times import PassTimes
from rollplex.planner.passes import Algorithm
from rollplex.planner.publishing import colocated_bytes, disaggregated_bytes
from rollplex.planner.simulate import Feed, Layout, StepTimes, simulate
from rollplex.schedule.pools import Disaggregated, RolloutPipe
from rollplex.schedule.registry import schedule_named
from rollplex.schedule.spec import Phase, PrefixMode, StepSpec

FOLDER = Path(__file__).parent
ROUNDS = 4  # steps that a figure is the mean of; RolloutPipe's too

# RolloutPipe, Table 1: seconds that the trainers compute under Slime. An input, as response lengths are not known.
TRAINER_S = {
    ("LSAT-AR", 32): 195.1,
    ("LSAT-AR", 64): 388.9,
    ("LSAT-AR", 96): 587.4,
    ("Sci-XW", 32): 191.8,
    ("Sci-XW", 64): 379.9,
    ("Sci-XW", 96): 572.2,
    ("Sci-JL", 32): 194.1,
    ("Sci-JL", 64): 384.6,
    ("Sci-JL", 96): 584.5,
    ("OlyPhys", 32): 211.5,
    ("OlyPhys", 64): 420.7,
    ("OlyPhys", 96): 640.0,
}
# Fitted on one setting, Sci-XW with R = 96 (CGP 659 s, CGP+FGD 642 s, Slime's first dispatch 509-543 s).
MEDIAN_TOKENS, SPREAD, CAP_TOKENS = 2650.0, 0.3, 8192
DECODE_STEP_S = 0.0124  # all of a decode step but reading keys and values
PLACES = 88  # responses that the engine decodes at once
SCATTER = 200.0  # requests by which those of a group are apart in the engine's queue
FLOOR = 14  # groups that FGD keeps in the engine
# By the paper's own figures there, 577 s of compute and a waiting ratio of 0.150 in 642 s from rollout to the end of
# training: its trainers wait over a window that is longer by this, such as that of new weights for the engine.
OUTSIDE_S = 577 / (1 - 0.150) - 642
# From data sheets: 28 layers x 8 KV heads x 128 x 2 x 2 bytes a token over two A100 of 1.555 TB/s at 80 %.
KV_TOKEN_S = 28 * 8 * 128 * 2 * 2 / (2 * 1.555e12 * 0.8)


@dataclass(frozen=True)
class Mean:
    """Means over the rounds of one simulation."""

    seconds: float
    dispatch_s: float
    waiting: float


def _means(steps: tuple[StepTimes, ...]) -> Mean:
    return Mean(
        mean(s.trained_s - s.start_s for s in steps),
        mean(s.dispatch_s - s.start_s for s in steps),
        mean(1 - s.compute_s / (s.trained_s - s.start_s + OUTSIDE_S) for s in steps),
    )


def _rolloutpipe(schedule: Disaggregated | RolloutPipe, groups: int, compute_s: float) -> Mean:
    unit, replicas = 2, 2  # B / K, and DP 2
    table = StepTable(lambda rows: DECODE_STEP_S + KV_TOKEN_S * rows.cached_tokens, context_tokens=MEDIAN_TOKENS / 2)
    found = simulate(
        schedule,
        StepSpec(num_groups=groups, prefix=PrefixMode.WHOLE, unit=unit, optimizer_steps=groups // unit),
        Feed([Prompt(200)], 8, LogNormal(MEDIAN_TOKENS, SPREAD, CAP_TOKENS), seed=1),
        Layout(engines=1, trainers=replicas, places=PLACES, scatter=SCATTER),
        seconds=lambda phase, load: replicas * compute_s / groups if phase is Phase.ACTOR_RESPONSE else 0.0,
        table=table,
        steps=ROUNDS,
        traced=(),
    )
    return _means(found.steps)


def rolloutpipe_rows() -> list[dict[str, float | str]]:
    """The 12 settings under Slime (disaggregated), CGP and CGP+FGD."""
    rows: list[dict[str, float | str]] = []
    for (workload, groups), compute_s in TRAINER_S.items():
        slime, cgp, both = (
            _rolloutpipe(schedule, groups, compute_s)
            for schedule in (Disaggregated(), RolloutPipe(fgd=False), RolloutPipe(floor=FLOOR))
        )
        rows.append(
            {
                "workload": workload,
                "R": groups,
                "slime_s": slime.seconds,
                "cgp_s": cgp.seconds,
                "cgp_fgd_s": both.seconds,
                "slime_dispatch_s": slime.dispatch_s,
                "cgp_dispatch_s": cgp.dispatch_s,
                "cgp_fgd_dispatch_s": both.dispatch_s,
                "slime_waiting": slime.waiting,
                "cgp_fgd_waiting": both.waiting,
                "reduction": 1 - both.seconds / slime.seconds,
                "cgp_share": (slime.seconds - cgp.seconds) / (slime.seconds - both.seconds),
                "fgd_further": 1 - both.seconds / cgp.seconds,
            }
        )
    return rows


# Rollplex says only the ends: median prompts of 470 to 5,900 tokens that are 79 to 98 % of a sequence. Two more lie
# evenly between on a logarithmic axis; a response's median follows from the share.
WORKLOADS = {"shortest": (470, 0.79), "second": (1090, 0.90), "third": (2540, 0.95), "longest": (5900, 0.98)}
LONGEST_RESPONSE = 2048
RESPONSE_SPREAD = 0.9  # fitted on "longest" alone, to 2.24x over disaggregation
CONTENTION = 1.2  # assumed: while both run, decoding and passes take 1.2 times as long
STATE_BYTES = 2 * 12 * 32.8e9 / 32  # fp32 master weights and moments of a device, from the host and back


class Rollplex:
    """One workload on 32 H800: 4 blocks of TP 8 for training with two engines of TP 4 each, or pools of 16 and 16."""

    def __init__(self, prompt_tokens: int, share: float):
        self.counts = ModelCounts(shape_from_hf(QWEN_32B, "Qwen2.5-VL-32B"))
        self.prompt = video_prompt(prompt_tokens, int(0.9 * prompt_tokens), self.counts.shape.vision)
        median = prompt_tokens * (1 - share) / share
        self.context = prompt_tokens + median / 2
        self.feed = Feed([self.prompt], 8, LogNormal(median, RESPONSE_SPREAD, LONGEST_RESPONSE), seed=0)
        self.typical = GroupLoad(self.prompt, (int(median),) * 8)

    def _cost(self, prefix: PrefixMode, train: Parallel, rollout: Parallel, publish_bytes: float) -> StepCost:
        device = hardware("h800")
        return StepCost(
            Side(self.counts, device, train),
            Side(self.counts, device, rollout),
            Algorithm(prefix=prefix),
            (self.typical,) * 32,
            publish_bytes=publish_bytes,
            publish_within_node=train.devices + rollout.devices > 32,
            host_state_bytes=STATE_BYTES,
        )

    def _table(self, cost: StepCost) -> StepTable:
        def step(rows: Rows) -> float:
            return cost.rollout.decode_step(rows).total

        return StepTable(step, context_tokens=self.context)

    def colocated(self, name: str, prefix: PrefixMode, rollout_tp: int = 4) -> tuple[float, float]:
        """Seconds of a step, and of its rollout."""
        train, rollout = Parallel(tensor=8, data=4), Parallel(tensor=rollout_tp, data=32 // rollout_tp)
        cost = self._cost(prefix, train, rollout, colocated_bytes(self.counts, train, rollout))
        times, engines = PassTimes(cost), 8 // rollout_tp

        def seconds(phase: Phase, load: GroupLoad | None) -> float:
            """A block's prefills are one after another in its main lane; its engines share them."""
            return times.of(phase, load) / (engines if phase is Phase.PREFILL else 1)

        found = simulate(
            schedule_named(name),
            StepSpec(num_groups=8, reference=True, prefix=prefix),
            self.feed,
            Layout(engines=engines, blocks=4, contention=CONTENTION),
            seconds=seconds,
            table=self._table(cost),
            steps=ROUNDS,
            traced=(),
        )
        return found.seconds_per_step, mean(step.decoded_s - step.start_s for step in found.steps)

    def rollout_s(self, rollout_tp: int, what: RolloutCosts) -> float:
        """Seconds of the rollout of a serial step where a rollout costs what is said."""
        train, rollout = Parallel(tensor=8, data=4), Parallel(tensor=rollout_tp, data=32 // rollout_tp)
        cost = self._cost(PrefixMode.WHOLE, train, rollout, 0.0)
        cost = replace(cost, rollout=replace(cost.rollout, hardware=what.device(rollout_tp)))
        times, engines = PassTimes(cost), 8 // rollout_tp

        def seconds(phase: Phase, load: GroupLoad | None) -> float:
            return times.of(phase, load) * (what.prefills / engines if phase is Phase.PREFILL else 1)

        def step(rows: Rows) -> float:
            return cost.rollout.decode_step(rows).total + what.row_s * rows.rows

        found = simulate(
            schedule_named("serial"),
            StepSpec(num_groups=8, reference=True, prefix=PrefixMode.WHOLE),
            replace(self.feed, lengths=replace(self.feed.lengths, sigma=what.spread)),
            Layout(engines=engines, blocks=4),
            seconds=seconds,
            table=StepTable(step, context_tokens=self.context),
            steps=ROUNDS,
            traced=(),
        )
        return mean(one.decoded_s - one.start_s for one in found.steps)

    def disaggregated(self) -> float:
        """Seconds of a step with half of the devices for each pool."""
        train, rollout = Parallel(tensor=8, data=2), Parallel(tensor=4, data=4)
        cost = self._cost(PrefixMode.WHOLE, train, rollout, disaggregated_bytes(self.counts, rollout))
        found = simulate(
            Disaggregated(),
            StepSpec(num_groups=32, reference=True, prefix=PrefixMode.WHOLE),
            self.feed,
            Layout(engines=rollout.data, trainers=train.data),
            seconds=PassTimes(cost).of,
            table=self._table(cost),
            steps=ROUNDS,
            traced=(),
        )
        return found.seconds_per_step


@dataclass(frozen=True)
class RolloutCosts:
    """What a rollout may cost beside what the model says, for the question why TP 8 should be slower than TP 4.

    prefills: times that the engine computes a prompt. hop_s: latency of a hop of a collective. kernel_s: of a launch.
    row_s: of the host for each row of a decode step. thin: bandwidth that shards at TP 8 reach, of that at TP 4.
    """

    prefills: int = 1
    hop_s: float | None = None
    kernel_s: float | None = None
    row_s: float = 0.0
    thin: float = 1.0
    spread: float = RESPONSE_SPREAD

    def device(self, rollout_tp: int) -> Hardware:
        """The H800 of a rollout at that degree."""
        device = hardware("h800")
        if self.hop_s is not None:
            device = replace(device, intra=replace(device.intra, latency_s=self.hop_s))
        if self.kernel_s is not None:
            device = device.reaching(kernel_s=self.kernel_s)
        return device.reaching(memory=device.efficiency.memory * (self.thin if rollout_tp == 8 else 1.0))


CHANGES = {
    "nothing": RolloutCosts(),
    "0.2 ms of the host for each row of a step": RolloutCosts(row_s=2e-4),
    "each response prefills its prompt": RolloutCosts(prefills=8),
    "that, and 10 us a kernel": RolloutCosts(prefills=8, kernel_s=1e-5),
    "each response prefills its prompt, spread 0.4": RolloutCosts(prefills=8, spread=0.4),
    "52 us a hop: an all-reduce over 8 takes 156 us": RolloutCosts(hop_s=52e-6),
    "TP 8 reaches 0.43 of TP 4's bandwidth": RolloutCosts(thin=0.43),
}


def degree_rows() -> list[dict[str, float | str]]:
    """Seconds of a rollout at TP 8 over TP 4 in each workload of Rollplex, with one thing changed at a time."""
    ones = {name: Rollplex(*sizes) for name, sizes in WORKLOADS.items()}
    return [
        {
            "workload": change,
            **{name: one.rollout_s(8, what) / one.rollout_s(4, what) for name, one in ones.items()},
        }
        for change, what in CHANGES.items()
    ]


def rollplex_rows() -> list[dict[str, float | str]]:
    """The four workloads. The paper's Rollplex is taken to compute a prompt for every response, as its baseline."""
    rows: list[dict[str, float | str]] = []
    for name, (prompt_tokens, share) in WORKLOADS.items():
        one = Rollplex(prompt_tokens, share)
        serial, rollout = one.colocated("serial", PrefixMode.WHOLE)
        _, rollout_8 = one.colocated("serial", PrefixMode.WHOLE, rollout_tp=8)
        hoisted, _ = one.colocated("rollplex", PrefixMode.PER_RESPONSE)
        row: dict[str, float | str] = {
            "workload": name,
            "prompt_tokens": prompt_tokens,
            "serial_s": serial,
            "rollplex_s": hoisted,
            "disaggregated_s": one.disaggregated(),
            "rollout_tp8_over_tp4": rollout_8 / rollout,
        }
        row["over_serial"] = serial / hoisted
        row["over_disaggregated"] = float(row["disaggregated_s"]) / hoisted
        for schedule in ("serial", "rollplex", "stream"):
            row[f"shared_{schedule}_s"] = one.colocated(schedule, PrefixMode.SHARED)[0]
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Claim:
    """What a paper says of all rows: the `value` of each lies within a range."""

    paper: str
    what: str
    value: str
    low: float
    high: float
    groups: int | None = None  # only rows with this R

    def rows(self, table: list[dict[str, float | str]]) -> list[dict[str, float | str]]:
        """The rows that it is about."""
        return [row for row in table if self.groups in (None, row.get("R"))]

    def miss(self, found: float) -> float:
        """How far `found` is from the range, as a part of its nearer end; 0 inside."""
        nearest = min(max(found, self.low), self.high)
        return found / nearest - 1


CLAIMS = [
    Claim("rolloutpipe", "first dispatch under Slime, R = 96 (s)", "slime_dispatch_s", 509, 543, 96),
    Claim("rolloutpipe", "first dispatch under CGP, R = 96 (s)", "cgp_dispatch_s", 46, 90, 96),
    Claim("rolloutpipe", "first dispatch under CGP+FGD, R = 96 (s)", "cgp_fgd_dispatch_s", 52, 61, 96),
    Claim("rolloutpipe", "less time until training ends, R = 32", "reduction", 0.307, 0.329, 32),
    Claim("rolloutpipe", "less time until training ends, R = 64", "reduction", 0.307, 0.423, 64),
    Claim("rolloutpipe", "less time until training ends, R = 96", "reduction", 0.398, 0.423, 96),
    Claim("rolloutpipe", "waiting under Slime", "slime_waiting", 0.47, 0.52),
    Claim("rolloutpipe", "waiting under CGP+FGD, R = 32", "cgp_fgd_waiting", 0.14, 0.33, 32),
    Claim("rolloutpipe", "waiting under CGP+FGD, R = 96", "cgp_fgd_waiting", 0.138, 0.150, 96),
    Claim("rolloutpipe", "CGP's share of what is saved", "cgp_share", 0.71, 0.96),
    Claim("rolloutpipe", "what FGD saves further", "fgd_further", 0.025, 0.114),
    Claim("rollplex", "serial colocation over Rollplex", "over_serial", 1.23, 1.30),
    Claim("rollplex", "disaggregation over Rollplex", "over_disaggregated", 1.57, 2.24),
    Claim("rollplex", "rollout at TP 8 over TP 4", "rollout_tp8_over_tp4", 1.17, 1.31),
]


def claim_lines(tables: dict[str, list[dict[str, float | str]]]) -> list[str]:
    """The claims as a table in Markdown: published, simulated, and the largest miss."""
    lines = ["| paper | figure | published | simulated | largest miss |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        found = [float(row[claim.value]) for row in claim.rows(tables[claim.paper])]
        worst = max((claim.miss(value) for value in found), key=abs)
        ends = [f"{value:.0f}" if claim.high > 10 else f"{value:.3f}" for value in (claim.low, claim.high)]
        span = [f"{value:.0f}" if claim.high > 10 else f"{value:.3f}" for value in (min(found), max(found))]
        miss = "inside" if not worst else f"{worst:+.0%}"
        lines.append(f"| {claim.paper} | {claim.what} | {ends[0]}-{ends[1]} | {span[0]}-{span[1]} | {miss} |")
    return lines


def row_lines(rows: list[dict[str, float | str]], columns: dict[str, str]) -> list[str]:
    """Rows as a table in Markdown; `columns`: heading by key."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_cell(row[key]) for key in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: float | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


COLUMNS: dict[str, dict[str, str]] = {
    "rolloutpipe": {
        "workload": "workload",
        "R": "R",
        "slime_s": "Slime s",
        "cgp_s": "CGP s",
        "cgp_fgd_s": "CGP+FGD s",
        "reduction": "less",
        "slime_waiting": "waiting, Slime",
        "cgp_fgd_waiting": "CGP+FGD",
        "cgp_share": "CGP's share",
    },
    "rollplex": {
        "workload": "workload",
        "prompt_tokens": "prompt",
        "serial_s": "serial s",
        "rollplex_s": "Rollplex s",
        "disaggregated_s": "disaggregated s",
        "over_serial": "over serial",
        "over_disaggregated": "over disaggregated",
        "shared_serial_s": "shared: serial s",
        "shared_rollplex_s": "rollplex s",
        "shared_stream_s": "stream s",
    },
    "degree": {"workload": "changed", **{name: name for name in WORKLOADS}},
}

TABLES: dict[str, Callable[[], list[dict[str, float | str]]]] = {
    "rolloutpipe": rolloutpipe_rows,
    "rollplex": rollplex_rows,
    "degree": degree_rows,
}


def golden(paper: str) -> Path:
    """Where the rows of a paper are written down."""
    return FOLDER / f"paper_{paper}.json"


def main() -> None:
    """Write the golden files."""
    for name, rows in TABLES.items():
        text = json.dumps({"source": "simulated", "rows": rows()}, indent=1) + "\n"
        golden(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
