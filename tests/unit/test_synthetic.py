"""Drawn tasks: what is drawn is what the answer says, and nothing depends on what was drawn before."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.tasks.synthetic import BACKGROUND, COLOURS, DIRECTIONS
from rollplex.tasks.task import Task, build_task
from rollplex.tasks.verify import exact_match, number_match, words_match

NAMES = ["counting", "colour_shape", "motion", "mixed"]


def task(name, split="train", seed=0, **options):
    return build_task(DataConfig(task=name, **options), split, seed)


def same(a, b):
    pictures = len(a.images) == len(b.images) and all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a.images, b.images, strict=True)
    )
    clips = len(a.videos) == len(b.videos) and all(
        np.array_equal(x.frames, y.frames) for x, y in zip(a.videos, b.videos, strict=True)
    )
    return pictures and clips and a.columns == b.columns and a.prompt == b.prompt


def foreground(array):
    return (np.asarray(array) != np.array(BACKGROUND)).any(-1)


@pytest.mark.parametrize("name", NAMES)
def test_examples_depend_on_seed_split_and_index_only(name):
    forward = [task(name).example(i) for i in range(8)]
    fresh = task(name)
    np.random.seed(3)  # the global generator must not matter
    backward = [fresh.example(i) for i in reversed(range(8))][::-1]
    assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
    assert not all(same(a, task(name, seed=1).example(i)) for i, a in enumerate(forward))
    assert not all(same(a, task(name, split="test").example(i)) for i, a in enumerate(forward))


@pytest.mark.parametrize("name", NAMES)
def test_tasks_keep_the_protocol(name):
    made = task(name, num_rows=5)
    assert isinstance(made, Task) and len(made) == 5 and made.reward_funcs
    with pytest.raises(IndexError):
        made.example(5)
    texts = set(made.texts())
    for i in range(5):
        example = made.example(i)
        assert example.columns["answer"] in texts
        assert all(p["text"] in texts for m in example.prompt for p in m["content"] if p["type"] == "text")


@pytest.mark.parametrize("num_images", [1, 3])
@pytest.mark.parametrize("side", [28, 112])
def test_counting_draws_as_many_shapes_as_the_answer(num_images, side):
    made = task("counting", num_images=num_images, image_size=side)
    answers = set()
    for i in range(60):
        example = made.example(i)
        assert len(example.images) == num_images and example.images[0].size == (side, side)
        # Shapes never touch, so connected regions are shapes (8-neighbourhood: thin corners at 28 px).
        counts = [ndimage.label(foreground(image), np.ones((3, 3)))[1] for image in example.images]
        if side == 112:
            assert sum(counts) == int(example.columns["answer"])
        answers.add(example.columns["answer"])
    assert answers == {"1", "2", "3", "4", "5", "6"}


def test_colour_shape_is_drawn_in_its_colour():
    made = task("colour_shape")
    for i in range(40):
        example = made.example(i)
        colour = example.columns["answer"].split()[0]
        pixels = np.asarray(example.images[0])[foreground(example.images[0])]
        assert (pixels == np.array(COLOURS[colour])).all()


def test_motion_moves_the_way_the_answer_says():
    made, seen = task("motion"), set()
    for i in range(40):
        example = made.example(i)
        frames = example.videos[0].frames
        centres = np.array([ndimage.center_of_mass(foreground(frame))[::-1] for frame in frames])
        step = centres[-1] - centres[0]
        wanted = np.array(DIRECTIONS[example.columns["answer"]])
        assert step @ wanted > 0.3 * 112 and abs(step @ wanted[::-1]) < 2
        border = foreground(frames)[:, [0, -1], :].any() or foreground(frames)[:, :, [0, -1]].any()
        assert not border  # the whole path stays inside
        seen.add(example.columns["answer"])
    assert seen == set(DIRECTIONS)


def test_motion_keeps_the_frame_limit_and_rate():
    clip = task("motion", max_frames=4, video_fps=1.0).example(0).videos[0]
    assert clip.frames.shape[0] == 4 and clip.fps == 1.0


def test_mixed_rows_cycle_through_all_kinds():
    made = task("mixed")
    kinds = [(len(made.example(i).images), len(made.example(i).videos)) for i in range(8)]
    assert kinds == [(1, 0), (2, 0), (0, 1), (0, 0)] * 2
    small, large = made.example(1).images
    assert small.size != large.size


def chat(text):
    return [{"role": "assistant", "content": text}]


def test_rewards_read_messages_and_strings():
    assert exact_match([chat(" Yes "), "yes", chat("no")], answer=["yes", "yes", None]) == [1.0, 1.0, None]
    assert number_match([chat("I see 3, no 4"), chat("four"), "4.0", "14"], answer=["4", "4", "4", "4"]) == [1, 0, 1, 0]
    assert words_match(
        ["red circle", "red square", "circle red", "red circle circle", ""], answer=["red circle"] * 5
    ) == [
        1.0,
        0.5,
        0.0,
        0.0,
        0.0,
    ]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    assert number_match([parts], answer=["4"], images=[[]], trainer_state=None) == [1.0]
    with pytest.raises(ValueError, match="shorter|longer"):
        exact_match(["a"], answer=["a", "b"])


@pytest.mark.parametrize("name", NAMES)
def test_right_and_wrong_completions_get_different_rewards(name):
    made = task(name)
    for i in range(4):
        answer = made.example(i).columns["answer"]
        assert made.reward_funcs[0]([chat(answer), chat("wrong")], answer=[answer] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("countin", "not a task; needed one of counting, colour_shape"),
        ("no_such_module_x:Task", "no module named 'no_such_module_x'"),
        ("rollplex.tasks.synthetic:Nothing", "has no 'Nothing'"),
        ("collections:OrderedDict", "cannot be made"),
        (":x", "not a task"),
    ],
)
def test_unknown_tasks_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        task(name)
