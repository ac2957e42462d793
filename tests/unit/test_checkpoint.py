"""Checkpoints: bitwise resume, whole or not there, and errors that name the file, tensor or option."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollplex.config import BuildConfig, Config, LoraConfig, ModelConfig, TrainConfig
from rollplex.errors import CheckpointError
from rollplex.models.load import LoadedModel, load_model
from rollplex.train.checkpoint import load_checkpoint, save_checkpoint
from rollplex.train.checkpoint_folder import newest_complete, prune, recover, verify_checksums
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.resume import check_same_run, resolve_resume

PATIENCE_S = 120.0  # for what comes soon unless something hangs
TEXTS = ["How many red circles are in the image?", "The answer is 3."]
TRAIN = TrainConfig(learning_rate=1e-2, weight_decay=0.1, lr_scheduler_type="cosine")
STATE = {"step": 2, "weight_version": 2, "data_position": 8, "seed": 0, "metrics_lines": 2}


def _model(**options: Any) -> LoadedModel:
    build = options.pop("build", BuildConfig(hidden_size=32, num_heads=2, vision_hidden_size=16))
    return load_model(ModelConfig(build=build, **options), texts=TEXTS, seed=1)


def _optimizer(model: Any) -> PolicyOptimizer:
    return PolicyOptimizer(model, TRAIN, total_steps=10)


def _train(loaded: LoadedModel, optimizer: PolicyOptimizer, steps: range, *, with_image: bool = True) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        pixels = torch.randint(0, 256, (56, 56, 3), generator=generator, dtype=torch.uint8)
        text = f"{'<|image_pad|>' if with_image else ''}How many circles? {step}"
        images = [Image.fromarray(pixels.numpy())] if with_image else None
        batch = loaded.processor(text=[text], images=images, return_tensors="pt")
        if with_image:
            batch["pixel_values"] = batch["pixel_values"].to(loaded.model.dtype)
        loaded.model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()


def _save(folder: Path, loaded: LoadedModel, optimizer: PolicyOptimizer, **options: Any) -> Path:
    arguments = {"trainer_state": STATE} | options
    return save_checkpoint(folder, model=loaded.model, processor=loaded.processor, optimizer=optimizer, **arguments)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, LoadedModel, PolicyOptimizer]:
    """checkpoint-2 of a small model after two steps."""
    loaded = _model()
    optimizer = _optimizer(loaded.model)
    _train(loaded, optimizer, range(2))
    return _save(tmp_path / "checkpoint-2", loaded, optimizer), loaded, optimizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"freeze_vision": True},
        {"lora": LoraConfig(r=2)},
        {"lora": LoraConfig(r=2), "dtype": "bfloat16"},
        {"build": BuildConfig(family="qwen3_vl", hidden_size=32, vision_hidden_size=16, tie_word_embeddings=True)},
    ],
    ids=["fp32", "bf16", "fp64", "frozen", "lora", "lora-bf16", "qwen3-tied"],
)
def test_resume_is_bitwise(tmp_path, options):
    loaded = _model(**options)
    optimizer = _optimizer(loaded.model)
    _train(loaded, optimizer, range(3))
    folder = _save(tmp_path / "checkpoint-3", loaded, optimizer)
    _train(loaded, optimizer, range(3, 6))

    again = _model(**options)
    resumed = _optimizer(again.model)
    restored = load_checkpoint(folder, model=again.model, optimizer=resumed)
    assert dict(restored.trainer_state) == STATE
    assert restored.optimizer_steps == resumed.num_steps == 3
    _train(again, resumed, range(3, 6))

    wanted, found = loaded.model.state_dict(), again.model.state_dict()
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    wanted_state, found_state = optimizer.named_state(), resumed.named_state()
    assert wanted_state.keys() == found_state.keys()
    for name, tensor in wanted_state.items():
        assert found_state[name].dtype == tensor.dtype, name
        assert torch.equal(found_state[name], tensor), name
    assert [g["lr"] for g in optimizer.adamw.param_groups] == [g["lr"] for g in resumed.adamw.param_groups]


def test_resume_after_steps_that_gave_the_tower_no_gradient(tmp_path):
    loaded = _model()
    optimizer = _optimizer(loaded.model)
    _train(loaded, optimizer, range(2), with_image=False)
    folder = _save(tmp_path / "checkpoint-2", loaded, optimizer)
    _train(loaded, optimizer, range(2, 4))
    again = _model()
    resumed = _optimizer(again.model)
    load_checkpoint(folder, model=again.model, optimizer=resumed)
    _train(again, resumed, range(2, 4))
    found = again.model.state_dict()
    assert [name for name, tensor in loaded.model.state_dict().items() if not torch.equal(tensor, found[name])] == []


def test_optimizer_of_other_parameters_is_refused_even_without_their_state(tmp_path):
    loaded = _model()
    optimizer = _optimizer(loaded.model)
    _train(loaded, optimizer, range(1), with_image=False)
    folder = _save(tmp_path / "checkpoint-1", loaded, optimizer)
    frozen = _model(freeze_vision=True)
    with pytest.raises(CheckpointError, match=r"trained \S*visual\S* \(\d+ parameters differ"):
        load_checkpoint(folder, model=frozen.model, optimizer=_optimizer(frozen.model))


def _stored_names(folder: Path, stem: str) -> set[str]:
    with safe_open(folder / f"{stem}.safetensors", framework="pt") as file:
        return set(file.keys())


def test_no_optimizer_state_for_what_is_not_trained(tmp_path):
    for name, options in {"frozen": {"freeze_vision": True}, "lora": {"lora": LoraConfig(r=2)}}.items():
        loaded = _model(**options)
        optimizer = _optimizer(loaded.model)
        tower = {n: t.clone() for n, t in loaded.model.state_dict().items() if "visual" in n}
        _train(loaded, optimizer, range(1))
        assert tower
        assert all(torch.equal(loaded.model.state_dict()[n], t) for n, t in tower.items())
        folder = _save(tmp_path / name / "checkpoint-1", loaded, optimizer)
        trained = {n for n, p in loaded.model.named_parameters() if p.requires_grad}
        assert {entry.split("/", 1)[1] for entry in _stored_names(folder, "optimizer")} == trained
        assert not any("visual" in entry for entry in trained)
        assert (folder / "model.safetensors").exists() == (name == "frozen")


@pytest.mark.parametrize("options", [{}, {"lora": LoraConfig(r=2)}], ids=["full", "lora"])
def test_a_checkpoint_loads_with_the_plain_auto_classes(tmp_path, options):
    pytest.importorskip("peft")
    loaded = _model(**options)
    optimizer = _optimizer(loaded.model)
    _train(loaded, optimizer, range(2))
    folder = _save(tmp_path / "checkpoint-2", loaded, optimizer)
    auto: Any = AutoModelForImageTextToText
    plain = auto.from_pretrained(folder)
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, loaded.model(input_ids=ids).logits)
    processor: Any = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.get_vocab() == loaded.processor.tokenizer.get_vocab()


def test_only_data_formats_and_every_file_in_the_manifest(saved):
    folder, _, _ = saved
    names = {path.name for path in folder.iterdir()}
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json", ".yaml", ".jinja", ".txt"}
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == names - {"manifest.json"}
    assert [path for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (
            lambda f: os.truncate(f / "model.safetensors", 5000),
            r"model\.safetensors is cut short.*5000 bytes, needed \d{6}",
        ),
        (lambda f: os.truncate(f / "optimizer.safetensors", 0), r"optimizer\.safetensors is cut short.* 0 bytes"),
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: _flip_byte(f / "model.safetensors"), r"model\.safetensors is damaged: its sha256"),
        (lambda f: _flip_byte(f / "optimizer.safetensors"), r"optimizer\.safetensors is damaged: its sha256"),
        (lambda f: (f / "manifest.json").unlink(), r"no complete checkpoint: it has no manifest\.json"),
        (lambda f: os.truncate(f / "manifest.json", 40), r"manifest\.json is damaged"),
    ],
)
def test_damage_is_named_and_nothing_is_loaded(saved, damage, pattern):
    folder, _, _ = saved
    damage(folder)
    fresh = _model()
    before = {name: tensor.clone() for name, tensor in fresh.model.state_dict().items()}
    optimizer = _optimizer(fresh.model)
    with pytest.raises(CheckpointError, match=pattern):
        load_checkpoint(folder, model=fresh.model, optimizer=optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.model.state_dict().items())
    assert optimizer.named_state() == {}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"build": BuildConfig(hidden_size=64, vision_hidden_size=16)}, r"of another model: .* is F32 .*needed F32"),
        (
            {"build": BuildConfig(hidden_size=32, num_layers=3, vision_hidden_size=16)},
            r"layers\.2\.\S+ is missing.* and \d+ more",
        ),
        (
            {"build": BuildConfig(hidden_size=32, num_layers=1, vision_hidden_size=16)},
            r"layers\.1\.\S+ is not in this run's model",
        ),
        ({"dtype": "bfloat16"}, r"is F32 .*needed BF16"),
        ({"lora": LoraConfig(r=2)}, r"holds a full model, this run's model has LoRA adapters.*model\.lora"),
    ],
)
def test_wrong_model_is_named_and_nothing_is_loaded(saved, options, pattern):
    folder, _, _ = saved
    other = _model(**options)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=pattern):
        load_checkpoint(folder, model=other.model, optimizer=_optimizer(other.model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


def test_optimizer_of_other_parameters_is_refused(saved):
    folder, _, _ = saved
    frozen = _model(freeze_vision=True)
    with pytest.raises(CheckpointError, match=r"of a run that trained \S*visual.*model\.freeze_vision"):
        load_checkpoint(folder, model=frozen.model, optimizer=_optimizer(frozen.model))


def test_newer_format_is_refused(saved):
    folder, loaded, optimizer = saved
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {"format_version": 99}))
    _reseal(folder)
    with pytest.raises(CheckpointError, match=r"format_version 99.*reads 1"):
        load_checkpoint(folder, model=loaded.model, optimizer=optimizer)


def _reseal(folder: Path) -> None:
    from rollplex.train.checkpoint_folder import _seal

    (folder / "manifest.json").unlink()
    _seal(folder)


@pytest.mark.parametrize("state", [{"step": float("nan")}, {"step": {1, 2}}, {"format_version": 3}])
def test_trainer_state_that_is_no_json_leaves_the_old_checkpoint(saved, state):
    folder, loaded, optimizer = saved
    with pytest.raises(CheckpointError, match=r"JSON|format_version"):
        _save(folder, loaded, optimizer, trainer_state=state)
    verify_checksums(folder)


def test_a_step_saved_again_replaces_the_old_one(saved):
    folder, loaded, optimizer = saved
    _train(loaded, optimizer, range(2, 3))
    _save(folder, loaded, optimizer, trainer_state=STATE | {"data_position": 99})
    fresh = _model()
    restored = load_checkpoint(folder, model=fresh.model)
    assert restored.trainer_state["data_position"] == 99
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-2"]


# A process whose files may not grow past a limit: the kernel fails its writes as a full disk does (EFBIG).
_FULL_DISK_SCRIPT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint import *
from test_checkpoint import _model, _optimizer, _save, _train
folder = Path(sys.argv[2])
loaded = _model(); optimizer = _optimizer(loaded.model)
_train(loaded, optimizer, range(3))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (100, 10_000, 150_000, 380_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    for target in (folder, folder.parent / "checkpoint-3"):
        try:
            _save(target, loaded, optimizer)
        except CheckpointError as error:
            print("REFUSED", str(error).replace("\\n", " "))
"""


