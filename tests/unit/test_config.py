"""Recipes and overrides: what is read, what is refused, and whether the message names key, place and remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollplex.config import Config, RunConfig, TrainConfig
from rollplex.errors import ConfigError
from rollplex.recipes.hints import PEER_NAMES, hint_for
from rollplex.recipes.load import dump_config, load_config
from rollplex.recipes.options import all_groups, all_options, keys_ending_in
from rollplex.recipes.packaged import packaged_names, recipe_path
from rollplex.recipes.yaml_text import parse_mapping, parse_value, write_yaml

MINIMAL = "model:\n  build: {family: qwen2_5_vl}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with nothing but a model."""
    return _write(tmp_path, MINIMAL)


def _write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_come_from_the_schema(recipe: Path) -> None:
    config = load_config(recipe)
    assert config == Config.model_validate({"model": {"build": {}}})
    assert config.train.learning_rate == 1e-6


def test_file_and_overrides_in_order(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "train:\n  learning_rate: 3e-4\n  max_steps: 7\n  warmup_steps: 2\n")
    config = load_config(path, ["max_steps=8", "train.max_steps=9"])
    assert config.train == TrainConfig(learning_rate=3e-4, max_steps=9, warmup_steps=2)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("dtype=float64", "model.dtype", "float64"),
        ("model.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("build.hidden_size=128", "model.build.hidden_size", 128),
        ("max_steps=5", "train.max_steps", 5),
        ("train.learning_rate=1e-6", "train.learning_rate", 1e-6),
        ("train.learning_rate=1E3", "train.learning_rate", 1000.0),
        ("train.learning_rate=2", "train.learning_rate", 2.0),
        ("share_prefix=off", "train.share_prefix", False),
        ("share_prefix=true", "train.share_prefix", True),
        ("dynamic_sampling=off", "algorithm.dynamic_sampling", "off"),
        ("scale_rewards=none", "algorithm.scale_rewards", "none"),
        ("on_timeout=none", "rewards.on_timeout", "none"),
        ("report_to=[wandb, tensorboard]", "run.report_to", ("wandb", "tensorboard")),
        ("reward_funcs=[pkg.mod:function]", "rewards.reward_funcs", ("pkg.mod:function",)),
        ("num_threads=null", "run.num_threads", None),
        ("num_threads=", "run.num_threads", None),
        ("output_dir=runs/a=b", "run.output_dir", "runs/a=b"),
        ("output_dir=2026-01-02", "run.output_dir", "2026-01-02"),
        ("seed=010", "run.seed", 10),
    ],
)
def test_override_value(recipe: Path, override: str, key: str, value: Any) -> None:
    found: Any = load_config(recipe, [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_overrides_of_sections(recipe: Path) -> None:
    config = load_config(recipe, ["num_generations=4", "rollout={top_k: 5}", "lora={}"])
    assert (config.rollout.num_generations, config.rollout.top_k) == (4, 5)
    assert config.model.lora is not None and config.model.lora.r == 8
    assert load_config(recipe, ["lora.r=2", "lora=null"]).model.lora is None
    swapped = load_config(recipe, ["model.build=null", "model.path=folder"])
    assert swapped.model.path == "folder" and swapped.model.build is None


def test_empty_section_takes_its_defaults(tmp_path: Path) -> None:
    assert load_config(_write(tmp_path, MINIMAL + "run:\ntrain:\n")).run == RunConfig()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trian:\n  max_steps: 3\n", ["unknown option 'trian'", "line 3", "did you mean train?"]),
        ("train:\n  max_step: 3\n", ["unknown option 'train.max_step'", "line 4", "did you mean train.max_steps?"]),
        ("train:\n  num_generations: 3\n", ["'train.num_generations'", "did you mean rollout.num_generations?"]),
        ("rollout:\n  n: 8\n", ["unknown option 'rollout.n'", "line 4", "here: rollout.num_generations"]),
        ("actor_rollout_ref:\n  rollout: {n: 8}\n", ["unknown option 'actor_rollout_ref'", "line 3"]),
        ("train:\n  1: 3\n", ["unknown option 'train.1'"]),
        ("train:\n  max_steps: soon\n", ["train.max_steps in", "line 4", "'soon'", "needed whole number >= 0"]),
        ("train:\n  max_steps: 5.0\n", ["train.max_steps", "the number 5.0", "needed whole number"]),
        ("train:\n  max_steps: true\n", ["train.max_steps", "the switch True", "needed whole number"]),
        ("train:\n  max_steps: '5'\n", ["train.max_steps", "the text '5'", "needed whole number"]),
        ("train:\n  max_steps: {a: 1}\n", ["train.max_steps", "the section a: 1", "needed whole number"]),
        ("train:\n  max_steps: -1\n", ["train.max_steps", "-1", ">= 0"]),
        ("train:\n  max_steps:\n", ["train.max_steps", "null", "needed whole number"]),
        ("train:\n  learning_rate: .inf\n", ["train.learning_rate", "inf"]),
        ("train:\n  share_prefix: maybe\n", ["train.share_prefix", "'maybe'", "on | off"]),
        ("train:\n  share_prefix: 1\n", ["train.share_prefix", "whole number 1", "on | off"]),
        ("train: 5\n", ["train in", "line 3", "needed a section with keys such as share_prefix"]),
        ("run:\n  report_to: wandb\n", ["run.report_to", "'wandb'", "list of (tensorboard | wandb | trackio)"]),
        ("run:\n  report_to: [wandb, disk]\n", ["run.report_to", "'disk'"]),
        ("algorithm:\n  loss_type: ppo\n", ["algorithm.loss_type", "'ppo'", "dapo | cispo"]),
        ("model:\n  dtype: float32\n", ["line 3", "key 'model' is already on line 1"]),
        ("train:\n  max_steps: 1\n  max_steps: 2\n", ["line 5", "key 'max_steps' is already on line 4"]),
        ("train: [\n", ["not valid", "line 4"]),
        ("train: !!python/object:os.system {}\n", ["line 3"]),
    ],
)
def test_refused_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = _refusal(_write(tmp_path, MINIMAL + text))
    missing = [part for part in parts if part not in message and part != "not valid"]
    assert not missing and "recipe.yaml" in message, message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("max_step=5", ["unknown option 'max_step'", "override 'max_step=5'", "did you mean train.max_steps?"]),
        ("learning_rate=1e-5", ["may mean train.learning_rate or warm_start.learning_rate"]),
        ("path=x", ["may mean", "model.path", "data.path"]),
        ("max_steps", ["not of the form key=value"]),
        ("=5", ["not of the form key=value"]),
        ("--max-steps=5", ["without dashes: max_steps=5"]),
        ("top_p=[1", ["'[1' is not valid YAML"]),
        ("top_p=1.5", ["rollout.top_p in override 'top_p=1.5' is the number 1.5", "> 0 and <= 1"]),
        ("temperature=.nan", ["rollout.temperature", "nan"]),
        ("rollout={n: 3}", ["'rollout.n' in override 'rollout={n: 3}'", "rollout.num_generations"]),
        ("model=null", ["model is missing"]),
        ("use_vllm=true", ["rollout.engine=vllm"]),
        ("vllm_mode=colocate", ["rollout.engine=vllm"]),
        ("per_device_train_batch_size=4", ["rollout.prompts_per_step"]),
        ("max_prompt_length=512", ["data.max_prompt_tokens"]),
        ("actor_rollout_ref.rollout.n=8", ["rollout.num_generations"]),
        ("data.train_batch_size=8", ["rollout.prompts_per_step"]),
        ("xyzzy=1", ["rollplex train --help"]),
    ],
)
def test_refused_override(recipe: Path, override: str, parts: list[str]) -> None:
    message = _refusal(recipe, override)
    assert not [part for part in parts if part not in message], message


