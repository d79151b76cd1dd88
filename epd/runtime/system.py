"""The real clock, randomness and log behind the roles' ports."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Callable


class SystemClock:
    """Monotonic time of the machine; timers of the running loop."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, when_s - time.monotonic()), callback)


class SystemRandom:
    """The system's entropy; keys matter only in the simulator."""

    def __init__(self) -> None:
        self._source = random.SystemRandom()

    def uniform(self, *key: object) -> float:
        return self._source.random()

    def integer(self, *key: object) -> int:
        return self._source.getrandbits(63)


class RoleLog:
    """Roles' log lines, through `logging`, as text or as JSON lines."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"epd.{name}")

    def warning(self, text: str, **fields: object) -> None:
        self._logger.warning(text, extra={"fields": fields})

    def info(self, text: str, **fields: object) -> None:
        self._logger.info(text, extra={"fields": fields})


class _Formatter(logging.Formatter):
    def __init__(self, instance_id: str, *, as_json: bool) -> None:
        super().__init__()
        self._instance_id = instance_id
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._as_json:
            line = {
                "at_s": round(record.created, 6),
                "level": record.levelname.lower(),
                "instance": self._instance_id,
                "text": text,
                **{k: str(v) for k, v in fields.items()},
            }
            return json.dumps(line)
        tail = "".join(f" {key}={value}" for key, value in fields.items())
        return f"{stamp} {self._instance_id} {record.levelname.lower()}: {text}{tail}"


def set_up_logging(instance_id: str, level: str, *, as_json: bool) -> None:
    """One stream, stderr; stdout belongs to answers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(instance_id, as_json=as_json))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
