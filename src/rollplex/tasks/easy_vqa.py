"""easy-VQA: 5,000 real 64 px pictures of one shape each, with questions and one-word answers, from the PyPI wheel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from PIL import Image

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.tasks.task import RewardFunction
from rollplex.tasks.verify import exact_match
from rollplex.types import Example

_CACHED_IMAGES = 1024  # at 112 px about 40 MB


class EasyVqa:
    """Splits train (4,000 pictures, 38,575 questions) and test (1,000 pictures, 9,673 questions); column `answer`."""

    reward_funcs: Sequence[RewardFunction] = (exact_match,)

    def __init__(self, config: DataConfig, split: str, seed: int) -> None:
        try:
            import easy_vqa
        except ModuleNotFoundError as error:
            raise ConfigError(
                "data.task easy_vqa needs the package easy-vqa: pip install 'rollplex[easy-vqa]'"
            ) from error
        readers = {
            "train": (easy_vqa.get_train_questions, easy_vqa.get_train_image_paths),
            "test": (easy_vqa.get_test_questions, easy_vqa.get_test_image_paths),
        }
        if split not in readers:
            raise ConfigError(
                f"data.task easy_vqa has the splits train and test, found {split!r} (data.split, data.eval_split)"
            )
        questions, paths = readers[split]
        self._questions, self._answers, self._image_ids = questions()
        self._paths: dict[int, str] = paths()
        self._length = min(config.num_rows or len(self._questions), len(self._questions))
        side = config.image_size
        # One cache per task, so that a second task with another size cannot evict this one's pictures.
        self._picture = lru_cache(maxsize=_CACHED_IMAGES)(lambda image_id: _load(self._paths[image_id], side))

    def __len__(self) -> int:
        return self._length

    def example(self, index: int) -> Example:
        """Question `index` with its picture resized to data.image_size (bicubic)."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        parts = [{"type": "image"}, {"type": "text", "text": self._questions[index]}]
        # A copy: a reward function that draws on the picture must not change later prompts.
        picture = self._picture(self._image_ids[index]).copy()
        columns = {"answer": self._answers[index]}
        return Example(index, [{"role": "user", "content": parts}], (picture,), (), columns)

    def texts(self) -> Iterator[str]:
        """Questions and answers as often as they occur, so that a small vocabulary has whole answer words."""
        for question, answer in zip(self._questions, self._answers, strict=True):
            yield question
            yield answer


def _load(path: str, side: int) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