def test_writes_that_fail_leave_the_last_checkpoint(saved):
    folder, _, _ = saved
    # The limits cut the config, the tokenizer, the weights and the optimizer state.
    assert 150_000 < (folder / "model.safetensors").stat().st_size < 380_000
    assert (folder / "optimizer.safetensors").stat().st_size > 380_000
    command = [sys.executable, "-c", _FULL_DISK_SCRIPT, str(Path(__file__).parent), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    refused = [line for line in run.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == 8, run.stdout + run.stderr
    for line in refused:
        assert "cannot write" in line
        assert "File too large" in line
        assert "run.output_dir" in line
        assert f"last checkpoint: {folder} (intact)" in line
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-2"]
    verify_checksums(folder)


def test_disk_full_on_a_small_file_system(saved, tmp_path):
    folder, loaded, optimizer = saved
    one = sum(path.stat().st_size for path in folder.iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={one * 3 // 2}", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs privileges; the limit on file sizes covers the same path")
    try:
        first = _save(disk / "checkpoint-1", loaded, optimizer)
        for target in (disk / "checkpoint-2", first):
            with pytest.raises(CheckpointError, match=r"No space left.*MiB free.*checkpoint-1 \(intact\)"):
                _save(target, loaded, optimizer)
        assert [path.name for path in disk.iterdir()] == ["checkpoint-1"]
        verify_checksums(first)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _save_forever(root: Path, loaded: LoadedModel, optimizer: PolicyOptimizer) -> None:
    number = 1
    while True:  # over an existing folder and beside it, with pruning
        number = number % 3 + 1
        _save(root / f"checkpoint-{number}", loaded, optimizer)
        prune(root, 2)


def _half_written(root: Path) -> bool:
    return any(path.name.startswith(".") for path in root.iterdir())


def _stop_while_writing(writer: int, root: Path) -> None:
    """Stop the process at a moment at which something is half written."""
    until = time.monotonic() + PATIENCE_S
    while True:
        os.kill(writer, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(writer, os.WUNTRACED)[1]) and time.monotonic() < until
        if _half_written(root):
            return
        os.kill(writer, signal.SIGCONT)
        time.sleep(0.001)


# Python 3.12 warns; the writer runs no thread pool and takes no lock that another thread may hold.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(saved):
    folder, loaded, optimizer = saved
    moments = random.Random(0)
    for kill in range(12):
        writer = os.fork()  # inherits the model
        if writer == 0:
            try:
                _save_forever(folder.parent, loaded, optimizer)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.02, 0.3))
        if kill % 4:  # else at whatever moment this is
            _stop_while_writing(writer, folder.parent)
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL  # it was still at it
        assert kill % 4 == 0 or _half_written(folder.parent)
        assert newest_complete(folder.parent) is not None
        for checkpoint in folder.parent.glob("checkpoint-*"):  # whatever has a valid name is whole
            verify_checksums(checkpoint)
        recover(folder.parent)
        assert not _half_written(folder.parent)


def _numbered(root: Path, saved_folder: Path, steps: list[int]) -> None:
    for step in steps:
        shutil.copytree(saved_folder, root / f"checkpoint-{step}")


def test_killed_between_the_renames_of_a_replacement(saved):
    folder, loaded, _ = saved
    folder.rename(folder.parent / ".checkpoint-2.replaced")
    (folder.parent / ".checkpoint-2.writing").mkdir()
    assert newest_complete(folder.parent) == folder
    load_checkpoint(folder, model=loaded.model)
    recover(folder.parent)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-2"]


def test_newest_complete_orders_by_number_and_passes_over_damage(saved, tmp_path, caplog):
    folder, _, _ = saved
    root = tmp_path / "run"
    assert newest_complete(root) is None
    root.mkdir()
    assert newest_complete(root) is None
    _numbered(root, folder, [9, 10, 100])
    (root / "checkpoint-final").mkdir()
    assert newest_complete(root) == root / "checkpoint-100"
    os.truncate(root / "checkpoint-100" / "optimizer.safetensors", 10)
    assert newest_complete(root) == root / "checkpoint-10"
    assert "optimizer.safetensors is cut short" in caplog.text


def test_pruning_keeps_the_newest_and_the_newest_complete(saved, tmp_path):
    folder, _, _ = saved
    root = tmp_path / "run"
    root.mkdir()
    _numbered(root, folder, [1, 2, 3, 4])

    def steps() -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in root.iterdir())

    prune(root, None)
    assert steps() == [1, 2, 3, 4]
    prune(root, 3)
    assert steps() == [2, 3, 4]
    for step in (3, 4):
        (root / f"checkpoint-{step}" / "manifest.json").unlink()
    prune(root, 1)
    assert steps() == [2, 4]


def _config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"build": {}}} | sections)


