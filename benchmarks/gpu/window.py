"""What sharing, the decode window and decode graphs gain on one GPU: {share} x {hoist}, stream, units, lanes, memory.

usage: python benchmarks/gpu/window.py [--model 3b|7b] [--steps 4]

A model of Qwen2.5-VL-3B's (7B's) sizes, but for a small vocabulary, with random bfloat16 weights, on the counting task.
The arms share one copy of weights, optimizer and reference and take turns step by step; the learning rate is 0, so that
all of them sample alike. Decode graphs, shared by the arms that have them, hold their caches in all arms' peaks; steps
whose memory is counted decode without. Needs a CUDA GPU; 8 minutes are meant to do. Not run on one yet. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.models.policy import Policy
from rollplex.runtime.device import device_name, peak_bytes, reset_peak
from rollplex.runtime.learner import Learner
from rollplex.runtime.trainer import Trainer
from rollplex.tasks.rewards import TrainerState
from vs_trl_arms.settings import REWARD
from vs_trl_arms.summary import block_order, provenance, write_result

RESULTS = Path(__file__).resolve().parents[1] / "results"
SIZES: dict[str, dict[str, int]] = {
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_layers": 36, "num_heads": 16, "num_kv_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_layers": 28, "num_heads": 28, "num_kv_heads": 4},
}
VISION = {"vision_depth": 32, "vision_hidden_size": 1280, "vision_intermediate_size": 3420}
PROMPTS, RESPONSES, TOKENS, PICTURES, SIDE = 8, 8, 256, 4, 728  # 4 x 676 visual tokens a prompt
UNITS = (4096, 16384)  # one prompt, and all that a pass may take
CHUNKS = (256, 512, 1024)  # rows at a time inside a prompt
WINDOW_SMS = (32, 64)  # of the window's green context; the other arms' windows have all, at low priority
TINY_PART = 8  # chunks of tiny prompts are smaller by this

ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {"schedule": {"name": "serial", "overlap": "off"}, "train": {"share_prefix": False}},
    "unshared, hoisted": {
        "schedule": {"name": "rollplex", "overlap": "on"},
        "train": {"share_prefix": False, "unshared_prefix": "per_response"},
    },
    "serial": {"schedule": {"name": "serial", "overlap": "off"}},
    "serial, no graphs": {"schedule": {"name": "serial", "overlap": "off"}, "rollout": {"decode_graphs": "off"}},
    **{f"rollplex, {u}": {"schedule": {"name": "rollplex", "overlap": "on", "unit_tokens": u}} for u in UNITS},
    **{
        f"rollplex, chunks of {c}": {"schedule": {"name": "rollplex", "overlap": "on", "chunk_tokens": c}}
        for c in CHUNKS
    },
    **{
        f"rollplex, window of {n} SMs": {"schedule": {"name": "rollplex", "overlap": "on", "window_sms": n}}
        for n in WINDOW_SMS
    },
    "stream": {"schedule": {"name": "stream", "overlap": "on"}},
    f"stream, window of {WINDOW_SMS[-1]} SMs": {
        "schedule": {"name": "stream", "overlap": "on", "window_sms": WINDOW_SMS[-1]},
        "train": {"prefix_activations": "recompute"},
    },
}
LEDGERS = ("serial", "rollplex, 4096", "rollplex, chunks of 512", "stream")


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step."""

    seconds: float
    decode_s: float
    hidden_s: float
    peak_bytes: int  # allocated on the device


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="3b")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each arm (default 4)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of a response (default {TOKENS})")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: all that the device has lanes for")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and picture: to try the script itself")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def arms_of(device: str) -> list[str]:
    """All arms; on a CPU those without parts of a GPU."""
    return [name for name, arm in ARMS.items() if device == "cuda" or "window_sms" not in arm["schedule"]]


def config_of(options: argparse.Namespace, arm: Mapping[str, Mapping[str, Any]], *, counted: bool = False) -> Config:
    """One arm's configuration; all have the same model, rows and sampling. counted: with a memory ledger."""
    build = {} if options.tiny else {**SIZES[options.model], **VISION}
    tree: dict[str, dict[str, Any]] = {
        "run": {
            "output_dir": "run",
            "device": options.device,
            "log_completions_steps": 0,
            "memory_steps": [1] if counted else [],
        },
        "model": {"build": build, "dtype": "bfloat16"},
        "data": {"task": "counting", "num_images": PICTURES, "image_size": 56 if options.tiny else SIDE},
        "rewards": {"reward_funcs": [REWARD]},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "num_generations": RESPONSES,
            "max_completion_length": options.tokens,
        },
        "algorithm": {"beta": 0.04},
        "train": {"learning_rate": 0.0, "max_steps": 1000, "micro_batch_tokens": 16384},
        "schedule": {"unit_tokens": 4096},
    }
    for section, values in arm.items():
        tree[section] = {**tree[section], **values}
    if options.tiny and "chunk_tokens" in tree["schedule"]:
        tree["schedule"]["chunk_tokens"] //= TINY_PART
    return Config.model_validate(tree)


