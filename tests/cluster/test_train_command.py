"""`rollplex train` as torchrun starts it: a whole run, and what ends it early, each by name and within the deadline."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from cluster.train_runs import metrics_of, run_alone, run_config
from rollplex.recipes.load import dump_config

DEADLINE_S = 400.0  # imports of several processes on a busy core
ENDLESS = 100_000
LIMIT_S = 60.0  # for a rank that hangs; also for all to come, from imports on a busy core


def _recipe(folder: Path, **sections: dict[str, Any]) -> str:
    """A recipe file of the run in `folder`/run."""
    path = folder / "recipe.yaml"
    path.write_text(dump_config(run_config(folder / "run", **sections)), encoding="utf-8")
    return str(path)


def _free_port() -> int:
    """One that the system gives to nobody who does not ask for it by number: it is taken some seconds from now only."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(lowest // 2, lowest) if lowest > 4096 else range(20_000, 60_000)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 ports is free")


def _environment(**variables: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}


class Processes:
    """Ranks without torchrun, which would end the others itself: `python -m rollplex train` with its variables."""

    def __init__(self, world: int, recipe: str):
        port = _free_port()
        self.all = [
            subprocess.Popen(
                [sys.executable, "-m", "rollplex", "train", recipe],
                env=_environment(
                    RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.communicate()

    def ended(self, rank: int) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a rank that must end."""
        out, errors = self.all[rank].communicate(timeout=DEADLINE_S)
        return self.all[rank].returncode, out, " ".join(errors.split())


def _wait_for_step(folder: Path, processes: Processes, step: int = 3) -> None:
    deadline = monotonic() + DEADLINE_S
    path = folder / "run" / "metrics.jsonl"
    while not path.is_file() or len(path.read_text().splitlines()) < step:
        assert monotonic() < deadline and all(p.poll() is None for p in processes.all)
        sleep(0.05)


def test_torchrun_trains_what_one_process_trains(tmp_path: Path) -> None:
    run_alone(run_config(tmp_path / "alone"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    recipe = _recipe(tmp_path)
    done = subprocess.run(
        [*command, "-m", "rollplex", "train", recipe, "train_tp=2", "rollout_tp=2"],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1/3") == 1  # rank 0 alone speaks
    found, wanted = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "alone")
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], abs=1e-9)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


def test_a_killed_rank_ends_the_others_who_name_it(tmp_path: Path) -> None:
    degrees = {
        "sharing": {"train_tp": 2, "rollout_tp": 2},
        "train": {"max_steps": ENDLESS},
        "parallel": {"deadline_s": 10 * DEADLINE_S},
    }
    with Processes(2, _recipe(tmp_path, **degrees)) as processes:
        _wait_for_step(tmp_path, processes)
        processes.all[1].send_signal(signal.SIGKILL)
        code, _, errors = processes.ended(0)  # far below parallel.deadline_s
        assert code == 1 and "rank 0: peer error:" in errors, errors
        assert f"rank 1 (process {processes.all[1].pid}) has ended without a word" in errors, errors
        assert "steps since the last checkpoint are lost" in errors
    assert (tmp_path / "run" / "checkpoint-2" / "manifest.json").is_file()


def test_sigterm_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    degrees = {"sharing": {"train_tp": 2, "rollout_tp": 1}, "train": {"max_steps": ENDLESS}, "run": {"save_steps": 0}}
    with Processes(2, _recipe(tmp_path, **degrees)) as processes:
        _wait_for_step(tmp_path, processes)
        processes.all[1].send_signal(signal.SIGTERM)
        codes = [processes.ended(rank)[0] for rank in range(2)]
    assert codes == [143, 143]
    last = metrics_of(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / f"checkpoint-{last}" / "manifest.json").is_file()


def test_what_several_processes_cannot_do_is_said_before_they_meet(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, sharing={"train_tp": 2}, schedule={"name": "stream"})
    with Processes(1, recipe) as alone:
        code, _, errors = alone.ended(0)
    assert code == 2 and "torchrun --nproc-per-node 2 -m rollplex train" in errors, errors
    variables = {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    done = subprocess.run(
        [sys.executable, "-m", "rollplex", "train", recipe],
        env=_environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    words = re.sub(r"\s+", " ", done.stderr)
    assert done.returncode == 2 and words.startswith("rank 1: config error: 3 processes do not make whole"), words
    assert "schedule.name stream may start passes in the order" in words


def test_a_rank_that_hangs_ends_the_others_at_the_deadline(tmp_path: Path) -> None:
    sections = {
        "sharing": {"train_tp": 2, "rollout_tp": 2},
        "train": {"max_steps": ENDLESS},
        "parallel": {"deadline_s": LIMIT_S},
    }
    with Processes(2, _recipe(tmp_path, **sections)) as processes:
        _wait_for_step(tmp_path, processes)
        processes.all[1].send_signal(signal.SIGSTOP)
        code, _, errors = processes.ended(0)
    assert code == 1 and "rank 0: deadline error:" in errors, errors
    waited = re.search(r"rank 0 of 2 of (?:training's tensor-parallel ranks|the job) waited (\d+\.\d) s", errors)
    assert waited and float(waited[1]) >= LIMIT_S, errors