def test_the_same_run_may_change_where_it_writes_but_not_what_it_is(saved, tmp_path):
    _, loaded, optimizer = saved
    config = _config(run={"seed": 3}, train={"max_steps": 5}, rollout={"num_generations": 4})
    folder = _save(tmp_path / "checkpoint-5", loaded, optimizer, config=config)
    may = _config(
        run={"seed": 3, "output_dir": "elsewhere", "num_threads": 1},
        train={"max_steps": 9},
        rollout={"num_generations": 4},
    )
    load_checkpoint(folder, model=loaded.model, optimizer=optimizer, config=may)
    other = _config(run={"seed": 4}, train={"max_steps": 5}, rollout={"num_generations": 8})
    with pytest.raises(CheckpointError, match=r"rollout\.num_generations was 4, is 8; run\.seed was 3, is 4"):
        load_checkpoint(folder, model=loaded.model, optimizer=optimizer, config=other)
    lora = _config(
        run={"seed": 3}, train={"max_steps": 5}, rollout={"num_generations": 4}, model={"build": {}, "lora": {}}
    )
    with pytest.raises(CheckpointError, match=r"model\.lora"):
        load_checkpoint(folder, model=loaded.model, optimizer=optimizer, config=lora)


def test_a_run_that_a_deadline_of_vllm_ended_may_resume_with_a_longer_one_but_not_in_another_dtype():
    def config(**options: object) -> Config:
        return _config(rollout={"engine": "vllm", "vllm": options})

    saved = config(call_timeout_s=1.0, servers=1, kv_cache_gib=1.0).model_dump(mode="json")
    check_same_run(saved, config(call_timeout_s=600.0, start_timeout_s=900.0, servers=2, kv_cache_gib=8.0), Path("c"))
    with pytest.raises(CheckpointError, match=r"rollout\.vllm\.engine_dtype was None, is 'bfloat16'"):
        check_same_run(saved, config(servers=1, engine_dtype="bfloat16"), Path("c"))