def test_every_mistake_is_listed(recipe: Path) -> None:
    message = _refusal(recipe, "n=3", "--seed=1", "rollout={foo: 1}")
    assert [line.split(";")[0].split(":")[0] for line in message.split("\n")] == [
        "unknown option 'n' in override 'n=3'",
        "override '--seed=1'",
        "unknown option 'rollout.foo' in override 'rollout={foo",
    ]
    assert len(_refusal(recipe, "top_p=2", "max_steps=x", "build.vocab_size=1").split("\n")) == 3


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["steps_per_generation=3"], ["algorithm.steps_per_generation 3", "rollout.prompts_per_step 4"]),
        (["num_generations=1"], ["rollout.num_generations 1", "at least 2"]),
        (["num_generations=1", "loss_type=rloo"], ["rollout.num_generations 1", "rloo"]),
        (["num_generations=1", "loss_type=reinforce_pp", "dynamic_sampling=resample"], ["dynamic_sampling resample"]),
        (["loss_type=cispo"], ["cispo needs algorithm.epsilon_high"]),
        (["loss_type=cispo", "epsilon_high=5.0", "delta=2.0"], ["algorithm.delta does nothing"]),
        (["loss_type=rloo", "scale_rewards=batch"], ["scale_rewards batch does nothing"]),
        (["loss_type=reinforce_pp", "scale_rewards=none"], ["scale_rewards none does nothing"]),
        (["kl_in_reward=on"], ["kl_in_reward on does nothing with algorithm.beta 0"]),
        (["loss_type=rloo", "importance_sampling_level=sequence"], ["importance_sampling_level sequence does nothing"]),
        (
            ["data.path=rows.jsonl"],
            ["data.path 'rows.jsonl' does nothing with data.task counting", "set data.task=files"],
        ),
        (["data.task=motion", "num_images=2"], ["data.num_images 2 does nothing with data.task motion"]),
        (["min_pixels=900", "max_pixels=100"], ["data.min_pixels 900 is above data.max_pixels 100"]),
        (["overlong=drop"], ["does nothing without data.max_prompt_tokens"]),
        (["eval_steps=5"], ["run.eval_steps 5 does nothing without data.eval_split"]),
        (["trace_steps=[0, 9, 10]", "max_steps=9"], ["run.trace_steps [0, 10] are not steps of this run", "1 to"]),
        (["memory_steps=[-1, 2]"], ["run.memory_steps [-1] are not steps of this run"]),
        (["reward_funcs=[a:b, c:d]", "reward_weights=[1.0]"], ["1 entries for 2 rewards.reward_funcs"]),
        (["model.path=folder"], ["exactly one of model.path and model.build, found both", "model.build=null"]),
        (["model.build=null"], ["exactly one of model.path and model.build, found neither"]),
    ],
)
def test_refused_combination(recipe: Path, overrides: list[str], parts: list[str]) -> None:
    message = _refusal(recipe, *overrides)
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps_per_generation=2"],
        ["num_generations=1", "loss_type=reinforce_pp"],
        ["loss_type=cispo", "epsilon_high=5.0"],
        ["loss_type=rloo"],
        ["loss_type=rloo", "scale_rewards=none"],
        ["kl_in_reward=on", "beta=0.1"],
        ["data.task=files", "data.path=rows.jsonl"],
        ["data.task=my.module:Task", "data.path=anything", "num_images=3"],  # its own affair
        ["overlong=drop", "max_prompt_tokens=100"],
        ["eval_steps=5", "eval_split=test"],
        ["trace_steps=[1, 9]", "max_steps=9"],
        ["reward_weights=[0.5]"],
        ["reward_funcs=[a:b, c:d]", "reward_weights=[1, 2]"],
    ],
)
def test_accepted_combination(recipe: Path, overrides: list[str]) -> None:
    assert load_config(recipe, overrides) != load_config(recipe)


