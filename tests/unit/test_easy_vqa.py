"""easy-VQA as a task."""

from __future__ import annotations

import pytest

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.tasks.task import build_task

easy_vqa = pytest.importorskip("easy_vqa")


def task(split="train", **options):
    return build_task(DataConfig(task="easy_vqa", **options), split, seed=0)


@pytest.mark.parametrize(("split", "read"), [("train", "get_train_questions"), ("test", "get_test_questions")])
def test_rows_are_the_package_rows(split, read):
    questions, answers, _ = getattr(easy_vqa, read)()
    made = task(split, image_size=56)
    assert len(made) == len(questions)
    for i in (0, 1, len(made) - 1):
        example = made.example(i)
        assert example.prompt[0]["content"] == [{"type": "image"}, {"type": "text", "text": questions[i]}]
        assert example.columns == {"answer": answers[i]}
        assert example.images[0].size == (56, 56) and example.images[0].mode == "RGB"


def test_splits_differ_and_unknown_ones_are_refused():
    assert task("train").example(0).prompt != task("test").example(0).prompt
    with pytest.raises(ConfigError, match="train and test, found 'validation'"):
        task("validation")


def test_pictures_are_cached_but_never_shared():
    made = task(num_rows=3)
    first = made.example(0).images[0]
    before = first.copy()
    first.paste((0, 0, 0), (0, 0, 50, 50))  # as a reward function might
    assert made.example(0).images[0].tobytes() == before.tobytes()


def test_texts_and_reward():
    made = task(num_rows=10)
    assert set(easy_vqa.get_answers()) <= set(made.texts())
    assert made.reward_funcs[0](["yes", "no"], answer=["yes", "yes"]) == [1.0, 0.0]
