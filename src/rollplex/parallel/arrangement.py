"""How the processes of a run divide the model and the prompts, and which options several processes cannot carry out.

    world = replicas x train_tp        a replica is train_tp neighbours that hold one model
    train_tp = groups x rollout_tp     a rollout group decodes a share of its replica's prompts
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.config import Config, SharingConfig
from rollplex.errors import ConfigError

# Decide from the step's own order alone. Others may go by which group happens to be complete first, on each rank.
_ORDERED_SCHEDULES = ("serial", "rollplex")
_DEGREES = ("train_tp", "rollout_tp")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Degrees of one run."""

    world: int
    train_tp: int
    rollout_tp: int

    @property
    def replicas(self) -> int:
        """Models that are trained side by side, each on its share of a step's prompts."""
        return self.world // self.train_tp

    @property
    def rollout_groups(self) -> int:
        """Groups of ranks in a replica that decode side by side."""
        return self.train_tp // self.rollout_tp


def arrangement(config: Config, world: int) -> Arrangement:
    """The arrangement of `world` processes. Raises ConfigError with one line for each option that they cannot honour.

    Whether degrees divide the model's heads is known when the model is (weights.layout.plan_sharing).
    """
    problems = _alone(config) if world == 1 else [*_sizes(config, world), *_combinations(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    sharing = config.sharing
    return Arrangement(world, sharing.train_tp, sharing.rollout_tp if world > 1 else 1)


def command(processes: int) -> str:
    """How to start so many processes on one host."""
    return f"torchrun --nproc-per-node {processes} -m rollplex train ..."


def _alone(config: Config) -> list[str]:
    """Options of sharing that one process would leave without effect."""
    sharing, vllm = config.sharing, config.rollout.engine == "vllm"
    used = {"rollout_tp"} if vllm else set()
    changed = [name for name, value in sharing if value != getattr(SharingConfig(), name) and name not in used]
    if not changed:
        return []
    needed = max(sharing.train_tp, 1 if vllm else sharing.rollout_tp)
    names = ", ".join(f"sharing.{name}" for name in changed)
    return [
        f"sharing.{changed[0]} is {getattr(sharing, changed[0])}, and this is one process, which holds all weights; "
        f"start one for each device ({command(max(needed, 2))}), or leave {names} out, which only "
        "`rollplex plan` reads then"
    ]


def _sizes(config: Config, world: int) -> list[str]:
    train, rollout = (getattr(config.sharing, name) for name in _DEGREES)
    problems = []
    if world % train:
        problems.append(
            f"{world} processes do not make whole replicas of sharing.train_tp {train}; start a multiple of it "
            f"({command(train * max(1, world // train))}), or set sharing.train_tp to a divisor of {world}"
        )
    if train % rollout:
        problems.append(
            f"sharing.rollout_tp {rollout} does not divide sharing.train_tp {train}: a rollout group would span "
            "several training replicas, which have prompts of their own; set it to a divisor"
        )
    prompts, parts = config.rollout.prompts_per_step, config.algorithm.steps_per_generation
    replicas = max(1, world // train)
    if prompts % (parts * replicas):
        problems.append(
            f"rollout.prompts_per_step {prompts} does not divide into {replicas} equal shares, one for each replica of "
            f"{train} processes, for each of {parts} optimizer steps (algorithm.steps_per_generation); needed a "
            f"multiple of {parts * replicas}"
        )
    if config.algorithm.dynamic_sampling == "resample" and replicas > 1:
        problems.append(
            "algorithm.dynamic_sampling resample takes new prompts until the step has enough to learn from, and "
            f"{replicas} replicas take theirs apart from each other; set it to off, or sharing.train_tp to {world}"
        )
    return problems


def _combinations(config: Config) -> list[str]:
    problems = []
    if config.rollout.engine == "vllm":
        problems.append(
            "rollout.engine vllm takes whole weights from one process; set rollout.engine=local, or start one process "
            "(vLLM's own degree is sharing.rollout_tp)"
        )
    if config.model.lora is not None:
        problems.append("model.lora has no division among processes; leave it out, or start one process")
    if not config.train.share_prefix and config.train.unshared_prefix == "whole":
        problems.append(
            "train.share_prefix off runs transformers' own decoder, which takes neither shards nor weights gathered "
            "for a step; set it to on, or start one process"
        )
    if config.rollout.decode_graphs == "on":
        problems.append(
            "rollout.decode_graphs on would capture decode steps with sums over processes in them, or weights that are "
            "gathered anew for each step; set it to auto or off, or start one process"
        )
    if config.schedule.overlap == "on":
        problems.append(
            "schedule.overlap on would run passes beside decoding, and all processes must make their sums in one "
            "order; set it to auto or off"
        )
    if config.schedule.name not in _ORDERED_SCHEDULES:
        problems.append(
            f"schedule.name {config.schedule.name} may start passes in the order in which groups are complete, and all "
            f"processes must make their sums in one order; set it to {' or '.join(_ORDERED_SCHEDULES)}"
        )
    return problems