def test_file_that_is_no_recipe(tmp_path: Path) -> None:
    assert "holds a list" in _refusal(_write(tmp_path, "- a\n- b\n"))
    assert "holds a single value" in _refusal(_write(tmp_path, "hello\n"))
    assert "model is missing" in _refusal(_write(tmp_path, ""))
    assert "cannot be read" in _refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in _refusal(tmp_path / "binary.yaml")
    assert "does not exist; did you mean" in _refusal(tmp_path / "recipes.yaml")
    assert "unknown option 'a'" in _refusal(_write(tmp_path, "a: &a\n  b: *a\n"))


def test_sections_are_frozen_and_coerce_nothing() -> None:
    with pytest.raises(ValidationError):
        TrainConfig(max_steps="5")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TrainConfig(max_stepz=5)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        TrainConfig().max_steps = 5  # type: ignore[misc]


# Any leaf may be set to any of these; those that the schema refuses are skipped by the test.
_VALUES: dict[str, list[Any]] = {
    "train.learning_rate": [0, 1e-6, 3.5e-7, 1, 0.1, 1e22, 5e-324],
    "train.share_prefix": [True, False],
    "run.output_dir": [
        "a b",
        "1e-6",
        "off",
        "null",
        "~",
        "",
        "a: b # c",
        "01",
        "[x]",
        "\u00e4\u2603",
        "x\ny",
        "<<",
        "1:30",
    ],
    "run.report_to": [[], ["wandb"], ["wandb", "trackio"]],
    "model.lora": [None, {}, {"r": 3, "target_modules": ["a", "no", "1"]}],
    "algorithm.dynamic_sampling": ["off", "resample"],
    "algorithm.scale_rewards": ["none", "group"],
    "rewards.reward_weights": [None, [1.0, 0.25]],
    "run.num_threads": [None, 3],
}


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in _VALUES.items()}))
def test_dump_and_load_round_trip(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"model": {"build": {}}}
    for key, value in values.items():
        section, leaf = key.split(".")
        tree.setdefault(section, {})[leaf] = value
    config = Config.model_validate(tree)
    path = tmp_path_factory.mktemp("config") / "recipe.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


