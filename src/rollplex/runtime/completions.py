"""Sampled completions of one step with their pictures: JSONL for programs, a page for people."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from rollplex.types import Example, ScoredGroup, VideoClip

PICTURE_SIDE = 512  # pixels; larger pictures are scaled down
SHEET_FRAMES = 8  # frames of a video's contact sheet
_NAME = re.compile(r"step-(\d+)\.(jsonl|html)")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Step {step}</title>
<style>
 body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
 section {{ border-top: 1px solid #ccc; padding: 1rem 0; }}
 img {{ max-height: 14rem; max-width: 100%; margin-right: .5rem; border: 1px solid #ddd; }}
 pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.4 ui-monospace, monospace; }}
 table {{ border-collapse: collapse; width: 100%; }}
 td, th {{ border-bottom: 1px solid #eee; padding: .3rem .5rem; text-align: left; vertical-align: top; }}
 td.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
</style>
<h1>Completions of step {step}</h1>
{sections}
</html>
"""


def write_step(folder: Path, step: int, groups: Sequence[ScoredGroup], texts: Sequence[Sequence[str]]) -> Path:
    """Write step-N.jsonl (one line per response), step-N.html and the rows' pictures; returns the page's path."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    sections: list[str] = []
    for scored, group_texts in zip(groups, texts, strict=True):
        pictures = [path.relative_to(folder).as_posix() for path in _save_pictures(scored.group.example, folder)]
        entries = list(_entries(step, scored, group_texts, pictures))
        lines += (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        sections.append(_section(entries))
    (folder / f"step-{step}.jsonl").write_text("".join(lines), encoding="utf-8")
    page = folder / f"step-{step}.html"
    page.write_text(_PAGE.format(step=step, sections="\n".join(sections)), encoding="utf-8")
    return page


def drop_after(folder: Path, step: int) -> None:
    """Remove what later steps than `step` wrote; pictures stay, since rows do not change."""
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and int(match.group(1)) > step:
            path.unlink()


def prompt_text(example: Example) -> str:
    """The prompt as a person reads it, media as [image] and [video]."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(f"{message['role']}: {_content_text(message)}" for message in example.prompt)


def contact_sheet(clip: VideoClip) -> Image.Image:
    """Up to `SHEET_FRAMES` frames in order of time, from first to last, four to a row."""
    count = min(SHEET_FRAMES, len(clip.frames))
    chosen = [round(i * (len(clip.frames) - 1) / max(1, count - 1)) for i in range(count)]
    height, width = clip.frames.shape[1:3]
    columns = min(4, count)
    sheet = Image.new("RGB", (columns * width, math.ceil(count / columns) * height))
    for place, index in enumerate(chosen):
        sheet.paste(Image.fromarray(clip.frames[index]), (place % columns * width, place // columns * height))
    return sheet


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:  # a turn that only calls tools
        return json.dumps(message.get("tool_calls"), default=str)
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


def _save_pictures(example: Example, folder: Path) -> Iterator[Path]:
    """A PNG for each image and video of the row, named by row: rows do not change, so it is written once."""
    named = [(f"row-{example.index}-image-{i}.png", image) for i, image in enumerate(example.images)]
    for i, clip in enumerate(example.videos):
        named.append((f"row-{example.index}-video-{i}.png", contact_sheet(clip)))
    for name, picture in named:
        path = folder / "pictures" / name
        if not path.exists():
            small = picture.convert("RGB")
            small.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
            temporary = path.with_suffix(".writing")
            small.save(temporary, format="PNG")
            temporary.replace(path)
        yield path


def _entries(step: int, scored: ScoredGroup, texts: Sequence[str], pictures: Sequence[str]) -> Iterator[dict[str, Any]]:
    group = scored.group
    columns = {key: value for key, value in group.example.columns.items() if _is_plain(value)}
    for response, text in zip(group.responses, texts, strict=True):
        i = response.index
        yield {
            "step": step,
            "row": group.example.index,
            "rollout_id": group.rollout_id,
            "weight_version": group.weight_version,
            "index": i,
            "prompt": prompt_text(group.example),
            "pictures": list(pictures),
            "completion": text,
            "finish": response.finish.value,
            "num_tokens": len(response.token_ids),
            "reward": scored.rewards[i],
            "rewards": {name: part[i] for name, part in scored.reward_parts.items()},
            "advantage": scored.advantages[i],
            "columns": columns,
            "extras": {name: value[i] for name, value in scored.extras.items() if _is_plain(value[i])},
        }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _section(entries: Sequence[dict[str, Any]]) -> str:
    first = entries[0]
    images = "".join(f'<img src="{html.escape(path)}" alt="">' for path in first["pictures"])
    columns = "".join(
        f"<p><b>{html.escape(str(key))}</b>: {html.escape(str(value))}</p>" for key, value in first["columns"].items()
    )
    rows = "".join(
        f"<tr><td class=number>{_number(entry['reward'])}</td><td class=number>{_number(entry['advantage'])}</td>"
        f"<td class=number>{entry['num_tokens']}</td><td>{html.escape(entry['finish'])}</td>"
        f"<td><pre>{html.escape(entry['completion'])}</pre></td></tr>"
        for entry in entries
    )
    return (
        f"<section><h2>Row {first['row']}</h2>{images}<pre>{html.escape(first['prompt'])}</pre>{columns}"
        "<table><tr><th>reward<th>advantage<th>tokens<th>end<th>completion</tr>"
        f"{rows}</table></section>"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