def test_max_steps_is_fixed_when_the_schedule_depends_on_it():
    def config(kind: str, steps: int) -> Config:
        return _config(train={"lr_scheduler_type": kind, "max_steps": steps})

    check_same_run(config("constant", 5).model_dump(mode="json"), config("constant", 9), Path("c"))
    with pytest.raises(CheckpointError, match=r"train\.max_steps was 5, is 9"):
        check_same_run(config("cosine", 5).model_dump(mode="json"), config("cosine", 9), Path("c"))


def test_a_run_from_before_the_kl_had_a_ratio_goes_on_without_it_or_not_at_all():
    saved = _config(algorithm={"beta": 0.1, "mismatch_correction": "off"}).model_dump(mode="json")
    del saved["algorithm"]["use_bias_correction_kl"]
    check_same_run(saved, _config(algorithm={"beta": 0.1, "use_bias_correction_kl": False}), Path("c"))
    with pytest.raises(CheckpointError, match=r"algorithm\.use_bias_correction_kl was False, is True"):
        check_same_run(saved, _config(algorithm={"beta": 0.1}), Path("c"))
    for no_kl_in_the_loss in ({"beta": 0.0}, {"beta": 0.1, "kl_in_reward": True}):
        saved = _config(algorithm=no_kl_in_the_loss).model_dump(mode="json")
        del saved["algorithm"]["use_bias_correction_kl"]
        check_same_run(saved, _config(algorithm=no_kl_in_the_loss), Path("c"))


