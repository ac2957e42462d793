"""Rows from each kind of storage, through the files task."""

from __future__ import annotations

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from rollplex.config import DataConfig
from rollplex.errors import ConfigError, MediaError, RowError
from rollplex.tasks.sources import JsonLines, open_source
from rollplex.tasks.task import build_task

CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


def picture(value):
    return Image.new("RGB", (16, 16), (value, 0, 0))


def png(value):
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def table(rows=3):
    features = datasets.Features(
        {
            "prompt": [
                {
                    "role": datasets.Value("string"),
                    "content": [{"type": datasets.Value("string"), "text": datasets.Value("string")}],
                }
            ],
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    data = [{"prompt": CHAT, "images": [picture(40 * i)], "answer": str(i)} for i in range(rows)]
    return datasets.Dataset.from_list(data, features=features)


def files_task(path, split="train", **options):
    return build_task(DataConfig(task="files", path=str(path), **options), split, seed=0)


def check(task, rows=3):
    assert len(task) == rows
    for i in range(rows):
        example = task.example(i)
        assert example.images[0].getpixel((0, 0)) == (40 * i, 0, 0)
        assert example.columns["answer"] == str(i)
        assert example.prompt == CHAT  # no null keys from Arrow


@pytest.mark.parametrize("kind", ["saved", "saved_dict", "parquet", "jsonl", "folder"])
def test_every_storage_gives_the_same_examples(kind, tmp_path):
    if kind == "saved":
        table().save_to_disk(tmp_path / "d")
        path = tmp_path / "d"
    elif kind == "saved_dict":
        datasets.DatasetDict(train=table(), test=table(1)).save_to_disk(tmp_path / "d")
        path = tmp_path / "d"
        check(files_task(path, "test"), rows=1)
    elif kind == "parquet":
        path = tmp_path / "d.parquet"
        table().to_parquet(path)
    else:
        path = tmp_path / "train.jsonl"
        lines = []
        for i in range(3):
            (tmp_path / f"{i}.png").write_bytes(png(40 * i))
            lines.append(json.dumps({"prompt": CHAT, "images": [f"{i}.png"], "answer": str(i)}))
        path.write_text("\n".join(lines) + "\n\n")
        if kind == "folder":
            path = str(tmp_path / "{split}.jsonl")
    check(files_task(path))


def test_jsonl_rows_keep_their_own_types(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "plain"}], "images": []}, {"prompt": CHAT, "images": [], "n": 3}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    lines = JsonLines(path)
    assert [lines.row(i) for i in range(len(lines))] == rows


def test_undecodable_picture_in_a_table_names_its_row(tmp_path):
    data = table(3)
    cut = data.cast_column("images", datasets.List(datasets.Image(decode=False)))
    cut = cut.map(
        lambda row, i: {"images": [{"bytes": png(0)[:40] if i == 1 else png(0), "path": None}]}, with_indices=True
    )
    cut.cast(data.features).save_to_disk(tmp_path / "d")
    task = files_task(tmp_path / "d")
    task.example(0)
    with pytest.raises(MediaError, match=r"^row 1: images\[0\]: the image cannot be read"):
        task.example(1)


def test_bad_json_names_its_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n[1]\n')
    task = files_task(path)
    assert task.example(0).prompt == "a"
    with pytest.raises(RowError, match="^row 1: not valid JSON"):
        task.example(1)
    with pytest.raises(RowError, match="^row 2: needed a JSON object .* found list"):
        task.example(2)


def test_sources_that_cannot_be_used(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    datasets.DatasetDict(train=table()).save_to_disk(tmp_path / "dict")
    table().save_to_disk(tmp_path / "lone")
    for path, split, message in [
        ("a.jsonl", "test", "holds the split 'train', but 'test' is asked for"),
        ("gone.jsonl", "train", "does not exist"),
        ("a.txt", "train", "must end in .jsonl, .json or .parquet"),
        ("empty.jsonl", "train", "has no rows"),
        ("dict", "test", "no split 'test', it has train"),
        ("lone", "test", "holds the split 'train'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            files_task(tmp_path / path, split)
    with pytest.raises(ConfigError, match="needs data.path"):
        build_task(DataConfig(task="files"), "train", 0)


def test_num_rows_takes_the_first(tmp_path):
    table().save_to_disk(tmp_path / "d")
    assert len(files_task(tmp_path / "d", num_rows=2)) == 2
    assert len(files_task(tmp_path / "d", num_rows=9)) == 3


def test_verl_rows_are_known_by_their_reward_model(tmp_path):
    (tmp_path / "x.png").write_bytes(png(9))
    row = {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [{"path": "x.png"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, "reward_model": {"ground_truth": "2"}}))
    example = files_task(tmp_path / "a.jsonl").example(0)
    assert example.prompt[0]["content"][0] == {"type": "image"} and example.columns["solution"] == "2"


def test_texts_cover_prompts_and_answers_without_decoding(tmp_path):
    row = {"prompt": CHAT, "images": ["gone.png"], "answer": "seven"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    texts = list(files_task(tmp_path / "a.jsonl").texts())
    assert {"What?", "seven"} <= set(texts) and "gone.png" not in texts


def test_video_column_of_a_table_stays_undecoded(tmp_path):
    features = datasets.Features({"prompt": datasets.Value("string"), "video": datasets.Video()})
    rows = [{"prompt": "x", "video": {"bytes": b"abc", "path": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "d")
    row = open_source(str(tmp_path / "d"), "train").rows.row(0)
    assert row["video"]["bytes"] == b"abc"


def test_class_labels_and_numbers_come_out_as_stored(tmp_path):
    data = datasets.Dataset.from_dict({"prompt": ["a"], "x": [1.5], "v": [[1, 2]]})
    data.save_to_disk(tmp_path / "d")
    row = open_source(str(tmp_path / "d"), "train").rows.row(0)
    assert row == {"prompt": "a", "x": 1.5, "v": [1, 2]}
    assert np.asarray(row["v"]).tolist() == [1, 2]


def test_plain_folders_and_hub_ids_go_through_load_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "d").mkdir()
    table().to_parquet(tmp_path / "d" / "train-00000.parquet")
    check(files_task(tmp_path / "d"))
    with pytest.raises(ConfigError, match="split 'test', cannot be loaded"):
        files_task(tmp_path / "d", "test")
    with pytest.raises(ConfigError, match="nobody/nothing, split 'train', cannot be loaded"):
        files_task("nobody/nothing")
