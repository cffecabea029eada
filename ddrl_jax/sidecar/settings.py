"""What `serve` is told: a TOML file (`--config`), and the flags, which override it. Needs pydantic and the standard
library only; every mistake is a ValueError of one line that names the setting, its value and what would be right."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_OPTIONS = ("weights", "device", "dtype", "batch_size", "env", "timeout_s")


def parse_scorer(text: str) -> dict[str, str]:
    """`--scorer`: `NAME` or `FILE.py:Class`, then options: `clip_score,device=cuda:1,dtype=bfloat16,batch_size=4`.

    A value may hold "," and "=", but not the beginning of another option, as ",env=".
    """
    name, *parts = re.split(rf",(?=(?:{'|'.join(_OPTIONS)})=)", text)
    if "," in name and ".py:" not in name:
        raise ValueError(f"{name.partition(',')[2]!r} is no option of a scorer; it has {', '.join(_OPTIONS)}")
    return {"name": name, **dict(part.split("=", 1) for part in parts)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScorerSettings(_Strict):
    """One scorer: what it is called, where it runs. An empty text is the server's own setting."""

    name: str = Field(min_length=1)  # of a built-in one, or FILE.py:Class
    weights: str = ""
    device: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = Field(0, ge=0)  # 0: the scorer's own
    # Folder of an environment of its own, in whose interpreter it then runs; "own": the one that `sidecar build` makes.
    env: str = ""
    timeout_s: float = Field(600.0, gt=0)  # of one batch in an environment of its own; then it is started again


def _scorer(value: Any) -> Any:
    return parse_scorer(value) if isinstance(value, str) else value


class Settings(_Strict):
    """All of `serve`. Names are those of the flags, with "_" for "-"."""

    scorer: list[Annotated[ScorerSettings, BeforeValidator(_scorer)]] = []
    weights: str = ""
    codec: str = "identity"
    device: str = "cpu"
    threads: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = 0
    token_env: str = ""
    ready_file: str = ""
    replica_id: str = ""
    parent_pid: int = Field(0, ge=0)
    grace: float = Field(30.0, ge=0)
    queue: str = "embedded"
    dead_seconds: float = Field(15.0, gt=0)
    queue_size: int = Field(64, ge=1)
    max_body_mib: int = Field(1024, ge=1)
    log_prompts: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    text_encoder: str = ""
    text_tokenizer: str = ""
    text_length: int = 512
    text_strategy: str = "full_concat"
    text_dtype: str = "bfloat16"


def read(config: str, flags: dict[str, Any]) -> Settings:
    """The file's settings (config "": none) with the flags' over them. Raises ValueError in one line."""
    values: dict[str, Any] = {}
    if config:
        try:
            values = tomllib.loads(Path(config).read_text())
        except OSError as error:
            raise ValueError(f"config: {config!r} cannot be read ({error.strerror})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {config!r} is no TOML: {error}") from None
        _validate(values, f"{config}: ")  # so that a flag does not hide the file's mistake
    return _validate({**values, **flags}, "")


def _validate(values: dict[str, Any], where: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        name = ".".join([path[0].replace("_", "-"), *path[1:]])
        if first["type"] == "extra_forbidden":
            fields = ScorerSettings.model_fields if len(path) > 1 else Settings.model_fields
            near = difflib.get_close_matches(path[-1], fields, 1)
            told = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            raise ValueError(f"{where}{name}: no such setting; {told}") from None
        limit = first.get("ctx", {}).get("ge")
        told = first["msg"].removeprefix("Value error, ")
        told = f"must be at least {limit:g}" if limit is not None else told[0].lower() + told[1:]
        value = "" if first["type"] in ("missing", "value_error") else f"{first['input']!r}; "
        raise ValueError(f"{where}{name}: {value}{told}") from None


def scorer_list(specs: list[str]) -> list[ScorerSettings]:
    """The scorers of repeated `--scorer`. Raises ValueError in one line."""
    return _validate({"scorer": specs}, "").scorer
