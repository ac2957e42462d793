"""TRL-shaped rows into Examples: structured or plain chats, media in every accepted form, all checks naming the row.

A row is a mapping with `prompt` (chat messages, or a plain string for text only), optionally `images` (list) or
`image` (one), `videos` (list) or `video` (one); every further column goes to the reward functions untouched.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from rollplex.errors import MediaError, RowError
from rollplex.types import Example, VideoClip
from rollplex.vision.video import clip_from_frames, decode_video

MEDIA_COLUMNS = {"image": ("image", "images"), "video": ("video", "videos")}  # kind: (one, list)
ROLES = ("system", "user", "assistant", "tool")
_VERL_TAG = re.compile(r"(<image>|<video>)")


def example_from_row(
    index: int, row: Mapping[str, Any], *, video_fps: float, max_frames: int, base_dir: Path | None = None
) -> Example:
    """Turn one row into an Example with all media decoded (RGB), in the order of their columns.

    `index` is the row number that every error names; relative media paths are resolved against `base_dir` (absent:
    the working directory). Raises RowError, or its subclass MediaError when an image or video cannot be read.
    """
    where = f"row {index}"
    if row.get("prompt") is None:
        raise RowError(f"{where}: no column 'prompt', found {sorted(row)}")
    images = tuple(
        _image(value, f"{where}: images[{i}]", base_dir) for i, value in enumerate(_media(row, "image", where))
    )
    videos = tuple(
        _video(value, f"{where}: videos[{i}]", base_dir, video_fps, max_frames)
        for i, value in enumerate(_media(row, "video", where))
    )
    prompt = _prompt(row["prompt"], len(images), len(videos), where)
    taken = {"prompt", *(name for names in MEDIA_COLUMNS.values() for name in names)}
    return Example(index, prompt, images, videos, {key: row[key] for key in row if key not in taken})


def row_from_verl(index: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt a verl row to TRL's shape: <image>/<video> tags become parts, reward_model.ground_truth two columns.

    The ground truth is given as `ground_truth` and, unless the row has one, `solution`. All other columns stay.
    Raises RowError for a row that is not verl's.
    """
    where = f"row {index}"
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise RowError(f"{where}: a verl row needs reward_model['ground_truth'], found {reward_model!r}")
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        raise RowError(f"{where}: a verl row needs a list of messages as 'prompt', found {type(prompt).__name__}")
    truth = reward_model["ground_truth"]
    return {"solution": truth, **row, "ground_truth": truth, "prompt": [_split_tags(m, where) for m in prompt]}


def _split_tags(message: Any, where: str) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise RowError(f"{where}: verl messages have string content with <image>/<video> tags, found {message!r}")
    pieces = [piece for piece in _VERL_TAG.split(message["content"]) if piece]
    if not any(_VERL_TAG.fullmatch(piece) for piece in pieces):
        return message
    parts = [
        {"type": piece[1:-1]} if _VERL_TAG.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces
    ]
    return {**message, "content": parts}


def _media(row: Mapping[str, Any], kind: str, where: str) -> Sequence[Any]:
    """The media values of one kind, in order; [] when the columns are absent or null."""
    one, many = MEDIA_COLUMNS[kind]
    single, several = row.get(one), row.get(many)
    if single is not None and several is not None:
        raise RowError(f"{where}: has both columns {one!r} and {many!r}, needed one of them")
    if single is not None:
        return [single]
    if several is None:
        return []
    if not isinstance(several, (list, tuple)):
        raise RowError(
            f"{where}: column {many!r} must be a list, found {type(several).__name__}; "
            f"a single {kind} goes into column {one!r}"
        )
    return several


def _prompt(prompt: Any, num_images: int, num_videos: int, where: str) -> list[dict[str, Any]] | str:
    if isinstance(prompt, str):
        if not prompt:
            raise RowError(f"{where}: column 'prompt' is an empty string")
        if num_images or num_videos:
            raise RowError(
                f"{where}: a plain string prompt is text only, found {num_images} images and {num_videos} videos; "
                "write the prompt as a list of chat messages"
            )
        return prompt
    if not isinstance(prompt, (list, tuple)):
        raise RowError(f"{where}: column 'prompt' must be chat messages or a string, found {type(prompt).__name__}")
    if not prompt:
        raise RowError(f"{where}: column 'prompt' is an empty chat, needed at least one message")
    messages = [_message(message, i, where) for i, message in enumerate(prompt)]
    has_media = bool(num_images or num_videos)
    if all(isinstance(message.get("content"), str | None) for message in messages):
        if not has_media:
            return messages
        _insert_placeholders(messages, num_images, num_videos, where)
    messages = [_structured(message) for message in messages]
    for kind, count in (("image", num_images), ("video", num_videos)):
        found = sum(part["type"] == kind for message in messages for part in message.get("content", ()))
        if found != count:
            raise RowError(
                f"{where}: the prompt has {found} {kind} placeholders but the row has {count} {kind}s; "
                f'needed one {{"type": "{kind}"}} part per {kind}, in order'
            )
    return messages