def learner_of(config: Config, trainer: Trainer) -> Learner:
    """A learner on the trainer's one copy of weights, optimizer and reference, its passes cut as `config` says, and on
    the trainer's engines where they would be alike."""
    alike = config.rollout == trainer.config.rollout and not config.run.memory_steps
    reference = copy.copy(trainer.reference)
    assert reference is not None  # beta is not 0
    reference.policy = recut(reference.policy, config.schedule.chunk_tokens)
    return Learner(
        recut(trainer.session.policy, config.schedule.chunk_tokens),
        trainer.optimizer,
        reference,
        trainer.collector,
        config,
        stop_token_ids=trainer.session.stop_token_ids,
        engines=trainer.engines if alike else None,
    )


def recut(policy: Policy, chunk_tokens: int | None) -> Policy:
    """The same weights and cached features, under passes in chunks of so many rows."""
    other = Policy(policy.model, chunk_tokens=chunk_tokens)
    other.vision_frozen, other.vision_cache = policy.vision_frozen, policy.vision_cache
    return other


def ledger(options: argparse.Namespace, name: str, trainer: Trainer) -> dict[str, float]:
    """Planned and counted peak of one more step of an arm, which counting slows down."""
    learner = learner_of(config_of(options, ARMS[name], counted=True), trainer)
    try:
        found = learner.step(trainer.feed.take, TrainerState(0, 1)).ledger
    finally:
        learner.close()
    assert found is not None  # the step was counted
    print("\n".join([name, *found.lines()]), flush=True)
    planned, measured = found.planned_peak_bytes / 2**30, found.measured_peak_bytes / 2**30
    return {"planned_gib": planned, "measured_gib": measured, "measured_over_planned": found.measured_over_planned}


def measured_step(learner: Learner, trainer: Trainer, device: torch.device) -> Step:
    """One step of one arm; `learner.step` returns when the device is idle."""
    reset_peak(device)
    begin_s = time.monotonic()
    outcome = learner.step(trainer.feed.take, TrainerState(0, 1))
    seconds = time.monotonic() - begin_s
    metrics = outcome.metrics
    return Step(seconds, metrics["timing_s/decode"], metrics["overlap/hidden_s"], peak_bytes(device) or 0)


def summary(steps: Mapping[str, Sequence[Step]]) -> dict[str, Any]:
    """Medians per arm, and what each gains over the serial one with and without sharing."""
    seconds = {name: median(step.seconds for step in taken) for name, taken in steps.items()}
    serial = steps.get("serial")
    rows = {
        name: {
            "step_s": seconds[name],
            "decode_s": median(step.decode_s for step in taken),
            "hidden_s": median(step.hidden_s for step in taken),
            "peak_gib": max(step.peak_bytes for step in taken) / 2**30,
            "gain_over_whole": seconds["whole"] / seconds[name] if "whole" in seconds else None,
            "gain_over_serial": seconds["serial"] / seconds[name] if serial else None,
            "decode_slowdown": median(s.decode_s for s in taken) / median(s.decode_s for s in serial)
            if serial
            else None,
        }
        for name, taken in steps.items()
    }
    return {"arms": rows}


def main() -> None:
    """Build, take turns, print, write the result."""
    options = parse_arguments()
    trainer = Trainer(config_of(options, ARMS["serial"]))
    device = trainer.session.policy.device
    arms, refused = learners_of(options, trainer)
    steps: dict[str, list[Step]] = {name: [] for name in arms}
    try:
        for number, name in enumerate(block_order(list(arms), 1 + options.steps)):
            step = measured_step(arms[name], trainer, device)
            if number >= len(arms):  # the first of each warms up kernels and allocator
                steps[name].append(step)
            print(f"{name}: {step.seconds:.2f} s", flush=True)
        report(options, device, steps, refused, None)  # whatever becomes of the rest
        memory = {name: ledger(options, name, trainer) for name in arms if name in LEDGERS}
        print(json.dumps(report(options, device, steps, refused, memory)))
    finally:
        for learner in arms.values():
            learner.close()
        trainer.close()


def learners_of(options: argparse.Namespace, trainer: Trainer) -> tuple[dict[str, Learner], dict[str, str]]:
    """All arms, and why the device has no lanes for some; one that was asked for by name must work."""
    arms: dict[str, Learner] = {}
    refused: dict[str, str] = {}
    for name in options.arms or arms_of(options.device):
        try:
            arms[name] = learner_of(config_of(options, ARMS[name]), trainer)
        except ConfigError as error:
            if options.arms:
                raise
            refused[name] = str(error)
            print(f"{name}: {error}", flush=True)
    return arms, refused


def report(
    options: argparse.Namespace,
    device: torch.device,
    steps: Mapping[str, Sequence[Step]],
    refused: Mapping[str, str],
    memory: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The last line; on a GPU it is written too, with all single steps."""
    hardware = device_name(device)
    line = {
        "benchmark": "gpu_window",
        "model": "tiny" if options.tiny else options.model,
        "hardware": hardware,
        **summary(steps),
        "refused": dict(refused),
        "memory": memory,
    }
    if device.type == "cuda":
        versions = {package: version(package) for package in ("rollplex", "torch", "transformers")}
        singles = {name: [asdict(step) for step in taken] for name, taken in steps.items()}
        result = {**provenance(), **line, "versions": versions, "steps": singles}
        slug = hardware.lower().replace(" ", "-")
        write_result(f"gpu_window_{options.model}_{slug}", result, 0, options.results)
    return line


if __name__ == "__main__":
    main()
