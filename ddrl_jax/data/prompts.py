"""Lists of prompts from files: JSON lines, CSV or plain text.

Knows text only: it checks that a conditioning picture is there and leaves reading it to `data.video`. Errors are
ValueErrors of one line that begin with FILE:LINE.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINE = 65_536  # bytes; the text encoder reads 512 tokens at most


@dataclass(frozen=True)
class Prompt:
    """What to generate.

    Attributes:
      name: unique in its file and fit for a file name; the row's number ("00000") where the file gives none.
      caption: text, not empty.
      image: a picture to begin with; None for text alone.
    """

    name: str
    caption: str
    image: Path | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file, in order.

    The ending says what it is, always in UTF-8, with lines of at most `MAX_LINE` bytes:
      .jsonl: an object a line with "caption" (or "prompt"), and optionally "image" and "name"; other keys are ignored.
      .csv: a header with the same names; other columns are ignored.
      .txt: a caption a line.
    Empty lines do not count. "image" is a path, relative to the file's folder.

    Raises:
      ValueError: a file that cannot be read or has no prompts, a row that is not right, a missing picture, a name
        that occurs twice or is no file name.
    """
    file = Path(path)
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".txt": _text_rows}
    if file.suffix.lower() not in readers:
        raise ValueError(f"{file}: must end in {', '.join(readers)}")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    try:
        for number, row in readers[file.suffix.lower()](file):
            prompt = _prompt(file, number, row, len(prompts))
            if prompt.name in lines:
                raise ValueError(f"{file}:{number}: name {prompt.name!r} is that of line {lines[prompt.name]} too")
            lines[prompt.name] = number
            prompts.append(prompt)
    except OSError as e:
        raise ValueError(f"{file}: cannot be read: {e.strerror}") from e
    if not prompts:
        raise ValueError(f"{file}: has no prompts")
    return prompts


def _prompt(file: Path, number: int, row: dict[str, Any], position: int) -> Prompt:
    where = f"{file}:{number}"
    fields = {}
    for key in ("caption", "prompt", "image", "name"):
        value = row.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: {key} must be text, not {value!r:.40}")
        if value and value.strip():
            fields[key] = value.strip()
    if ("caption" in fields) == ("prompt" in fields):
        raise ValueError(f"{where}: must have one of caption and prompt, not empty")
    name = fields.get("name", f"{position:05d}")
    if name.startswith(".") or any(c in '/\\:*?"<>|' or not c.isprintable() for c in name) or len(name) > 200:
        raise ValueError(f"{where}: name {name!r:.60} cannot be the name of a file")
    image = file.parent / fields["image"] if "image" in fields else None
    if image is not None and not image.is_file():
        raise ValueError(f"{where}: image {fields['image']!r} is not a file in {file.parent}")
    return Prompt(name, fields.get("caption") or fields["prompt"], image)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its line end)."""
    with file.open("rb") as f:
        for number, line in enumerate(iter(lambda: f.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{file}:{number}: is longer than {MAX_LINE} bytes")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as e:
                raise ValueError(f"{file}:{number}: is not UTF-8") from e


def _text_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(file):
        if line.strip():
            yield number, {"caption": line}


def _json_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as e:
            raise ValueError(f"{file}:{number}: is not JSON: {getattr(e, 'msg', e)}") from e
        if not isinstance(row, dict):
            raise ValueError(f"{file}:{number}: must be a JSON object")
        yield number, row


def _csv_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    texts: Iterable[str] = (line for _, line in _lines(file))
    reader = csv.reader(texts, strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in row]
                if "caption" not in header and "prompt" not in header:
                    raise ValueError(f"{file}:{reader.line_num}: the header must name a column caption or prompt")
                if len(set(header)) < len(header):
                    raise ValueError(f"{file}:{reader.line_num}: the header names a column twice")
            elif len(row) != len(header):
                raise ValueError(f"{file}:{reader.line_num}: has {len(row)} cells, the header has {len(header)}")
            else:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as e:
        raise ValueError(f"{file}:{reader.line_num}: is not CSV: {e}") from e