def _message(message: Any, position: int, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError(
            f"{where}: prompt[{position}] must be a message with 'role' and 'content', found {message!r:.80}"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RowError(f"{where}: prompt[{position}] has role {role!r}, needed one of {', '.join(ROLES)}")
    # Columns of Arrow tables carry every key of every row, as nulls: templates must not see those.
    out = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, (list, tuple)):
        parts = [_part(part, f"{where}: prompt[{position}].content[{i}]") for i, part in enumerate(content)]
        out["content"] = parts
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RowError(
            f"{where}: prompt[{position}] needs 'content' as a string or list of parts, found {type(content).__name__}"
        )
    return out


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RowError(f"{where}: a text part needs 'text' as a string, found {part.get('text')!r:.80}")
        return {"type": "text", "text": part["text"]}
    if isinstance(kind, str) and kind in MEDIA_COLUMNS:
        extra = sorted(key for key, value in part.items() if key != "type" and value is not None)
        if extra:
            raise RowError(
                f"{where}: the {kind} part carries {extra}; media go into the column {MEDIA_COLUMNS[kind][1]!r}, "
                f'the part is just {{"type": "{kind}"}}'
            )
        return {"type": kind}
    raise RowError(f"{where}: a part has 'type' text, image or video, found {part!r:.80}")


def _insert_placeholders(messages: list[dict[str, Any]], num_images: int, num_videos: int, where: str) -> None:
    """As TRL: media of a plain chat stand before the text of the first user turn (images first, then videos)."""
    for message in messages:
        if message["role"] == "user":
            media = [{"type": "image"}] * num_images + [{"type": "video"}] * num_videos
            message["content"] = [*media, {"type": "text", "text": message["content"]}]
            return
    raise RowError(f"{where}: the row has media but the chat has no user message to put them in")


def _structured(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return message


def _image(value: Any, where: str, base_dir: Path | None) -> Image.Image:
    try:
        if isinstance(value, Image.Image):
            image = value
        elif isinstance(value, np.ndarray):
            image = _image_from_array(value, where)
        else:
            source = _bytes_or_path(value, where, base_dir, "a PIL image, an array, a path, bytes or {'bytes', 'path'}")
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as stored:
                image = ImageOps.exif_transpose(stored)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow clips such values at 255: most of the picture would silently become white.
            raise MediaError(f"{where}: pixel mode {image.mode} is not 8 bits a channel; convert the image first")
        return image.convert("RGB")
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise MediaError(f"{where}: the image cannot be read ({error})") from error


def _image_from_array(array: np.ndarray, where: str) -> Image.Image:
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))
    if array.dtype != np.uint8 or not shaped or 0 in array.shape:
        raise MediaError(
            f"{where}: an image array must be uint8 (height, width) or (height, width, 3 or 4), "
            f"found {array.dtype} {array.shape}"
        )
    return Image.fromarray(array)


def _video(value: Any, where: str, base_dir: Path | None, video_fps: float, max_frames: int) -> VideoClip:
    fps = None
    if isinstance(value, Mapping) and "frames" in value:
        fps, value = value.get("fps"), value["frames"]
    if isinstance(value, np.ndarray):
        frames: Any = value
    elif isinstance(value, (list, tuple)):
        # Frames may come in every form an image may; arrays stay as they are.
        frames = [v if isinstance(v, np.ndarray) else _image(v, f"{where}[{i}]", base_dir) for i, v in enumerate(value)]
    else:
        accepted = "a path, bytes, {'bytes', 'path'}, frames, or {'frames', 'fps'}"
        source = _bytes_or_path(value, where, base_dir, accepted)
        return decode_video(source, where=where, video_fps=video_fps, max_frames=max_frames)
    return clip_from_frames(frames, where=where, source=where, fps=fps, video_fps=video_fps, max_frames=max_frames)


def _bytes_or_path(value: Any, where: str, base_dir: Path | None, accepted: str) -> bytes | Path:
    if isinstance(value, Mapping):
        # `datasets` stores undecoded media so; the path may be a bare file name when the bytes are inside.
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, (str, Path)):
        raise MediaError(f"{where}: found {type(value).__name__}, needed {accepted}")
    text = str(value).removeprefix("file://")
    if "://" in text:
        raise MediaError(f"{where}: {text!r:.120} is an address; nothing is downloaded at run time, store the file")
    path = Path(text)
    if base_dir is not None and not path.is_absolute():
        path = base_dir / path
    if not path.is_file():
        raise MediaError(f"{where}: the file {path} does not exist")
    return path
