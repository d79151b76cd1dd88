"""Log lines on stderr: one line each, for people or, with `--log-json`, for programs."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping

from epd.roles.ports import Log
from epd.runtime import lines

NO_FIELDS: Mapping[str, object] = {}
_FIELDS = "epd_fields"
_WORD = re.compile(r"[^\s\"=]+")


class TextFormatter(logging.Formatter):
    """`12:00:01.250 warning e0 fault where=... error=...`; values with spaces are quoted."""

    def __init__(self, instance_id: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        parts = [
            f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}",
            record.levelname.lower(),
            self._instance_id,
            record.getMessage(),
            *(f"{name}={_one_word(value)}" for name, value in fields.items()),
        ]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _one_word(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class JsonFormatter(TextFormatter):
    """One object per line: at_s (wall-clock seconds), level, instance, logger, text, and fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        level, text = record.levelname.lower(), record.getMessage()
        return json_line(level, self._instance_id, record.name, text, fields, record.created)


def json_line(
    level: str,
    instance: str,
    logger: str,
    text: str,
    fields: Mapping[str, object] = NO_FIELDS,
    at_s: float | None = None,
) -> str:
    line = {
        "at_s": round(time.time() if at_s is None else at_s, 3),
        "level": level,
        "instance": instance,
        "logger": logger,
        "text": text,
        **fields,
    }
    return json.dumps(line, default=str)


class LinesHandler(logging.Handler):
    """Whoever logs is not held up by whoever reads (fault F69)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # arguments that do not fit: said, and not raised
            text = f"a log line of {record.name} cannot be written: {error!r}"
        lines.say(text)

    def note_lost(self, num_lost: int) -> str:
        text = "lines could not be written"
        record = logging.LogRecord("epd", logging.WARNING, "", 0, text, None, None)
        setattr(record, _FIELDS, {"lines": num_lost})
        return self.format(record)


def set_up_logging(instance_id: str, level: str, *, as_json: bool) -> None:
    """Send the log of this process to stderr (stdout is for answers); replaces what was there."""
    handler = LinesHandler()
    handler.setFormatter((JsonFormatter if as_json else TextFormatter)(instance_id))
    lines.tell_losses(handler.note_lost)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)  # a library's: for who develops, not for who operates
    logging.getLogger("py.warnings").setLevel("DEBUG" if level == "debug" else "ERROR")


class LoggingLog(Log):
    """The roles' port for log lines, bound to `logging`."""

    _logger = logging.getLogger("epd")

    def warning(self, text: str, **fields: object) -> None:
        self._logger.warning(text, extra={_FIELDS: fields})

    def info(self, text: str, **fields: object) -> None:
        self._logger.info(text, extra={_FIELDS: fields})