_TREES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)


@given(st.dictionaries(st.text(), _TREES, max_size=4))
def test_yaml_round_trip(tree: dict[str, Any]) -> None:
    again = parse_mapping(write_yaml(tree), "text").tree
    assert again == tree and repr(again) == repr(tree)  # repr: 1 is not 1.0, and 0.0 is not -0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.", 1.0), (".5", 0.5), ("-.inf", float("-inf")), ("+3", 3), ("010", 10), ("Null", None),
        ("off", "off"), ("no", "no"), ("1:30", "1:30"), ("0x10", "0x10"), ("1_000", "1_000"), ("e5", "e5"),
        ("2026-01-01", "2026-01-01"),
    ],
)  # fmt: skip
def test_yaml_scalars_are_those_of_1_2(text: str, value: Any) -> None:
    found = parse_value(text, "override")
    assert found == value and type(found) is type(value)


def test_every_option_is_documented() -> None:
    undocumented = [key for key, option in all_options().items() if not option.description.strip()]
    undocumented += [key for key, group in all_groups().items() if not group.description.strip()]
    assert not undocumented
    assert len(all_options()) > 80


def test_every_option_can_be_named_in_full() -> None:
    """A full key never means anything but itself, whatever other keys end with it."""
    assert [key for key in (*all_options(), *all_groups()) if keys_ending_in(key) != [key]] == []


def test_peer_hints_name_options_that_exist() -> None:
    known = {*all_options(), *all_groups()}
    sections = {key for key in known if "." not in key}
    wrong = [
        (name, key)
        for name, text in PEER_NAMES.items()
        for key in re.findall(r"\b[a-z_]+\.[a-z_.]+[a-z_]\b", text)
        if key.split(".")[0] in sections and key not in known
    ]
    assert not wrong
    shadowed = [name for name in PEER_NAMES if name in {key.rpartition(".")[2] for key in known}]
    assert not shadowed, "these are our own names: the hint would never be seen"
    assert all(PEER_NAMES[name] in hint_for(name) for name in PEER_NAMES)


def test_packaged_recipes_load() -> None:
    assert {"demo", "easy_vqa", "tiny_qwen2_5_vl", "tiny_qwen3_vl"} <= set(packaged_names())
    for name in packaged_names():
        load_config(recipe_path(name), ["dtype=float64"])


def test_recipe_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_path("demo").is_file()
    with pytest.raises(ConfigError, match="did you mean demo"):
        recipe_path("dem")
    Path("demo").write_text(MINIMAL, encoding="utf-8")
    assert recipe_path("demo") == Path("demo")
    assert recipe_path("elsewhere/demo") == Path("elsewhere/demo")


def test_config_and_recipes_need_no_torch() -> None:
    code = (
        "import sys, rollplex.config, rollplex.recipes.load, rollplex.cli\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
