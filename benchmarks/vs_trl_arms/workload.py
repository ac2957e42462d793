"""The model folder and the rows that both arms read, built from a fixed seed into a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from PIL.Image import Image

from rollplex.config import BuildConfig, DataConfig
from rollplex.models.build import build_model, build_processor
from rollplex.tasks.task import Task, build_task
from vs_trl_arms.settings import Setting

SEED = 0
NUM_ROWS = 64  # 16 steps of 4 prompts before a row comes again
BUILD = BuildConfig(
    family="qwen2_5_vl",
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
    vision_depth=2,
    vision_hidden_size=32,
)
# An id that both products ban in sampling: TRL and Rollplex each suppress the image placeholder by themselves.
NEVER_SAMPLED = "<|image_pad|>"


def counting_task(setting: Setting, num_rows: int = NUM_ROWS) -> Task:
    """The counting task at the setting's picture count and size."""
    config = DataConfig(
        task="counting", num_rows=num_rows, num_images=setting.images, image_size=setting.image_size, shuffle=False
    )
    return build_task(config, "train", SEED)


def save_model(setting: Setting, folder: Path) -> None:
    """A random model whose responses never end early, saved in Hugging Face format.

    Its end-of-text id is NEVER_SAMPLED, in the tokenizer, the model and the generation config alike: the stop check
    runs as always in both arms and never fires, and neither arm gets an extra logits processor.
    """
    processor = build_processor(BUILD.family, counting_task(setting).texts(), BUILD.vocab_size)
    model = build_model(BUILD, processor, seed=SEED)
    processor.tokenizer.eos_token = NEVER_SAMPLED
    end = processor.tokenizer.convert_tokens_to_ids(NEVER_SAMPLED)
    model.config.text_config.eos_token_id = end
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_rows(task: Task, folder: Path) -> None:
    """The task's rows in TRL's shape: chat with plain text, pictures in `images`, the answer in `answer`."""
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    datasets.Dataset.from_list(list(_rows(task)), features=features).save_to_disk(str(folder))


def _rows(task: Task) -> Iterator[dict[str, Any]]:
    for index in range(len(task)):
        example = task.example(index)
        images: tuple[Image, ...] = example.images
        yield {
            "prompt": [{"role": "user", "content": _question(example.prompt)}],
            "images": list(images),
            "answer": str(example.columns["answer"]),
        }


def _question(prompt: list[dict[str, Any]] | str) -> str:
    """The text of a one-turn chat; the pictures go back in front of it in both arms."""
    if isinstance(prompt, str):
        return prompt
    return "".join(part["text"] for message in prompt for part in message["content"] if part["type"] == "text")
