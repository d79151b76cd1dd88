"""Settings of one cluster: a file, then `--set KEY=VALUE`, then flags; the last one wins.

Theory of operation
-------------------
`Settings` gathers all that the processes of a cluster share; its leaves have dotted names
(`timing.lost_after_s`), which are the keys of the file, of `--set`, and of the flags that
abbreviate them. Every value is checked on its own, at the place where it was given, so that an
error can name file or flag, key, and remedy. What is put together from checked values needs no
second message.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from epd.cli.parser import parse_nbytes, suggestion
from epd.config import (
    CHECKSUMS,
    TRANSPORTS,
    ConfigError,
    DecodeConfig,
    EncodeConfig,
    EngineConfig,
    GatewayConfig,
    InstanceConfig,
    Limits,
    PrefillConfig,
    Timing,
)

MAY_BE_ZERO = frozenset(
    {
        "port",
        "prefill.slot_nbytes",
        "engine.threads",
        "engine.max_itl_impact",
