"""The command line: parse, call, print. torch is imported inside the commands only, so that --help is quick.

Exit codes: 0 done; 1 failed, or a check did not pass; 2 a mistake in recipe, row, model or call; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.text import Text
from typer.core import TyperCommand

from rollplex import __version__
from rollplex.config import Config
from rollplex.errors import ConfigError, ModelError, RollplexError, RowError
from rollplex.parallel.launch import launched, refuse_several, voice
from rollplex.recipes.load import load_config
from rollplex.recipes.options import all_groups, all_options
from rollplex.recipes.packaged import packaged_names, packaged_recipe, recipe_path
from rollplex.runtime.leaving import run_and_leave

if TYPE_CHECKING:
    from rollplex.runtime.trainer import RunResult

TRACEBACK_VARIABLE = "ROLLPLEX_TRACEBACK"
EXIT_FAILED, EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 2, 130
_MISTAKES = (ConfigError, RowError, ModelError)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Exact, prefix-shared on-policy reinforcement learning for vision-language models.",
)


class RecipeCommand(TyperCommand):
    """A command whose help goes on with every option of a recipe, read from the schema."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """typer's help, then the options by section."""
        super().format_help(ctx, formatter)
        console = Console(highlight=False)
        for line in option_lines():
            console.print(line, soft_wrap=True)