def test_options_newer_than_the_checkpoint_have_their_defaults():
    saved = _config().model_dump(mode="json")
    del saved["rollout"]["min_p"], saved["warm_start"]
    check_same_run(saved, _config(), Path("c"))
    with pytest.raises(CheckpointError, match=r"rollout\.min_p was None, is 0\.1"):
        check_same_run(saved, _config(rollout={"min_p": 0.1}), Path("c"))
    saved["rollout"]["gone"] = 1
    with pytest.raises(CheckpointError, match=r"does not know: .*'gone'"):
        check_same_run(saved, _config(), Path("c"))


def test_which_checkpoint_is_meant(saved, caplog):
    folder, _, _ = saved
    root = str(folder.parent)

    def resolve(**run: object) -> Path | None:
        return resolve_resume(_config(run=run).run)

    assert resolve(output_dir=root) is None
    assert resolve(output_dir=root, resume_from_checkpoint="auto") == folder
    assert resolve(output_dir=root, resume_from_checkpoint=str(folder)) == folder
    assert resolve(output_dir=root + "/new", resume_from_checkpoint="auto") is None
    assert "no complete checkpoint" in caplog.text
    with pytest.raises(
        CheckpointError, match=r"is nowhere, which is no folder; the newest complete one is .*checkpoint-2"
    ):
        resolve(output_dir=root, resume_from_checkpoint="nowhere")
