"""Structured logs: one JSON object a line on stderr, for whatever collects them. No prompt is in them unless asked for.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "ddrl_jax.sidecar", "message": "...", ...}

What a log call gives as `extra` becomes a field. Prompts are only ever given as `extra={"prompts": [...]}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """One record, one line. `prompts` False drops the field of that name."""

    def __init__(self, prompts: bool = False):
        super().__init__()
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {k: v for k, v in vars(record).items() if k not in _OWN and (self._prompts or k != "prompts")}
        if record.exc_info:
            # Where, not what: an exception's text may quote a prompt.
            kind, _, trace = record.exc_info
            fields["error"] = kind.__name__ if kind else ""
            frames = []
            while trace is not None:
                code = trace.tb_frame.f_code
                frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
                trace = trace.tb_next
            fields["trace"] = frames
        return json.dumps(fields, default=str)


def start(level: str = "info", prompts: bool = False) -> None:
    """Sends all logs of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(prompts))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