# `--dtype=float64` then reaches the overrides, whose error says how it is written here.
_SETTINGS = {"ignore_unknown_options": True}
Recipe = Annotated[
    str,
    typer.Argument(
        help=f"A YAML file, or the name of a packaged recipe: {', '.join(packaged_names())}.", metavar="RECIPE"
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Options that replace the recipe's: a full key (train.max_steps=5) or its last part when only one option "
        "has it (max_steps=5). `rollplex train --help` lists all.",
        metavar="[KEY=VALUE]...",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
# What virtual time assumes beside a recipe: `plan --gpus` and `simulate` alike.
ResponseTokens = Annotated[
    float | None, typer.Option(help="Median length of responses; absent: half of max_completion_length.")
]
Spread = Annotated[float, typer.Option(min=0, help="Spread of the logarithm of response lengths.")]
Contention = Annotated[
    float, typer.Option(min=1, help="How many times as long decoding and passes take while both run.")
]
LengthSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of response lengths.")]
Traceback = Annotated[
    bool, typer.Option("--traceback", help=f"Show where an error came from (also {TRACEBACK_VARIABLE}=1).")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollplex {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=RecipeCommand, context_settings=_SETTINGS)
def train(recipe: Recipe, overrides: Overrides = None, show_traceback: Traceback = False) -> None:
    """Train by a recipe into its run folder: metrics.jsonl, completions with their pictures, checkpoints."""
    with _clean_errors(show_traceback):
        console = Console(highlight=False, quiet=launched(os.environ).rank > 0)  # of several processes one speaks
        _run(load_config(recipe_path(recipe), overrides or ()), console)


@app.command(context_settings=_SETTINGS)
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Compare shared-prefix training with the ordinary full-sequence computation, on the recipe's model and rows.

    Exit code 1 when an error is over its bound.
    """
    with _clean_errors(show_traceback):
        refuse_several(os.environ, "rollplex verify", "rollplex train")
        config = load_config(recipe_path(recipe), overrides or ())
        console = Console(stderr=True)
        _prepare_libraries(console)
        # Whatever a library or a task prints, stdout holds the answer alone.
        with contextlib.redirect_stdout(sys.stderr), console.status("comparing with full sequences"):
            from rollplex.runtime.verify import verify as run_verify

            report = run_verify(config)
        facts = dataclasses.asdict(report)
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            for name, value in facts.items():
                lines = [str(row) for row in value] if name == "rows" else [value]
                for line in lines:
                    typer.echo(f"{name:25} {line:.3g}" if isinstance(line, float) else f"{name:25} {line}")
            typer.echo(report.verdict)
        if not report.passed:
            raise typer.Exit(EXIT_FAILED)


@app.command(context_settings=_SETTINGS)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
    section: Annotated[
        list[str] | None, typer.Option(help="Only this part of the plan; may be given several times.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices to arrange; absent: memory.devices.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Search: kind of device, or a file of `calibrate`.")] = None,
    explain: Annotated[bool, typer.Option(help="Search: where time, memory and traffic of each answer go.")] = False,
    response_tokens: ResponseTokens = None,
    spread: Spread = 0.5,
    contention: Contention = 1.2,
    seed: LengthSeed = 0,
    show_traceback: Traceback = False,
) -> None:
    """Say what a recipe would hold and move on its devices, from its numbers alone: no weights, no devices needed.

    With --gpus and --hardware: which schedule, degrees and pools make its step fastest there, and why.
    """
    from rollplex.planner.report import plan_facts, plan_lines
    from rollplex.planner.search_report import answer, search_lines
    from rollplex.planner.workload import Assumptions
    from rollplex.runtime.calibration import device_named
    from rollplex.runtime.search_bar import search_bar

    with _clean_errors(show_traceback):
        config = load_config(recipe_path(recipe), overrides or ())
        if hardware is None:
            if gpus is not None or explain or (response_tokens, spread, contention, seed) != (None, 0.5, 1.2, 0):
                raise ConfigError(
                    "--gpus, --explain, --response-tokens, --spread, --contention and --seed are about a search over "
                    "devices, which needs --hardware as well"
                )
            facts: Mapping[str, Any] = plan_facts(config, section or ())
            lines = plan_lines(facts)
        else:
            if section:
                raise ConfigError("--section is a part of the recipe's own plan; needed without --gpus and --hardware")
            assumed = Assumptions(device_named(hardware), response_tokens, spread, contention, seed)
            facts = answer(config, config.memory.devices if gpus is None else gpus, assumed, search_bar)
            lines = search_lines(facts, explain=explain)
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            for line in lines:
                typer.echo(line)


@app.command(context_settings=_SETTINGS)
def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    schedule: Annotated[str, typer.Option(help="Schedule to run in virtual time.")] = "rollplex",
    hardware: Annotated[str, typer.Option(help="Kind of device, or a file that `rollplex calibrate` wrote.")] = "h100",
    response_tokens: ResponseTokens = None,
    spread: Spread = 0.5,
    contention: Contention = 1.2,
    rollout_devices: Annotated[
        int | None, typer.Option(help="Devices of the rollout pool, of memory.devices; absent: half.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to run; the last is drawn.")] = 3,
    seed: LengthSeed = 0,
    trace: Annotated[Path | None, typer.Option(help="Write the last step for Perfetto into this file.")] = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Run a recipe's steps in virtual time under any schedule, on one or two pools, and draw the last one."""
    from rollplex.planner import simulate_recipe as virtual
    from rollplex.planner.gantt import gantt
    from rollplex.runtime.calibration import device_named
    from rollplex.runtime.progress import can_encode
    from rollplex.trace import to_chrome

    with _clean_errors(show_traceback):
        config = load_config(recipe_path(recipe), overrides or ())
        request = virtual.Request(
            schedule, device_named(hardware), response_tokens, spread, contention, rollout_devices, steps, seed
        )
        found = virtual.simulate_recipe(config, request)
        facts = virtual.simulation_facts(found)
        if trace is not None:
            try:
                trace.write_text(to_chrome(found.spans, f"simulated {schedule}"), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write --trace {trace}: {error}") from error
        if as_json:
            typer.echo(json.dumps(facts))
            return
        console = Console(highlight=False)
        for line in virtual.simulation_lines(facts):
            console.print(Text(line), soft_wrap=True)
        console.print()
        plain = not can_encode(console, "\u2581\u2588")
        for row in gantt(found.spans, width=max(40, min(120, console.width - 10)), ascii_only=plain):
            console.print(row, soft_wrap=True)


@app.command()
def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with traced steps (run.trace_steps).")],
    out: Annotated[Path, typer.Option(help="File to write, for --hardware of plan and simulate.")],
    hardware: Annotated[
        str, typer.Option(help="Where the fit starts: the kind of device, an earlier file, or cpu for this machine's.")
    ] = "cpu",
    show_traceback: Traceback = False,
) -> None:
    """Fit what a machine reaches of its peaks to the traces of real runs on one device, and say what is left over."""
    from rollplex.runtime.calibration import calibrate_runs, calibration_lines, write_calibration

    with _clean_errors(show_traceback):
        facts = calibrate_runs(runs, hardware)
        write_calibration(facts, out)
        for line in calibration_lines(facts):
            typer.echo(line)
        typer.echo(f"written to {out}")


@app.command(context_settings=_SETTINGS)
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data order, sampling and initial weights.")] = 0,
    min_rise: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 1 unless the mean reward of the last ten steps is this much above the first ten."
        ),
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Make a small vision-language model, warm it up, and see its reward rise under GRPO. Minutes on two cores."""
    from rollplex.runtime.reward_chart import rise
    from rollplex.runtime.run_folder import free_folder

    console = Console(highlight=False)
    with _clean_errors(show_traceback):
        refuse_several(os.environ, "rollplex demo", "rollplex train demo")
        defaults = [f"run.seed={seed}", f"run.output_dir={free_folder(Path('runs/demo'))}"]
        result = _run(load_config(packaged_recipe("demo"), [*defaults, *(overrides or ())]), console)
        change = rise(result.rewards)
        if min_rise is not None and (change is None or change.difference < min_rise):
            console.print(f"the reward rose by less than {min_rise:g} (--min-rise)")
            raise typer.Exit(EXIT_FAILED)


def option_lines() -> Iterator[Text]:
    """All options as lines: sections as headings, then two lines for each option."""
    groups, section = all_groups(), None
    yield Text("Options of a recipe", "bold")
    for option in all_options().values():
        if option.section != section:
            section = option.section
            group = groups[section]
            absent = f" (absent unless given; {section}={{}} takes its defaults)" if group.optional else ""
            yield Text.assemble("\n", (section, "bold yellow"), f"  {group.description}{absent}")
        facts = f"  <{option.type}>  "
        yield Text.assemble("  ", (option.key, "bold cyan"), facts, (f"default: {option.default}", "dim"))
        yield Text(f"      {option.description}")


def main() -> None:
    """Entry point of the `rollplex` command."""
    run_and_leave(app)


def _run(config: Config, console: Console) -> RunResult:
    """Train, show it going on, and say what came out and where it lies."""
    _prepare_libraries(console)
    from rollplex.runtime.progress import Progress
    from rollplex.runtime.trainer import train as run_train

    with Progress(console) as progress:
        result = run_train(config, observer=progress)
    for line in _summary(result, console):
        console.print(Text(line), soft_wrap=True)
    return result


def _summary(result: RunResult, console: Console) -> Iterator[str]:
    from rollplex.runtime.progress import can_encode
    from rollplex.runtime.reward_chart import chart, rise

    yield ""
    yield from chart(result.rewards, ascii_only=not can_encode(console, "\u2588\u2502"))
    change = rise(result.rewards)
    if change is not None:
        yield (
            f"mean reward: first {change.steps} steps {change.first:.3f}, last {change.steps} steps {change.last:.3f}, "
            f"change {change.difference:+.3f}"
        )
    yield from _evaluation(result.evaluation)
    folder = result.output_dir
    yield f"results in {folder}:"
    yield f"  metrics      {folder / 'metrics.jsonl'}"
    if (folder / "completions").is_dir():
        yield f"  completions  {folder / 'completions'} (open an .html page: prompts with pictures, answers, rewards)"
    if result.checkpoint is not None:
        yield f"  model        {result.checkpoint} (Hugging Face format)"


def _evaluation(metrics: Mapping[str, float]) -> Iterator[str]:
    if metrics:
        yield "evaluation: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _prepare_libraries(console: Console) -> None:
    """Our log through `console`; the libraries' progress bars, tips and usage reports off. Before they are imported."""
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ):
        os.environ.setdefault(name, value)
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("rollplex").setLevel(logging.INFO)


@contextlib.contextmanager
def _clean_errors(show_traceback: bool) -> Iterator[None]:
    """Our own errors as one message and an exit code; everything else is a bug and keeps its traceback."""
    try:
        yield
    except RollplexError as error:
        if show_traceback or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exc()
        stderr = Console(stderr=True, highlight=False, soft_wrap=True)
        for line in str(error).split("\n"):
            stderr.print(f"[bold red]{_heading(error)}[/] {escape(line)}")
        for note in getattr(error, "__notes__", ()):
            stderr.print(escape(note))
        raise typer.Exit(EXIT_MISTAKE if isinstance(error, _MISTAKES) else EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        Console(stderr=True).print(
            "stopped by Ctrl-C; complete checkpoints are intact: resume_from_checkpoint=auto goes on from the newest"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _heading(error: RollplexError) -> str:
    """ "ConfigError" -> "config error:"; of several processes with its rank."""
    name = type(error).__name__.removesuffix("Error")
    return f"{voice(os.environ)}{''.join(f' {c}' if c.isupper() else c for c in name).strip().lower()} error:"
