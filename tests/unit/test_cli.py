"""The command line as a user meets it: a process of its own, its exit code, and what it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollplex.cli import app
from rollplex.recipes.options import all_groups, all_options

DEADLINE_S = 120.0
QUICK = (
    "hidden_size=32", "build.num_layers=1", "num_heads=1", "num_kv_heads=1", "vision_depth=1", "data.image_size=28",
    "prompts_per_step=2", "num_generations=2", "max_completion_length=4", "warm_start.steps=2", "batch_size=4",
    "num_threads=1",
)  # fmt: skip
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _command(*args: str) -> list[str]:
    return [sys.executable, "-c", "from rollplex.cli import main; main()", *args]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def _rollplex(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*args),
        cwd=folder,
        env=_environment(**environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def _help(*args: str) -> str:
    result = CliRunner().invoke(app, [*args, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return ANSI.sub("", result.output)


def test_train_help_explains_every_option() -> None:
    text = _help("train")
    for option in all_options().values():
        entry = f"  {option.key}  <{option.type}>  default: {option.default}\n      {option.description}\n"
        assert entry in text, option.key
    for section in {option.section for option in all_options().values()}:
        assert f"\n{section}  {all_groups()[section].description}" in text, section


@pytest.mark.parametrize("command", ["train", "verify", "plan", "demo"])
def test_help_of_each_command_names_overrides(command: str) -> None:
    assert "KEY=VALUE" in _help(command)
    assert command in _help()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from rollplex.cli import app\n"
        "assert CliRunner().invoke(app, ['train', '--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=True)


def test_train_runs_then_refuses_the_used_folder(tmp_path: Path) -> None:
    args = ("train", "demo", *QUICK, "max_steps=2", "output_dir=out", "log_completions_steps=1")
    done = _rollplex(tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert "warm start 2/2" in done.stdout and "step 2/2" in done.stdout
    assert "out/metrics.jsonl" in done.stdout and "checkpoint-2" in done.stdout and "out/completions" in done.stdout
    assert done.stderr == ""
    metrics = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]

    again = _rollplex(tmp_path, *args)
    assert again.returncode == 2
    assert "config error: run.output_dir out holds another run" in again.stderr
    assert "Traceback" not in again.stderr


def test_demo_never_writes_into_an_earlier_run_and_judges_the_rise(tmp_path: Path) -> None:
    (tmp_path / "runs/demo").mkdir(parents=True)
    done = _rollplex(tmp_path, "demo", "--seed", "3", "--min-rise", "2", *QUICK, "max_steps=2")
    assert done.returncode == 1, done.stderr
    assert "mean reward: first 1 steps" in done.stdout and "--min-rise" in done.stdout
    assert list((tmp_path / "runs/demo").iterdir()) == []
    assert "  seed: 3\n" in (tmp_path / "runs/demo-2/config.yaml").read_text()


@pytest.mark.parametrize(("command", "recipe"), [("demo", ()), ("verify", ("demo",))])
def test_demo_and_verify_refuse_to_be_several(tmp_path: Path, command: str, recipe: tuple[str, ...]) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = _rollplex(tmp_path, command, *recipe, *QUICK, **torchrun)
    assert done.returncode == 2 and "torchrun has started 2; start 'rollplex train" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("train", "demo", "dtype=float16"),
            "config error: model.dtype in override 'dtype=float16' is the text 'float16'",
        ),
        (("train", "demo", "--max-steps", "5"), "written without dashes: max_steps="),
        (("train", "nowhere.yaml"), "config error: recipe nowhere.yaml does not exist"),
        (("verify", "demo", "n=4"), "unknown option 'n'"),
        (("demo", "foo=[1]"), "unknown option 'foo' in override 'foo=[1]'"),
        (("train", "demo", "report_to=[x]"), "needed list of (tensorboard | wandb | trackio)"),
    ],
)
def test_mistake_in_the_call(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = _rollplex(tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_demand(tmp_path: Path) -> None:
    for args, environment in ((("--traceback",), {}), ((), {"ROLLPLEX_TRACEBACK": "1"})):
        done = _rollplex(tmp_path, "train", "demo", "foo=1", *args, **environment)
        assert done.returncode == 2 and "Traceback" in done.stderr and "config error: unknown option" in done.stderr
    assert "Traceback" not in _rollplex(tmp_path, "train", "demo", "foo=1", ROLLPLEX_TRACEBACK="0").stderr


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (("reward_funcs=[rewards.py:broken]",), 1, "reward error:"),
        (("data.task=files", "data.path=rows.jsonl", "warm_start.steps=0"), 2, "media error: row 0:"),
        (("model.build=null", "model.path=no-such-folder"), 2, "model error:"),
    ],
)
def test_errors_while_running_are_one_message(
    tmp_path: Path, overrides: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "rewards.py").write_text("def broken(**kwargs):\n    raise KeyError('lost')\n")
    part = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [part], "images": ["gone.png"], "answer": "a"}) + "\n")
    quick = [] if "model.build=null" in overrides else QUICK
    extra = ["reward_funcs=[rewards.py:broken]"] if "data.task=files" in overrides else []
    done = _rollplex(tmp_path, "train", "demo", *quick, "max_steps=1", "output_dir=out", *extra, *overrides)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message), done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(("end", "status", "error"), [("None", 0, ""), ("3", 3, ""), ("'no'", 1, "no\n")])
def test_the_end_of_the_process_runs_exit_handlers_and_keeps_the_status(end: str, status: int, error: str) -> None:
    code = textwrap.dedent(
        f"""
        import atexit, concurrent.futures, sys, threading, time
        from rollplex.runtime.leaving import run_and_leave
        atexit.register(print, "handler")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        idle = concurrent.futures.ThreadPoolExecutor(1)  # its worker ends when it is told to, by Python's own end
        idle.submit(int).result()
        run_and_leave(lambda: sys.exit({end}))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "thread\nhandler\n", error)


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import rollplex.runtime.trainer as trainer
        def broken(config, *, observer=None):
            return config.no_such_section
        trainer.train = broken
        from rollplex.cli import main
        main()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "demo"],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1 and "AttributeError" in done.stderr and "no_such_section" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_the_finished_steps(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        _command("train", "demo", *QUICK, "max_steps=100000", "output_dir=out"),
        cwd=tmp_path,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so would everything that it starts, this test included.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )
    try:
        metrics = tmp_path / "out/metrics.jsonl"
        until = time.monotonic() + DEADLINE_S
        while not (metrics.is_file() and metrics.stat().st_size > 0):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status and "Traceback" not in errors
    assert list((tmp_path / "out").glob("checkpoint-*"))
    assert "resume_from_checkpoint=auto" in errors or number is signal.SIGTERM  # nobody is there to read


def test_verify_prints_one_json_object(tmp_path: Path) -> None:
    done = _rollplex(tmp_path, "verify", "tiny_qwen2_5_vl", "--json", "dtype=float64")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["dtype"] == "float64"
    assert 0 <= report["max_rel_grad_error"] <= 1e-12 and 0 <= report["max_abs_logp_error"] <= 1e-10
