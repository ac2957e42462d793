"""Tasks drawn on the fly: pictures of coloured shapes and short videos, with an answer known by construction.

Every example depends on (task, seed, split, index) and on the picture options only, never on what was drawn before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from rollplex.config import DataConfig
from rollplex.tasks.task import RewardFunction
from rollplex.tasks.verify import exact_match, number_match, words_match
from rollplex.types import Example, VideoClip

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
    "purple": (150, 60, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "diamond")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
BACKGROUND = (245, 245, 245)
DEFAULT_ROWS = 10_000
MOST_SHAPES = 6  # the counting task's largest answer
_CELLS = 3  # pictures are a 3 x 3 board of cells, one shape a cell at most: shapes never overlap
_MOTION_FRAMES = 8


class Synthetic:
    """Base of the drawn tasks: length, randomness, range check."""

    reward_funcs: Sequence[RewardFunction] = ()

    def __init__(self, config: DataConfig, split: str, seed: int) -> None:
        self._config = config
        self._length = config.num_rows or DEFAULT_ROWS
        self._key = (seed, zlib.crc32(type(self).__name__.encode()), zlib.crc32(split.encode()))

    def __len__(self) -> int:
        return self._length

    def _rng(self, index: int) -> np.random.Generator:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of a task with {self._length} rows")
        return np.random.default_rng((*self._key, index))


class Counting(Synthetic):
    """How many shapes are there, over all `data.num_images` pictures? Answer: a number from 1 to 6."""

    reward_funcs = (number_match,)

    def example(self, index: int) -> Example:
        """Row `index`; column `answer` is the number."""
        rng = self._rng(index)
        images, total = _counting_images(rng, [self._config.image_size] * self._config.num_images)
        return Example(
            index, _chat(_counting_question(len(images)), images=len(images)), images, (), {"answer": str(total)}
        )

    def texts(self) -> Iterator[str]:
        """The question and all answers."""
        yield _counting_question(self._config.num_images)
        yield from (str(n) for n in range(1, MOST_SHAPES + 1))


class ColourShape(Synthetic):
    """Name the colour and the shape of the one figure. Answer: "red circle"; each right word counts half."""

    reward_funcs = (words_match,)
    QUESTION: ClassVar[str] = "What is in the image? Answer with its colour and its shape."

    def example(self, index: int) -> Example:
        """Row `index`; column `answer` is "<colour> <shape>"."""
        rng = self._rng(index)
        image, answer = _one_shape(rng, self._config.image_size)
        return Example(index, _chat(self.QUESTION, images=1), (image,), (), {"answer": answer})

    def texts(self) -> Iterator[str]:
        """The question and all answers."""
        yield self.QUESTION
        yield from (f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


class Motion(Synthetic):
    """Which way does the shape move in the short video? Answer: left, right, up or down."""

    reward_funcs = (exact_match,)
    QUESTION: ClassVar[str] = "Which way does the shape move: left, right, up or down?"

    def example(self, index: int) -> Example:
        """Row `index`; column `answer` is the direction."""
        rng = self._rng(index)
        clip, answer = _motion_clip(rng, self._config, index)
        return Example(index, _chat(self.QUESTION, videos=1), (), (clip,), {"answer": answer})

    def texts(self) -> Iterator[str]:
        """The question and all answers."""
        yield self.QUESTION
        yield from DIRECTIONS


class Mixed(Synthetic):
    """Rows in turn: one image, two images of different size, a video, text only. For `rollplex verify` and tests."""

    reward_funcs = (exact_match,)

    def example(self, index: int) -> Example:
        """Row `index`; its kind is index modulo 4."""
        rng, config = self._rng(index), self._config
        images: tuple[Image.Image, ...] = ()
        videos: tuple[VideoClip, ...] = ()
        match index % 4:
            case 0:
                image, answer = _one_shape(rng, config.image_size)
                images, question = (image,), ColourShape.QUESTION
            case 1:
                images, total = _counting_images(rng, [config.image_size, config.image_size * 3 // 2])
                question, answer = _counting_question(2), str(total)
            case 2:
                clip, answer = _motion_clip(rng, config, index)
                videos, question = (clip,), Motion.QUESTION
            case _:
                left, right = (int(n) for n in rng.integers(0, 5, size=2))
                question, answer = f"What is {left} plus {right}?", str(left + right)
        prompt = _chat(question, images=len(images), videos=len(videos))
        return Example(index, prompt, images, videos, {"answer": answer})

    def texts(self) -> Iterator[str]:
        """The questions and answers of all four kinds."""
        yield from ColourShape.texts(ColourShape(self._config, "", 0))
        yield _counting_question(2)
        yield from Motion.texts(Motion(self._config, "", 0))
        for left in range(5):
            for right in range(5):
                yield f"What is {left} plus {right}?"
                yield str(left + right)


def _chat(question: str, *, images: int = 0, videos: int = 0) -> list[dict[str, Any]]:
    media = [{"type": "image"} for _ in range(images)] + [{"type": "video"} for _ in range(videos)]
    return [{"role": "user", "content": [*media, {"type": "text", "text": question}]}]


def _counting_question(num_images: int) -> str:
    return "How many shapes are in the image?" if num_images == 1 else "How many shapes are in the images together?"


def _counting_images(rng: np.random.Generator, sides: Sequence[int]) -> tuple[tuple[Image.Image, ...], int]:
    """One board per side length with 1 to 6 shapes in all, and their number."""
    total = int(rng.integers(1, MOST_SHAPES + 1))
    shares = np.bincount(rng.integers(0, len(sides), size=total), minlength=len(sides))
    return tuple(_board(rng, side, int(share)) for side, share in zip(sides, shares, strict=True)), total


def _board(rng: np.random.Generator, side: int, count: int) -> Image.Image:
    image = Image.new("RGB", (side, side), BACKGROUND)
    draw = ImageDraw.Draw(image)
    cell = side / _CELLS
    for spot in rng.permutation(_CELLS * _CELLS)[:count]:
        radius = cell * rng.uniform(0.28, 0.42)
        slack = max(0.0, cell / 2 - radius - 1)  # a pixel on each side, or neighbours could touch
        x = (spot % _CELLS + 0.5) * cell + rng.uniform(-slack, slack)
        y = (spot // _CELLS + 0.5) * cell + rng.uniform(-slack, slack)
        _draw(draw, _pick(rng, SHAPES), COLOURS[_pick(rng, tuple(COLOURS))], x=x, y=y, radius=radius)
    return image


def _one_shape(rng: np.random.Generator, side: int) -> tuple[Image.Image, str]:
    colour, shape = _pick(rng, tuple(COLOURS)), _pick(rng, SHAPES)
    image = Image.new("RGB", (side, side), BACKGROUND)
    radius = side * rng.uniform(0.2, 0.35)
    x, y = rng.uniform(radius, side - radius, size=2)
    _draw(ImageDraw.Draw(image), shape, COLOURS[colour], x=float(x), y=float(y), radius=radius)
    return image, f"{colour} {shape}"


def _motion_clip(rng: np.random.Generator, config: DataConfig, index: int) -> tuple[VideoClip, str]:
    side, count = config.image_size, min(_MOTION_FRAMES, config.max_frames)
    direction = _pick(rng, tuple(DIRECTIONS))
    shape, colour = _pick(rng, SHAPES), COLOURS[_pick(rng, tuple(COLOURS))]
    radius = side * rng.uniform(0.12, 0.18)
    travel = side * rng.uniform(0.35, 0.55)
    dx, dy = DIRECTIONS[direction]
    # The path's middle is drawn so that the whole path stays in the picture.
    reach = radius + 1.5 + np.abs([dx, dy]) * travel / 2
    middle = rng.uniform(reach, side - reach)
    frames = []
    for step in range(count):
        x, y = middle + np.array([dx, dy]) * travel * (step / (count - 1) - 0.5)
        frame = Image.new("RGB", (side, side), BACKGROUND)
        _draw(ImageDraw.Draw(frame), shape, colour, x=float(x), y=float(y), radius=radius)
        frames.append(np.asarray(frame))
    name = f"row {index}: drawn video"
    return VideoClip(np.stack(frames), config.video_fps, tuple(range(count)), count, name, config.video_fps), direction


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _draw(
    draw: ImageDraw.ImageDraw, shape: str, colour: tuple[int, int, int], *, x: float, y: float, radius: float
) -> None:
    """One filled figure that fits the circle of `radius` around (x, y)."""
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        half = radius * 0.8
        draw.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)], fill=colour)
    else:
        draw.polygon([(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)], fill=colour)
