"""Flags that several verbs share, and what they become.

A flag whose `dest` is the key of a setting (`engine.device`) abbreviates that setting: it is
checked and applied where all settings are, in `epd.cli.settings`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from epd.cli.parser import UsageError, one_of, parse_nbytes

if TYPE_CHECKING:
    from epd.cli.plan import LogOptions, Placing
    from epd.cli.question import Sampling
    from epd.cli.settings import Settings


def size(text: str) -> int:
    """An argument type: bytes, with or without a unit."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_chat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name", "--model-name", dest="model_names", nargs="+", metavar="NAME",
        help="its name in the API; further ones are taken in requests, too",
    )  # fmt: skip
    group.add_argument(
        "--chat-template", metavar="FILE", help="jinja template, instead of the model's own"
    )
    group.add_argument(
        "--reasoning-parser", metavar="NAME",
        help="qwen3: what stands between <think> and </think> is told apart from the answer",
    )  # fmt: skip


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and device")
    group.add_argument(
        "--model", dest="model_dir", metavar="MODEL",
        help="checkpoint directory (safetensors, tokenizer.json), or ORG/NAME of the Hugging Face "
        "hub, if it is in its cache here; default: the bundled tiny model",
    )  # fmt: skip
    _add_chat_flags(group)
    group.add_argument(
        "--device",
        dest="engine.device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1; or cuda:0,cuda:1 to give each instance of a topology the next",
    )
    group.add_argument(
        "--dtype", dest="engine.dtype", metavar="DTYPE",
        help="float32, bfloat16 or float16 (fp32, bf16, fp16); a GPU's default is bfloat16",
    )  # fmt: skip
    group.add_argument(
        "--load-format", dest="engine.load_format", metavar="FORMAT",
        help="auto, or dummy: random weights, of a directory without any",
    )  # fmt: skip
    group.add_argument(
        "--allow-unused-tensors", dest="engine.allow_unused_tensors", action="store_true",
        default=None, help="load a checkpoint that has more tensors than config.json has places "
        "for, such as more layers",
    )  # fmt: skip
    group.add_argument(
        "--threads", dest="engine.threads", type=int, metavar="N",
        help="CPU threads per process; default: a share of the cores",
    )  # fmt: skip
    group.add_argument(
        "--cpus-per-instance", type=int, metavar="N",
        help="CPUs of its own for each instance; the gateway gets the rest. Default 0: shared",
    )  # fmt: skip
    group.add_argument(
        "--cpu-affinity", dest="engine.cpu_affinity", metavar="CPUS",
        help="such as 0-3,8; or 0-3|4-7 to give each instance of a topology the next",
    )  # fmt: skip
    group.add_argument(
        "--kv-nbytes", dest="engine.kv_nbytes", type=size, metavar="SIZE",
        help="KV pool of each prefill and decode instance, such as 256MiB; a GPU's default is all "
        "that is free",
    )  # fmt: skip
    group.add_argument(
        "--gpu-memory-utilization", dest="engine.gpu_memory_utilization", type=float,
        metavar="SHARE", help="of a GPU's memory, when its KV pool takes what is free",
    )  # fmt: skip
    group.add_argument(
        "--max-itl-impact", dest="engine.max_itl_impact", type=float, metavar="FACTOR",
        help="prompts may make a step so many times as long; default 0: no bound",
    )  # fmt: skip
    group.add_argument(
        "--speculative-config", metavar="JSON",
        help='guess tokens from the text so far: {"method":"ngram","num_speculative_tokens":4,'
        '"prompt_lookup_min":2,"prompt_lookup_max":4}; answers stay the same; default: none',
    )  # fmt: skip


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("encoders: cache of rows, send buffer")
    group.add_argument(
        "--encoder-cache-device-nbytes", dest="encode.cache_device_nbytes", type=size,
        metavar="SIZE",
        help="rows kept where the tower leaves them, in host memory (pinned on a GPU); 16,384 rows",
    )  # fmt: skip
    group.add_argument(
        "--encoder-cache-host-nbytes", dest="encode.cache_host_nbytes", type=size, metavar="SIZE",
        help="a second tier, also of host memory: adds to the first; default 0: none",
    )  # fmt: skip
    group.add_argument(
        "--encoder-cache-dir", dest="encode.cache_dir", metavar="DIR",
        help="rows kept in files, shared by encoders, also over restarts; prefill instances with "
        "the directory find them without an encoder; default: none",
    )  # fmt: skip
    group.add_argument(
        "--encoder-cache-disk-nbytes", dest="encode.cache_disk_nbytes", type=size, metavar="SIZE",
        help="bound of that directory, default 8GiB",
    )  # fmt: skip
    group.add_argument(
        "--encoder-cache-store", dest="encode.cache_store", metavar="HOST:PORT",
        help="rows kept in Mooncake Store, with its master there, instead of files; default: none",
    )  # fmt: skip
    group.add_argument(
        "--encoder-cache-store-nbytes", dest="encode.cache_store_nbytes", type=size,
        metavar="SIZE", help="memory that each encoder gives to that store, default 1GiB",
    )  # fmt: skip
    group.add_argument(
        "--encode-send-buffer-nbytes", dest="encode.send_buffer_nbytes", type=size, metavar="SIZE",
        help="ring of registered memory that rows are sent from; default 0: from where they are",
    )  # fmt: skip


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may ask, and what may be fetched")
    group.add_argument(
        "--api-key", dest="access.api_keys", nargs="+", action="extend", metavar="KEY",
        help="requests need one of these; better in EPD_API_KEY, which other users cannot see",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origins", dest="access.allowed_origins", nargs="+", metavar="ORIGIN",
        help="pages of these may ask from a browser, such as https://chat.example; *: all",
    )  # fmt: skip
    for name, text in (
        ("certfile", "certificate (PEM): HTTPS instead of HTTP"),
        ("keyfile", "its key (PEM), if it is not in the same file"),
        ("ca-certs", "clients must show a certificate signed by one of these (PEM)"),
    ):
        dest = f"access.ssl_{name.replace('-', '_')}"
        group.add_argument(f"--ssl-{name}", dest=dest, metavar="FILE", help=text)
    group.add_argument(
        "--allowed-media-domains", dest="limits.allowed_media_domains", nargs="+", metavar="HOST",
        help="URLs of pictures and videos may name these hosts only; default: any that is public",
    )  # fmt: skip
    group.add_argument(
        "--allowed-local-media-path", dest="limits.allowed_local_media_path", metavar="DIR",
        help="file: URLs may name what lies below; default: there are none",
    )  # fmt: skip


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits and times (--show-config lists all settings)")
    group.add_argument(
        "--max-open-requests", dest="limits.max_open_requests", type=int, metavar="N",
        help="above it new requests get 429 at once",
    )  # fmt: skip
    group.add_argument(
        "--max-images", dest="limits.max_images", type=int, metavar="N", help="per request"
    )
    group.add_argument(
        "--request-timeout", dest="timing.request_timeout_s", type=float, metavar="SECONDS",
        help="the whole of a request: an answer that is not at its end is cut there, not failed",
    )  # fmt: skip
    group.add_argument(
        "--drain-timeout", dest="timing.drain_timeout_s", type=float, metavar="SECONDS",
        help="after SIGTERM, time for open requests to end",
    )  # fmt: skip


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configuration and log")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML or JSON file of settings; flags win",
    )
    group.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE",
        help="any one setting, such as timing.lost_after_s=5; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--log-level", type=one_of("debug", "info", "warning", "error"), metavar="LEVEL",
        help="debug, info, warning or error",
    )  # fmt: skip
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="OpenTelemetry collector for traces, such as http://host:4318/v1/traces",
    )  # fmt: skip
    group.add_argument("--log-json", action="store_true", help="log lines as JSON objects")


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--host", metavar="ADDRESS", help="HTTP address, default 127.0.0.1")
    group.add_argument(
        "--port", type=int, metavar="PORT",
        help="HTTP port, default 8000; it also names the cluster among those of this host",
    )  # fmt: skip
    group.add_argument(
        "--transport", metavar="NAMES",
        help="how rows and KV move: auto (by pair of instances), or shm, tcp, mooncake, file, or "
        "package.module:factory of your own",
    )  # fmt: skip
    group.add_argument(
        "--cache-scope", metavar="SCOPE",
        help="who shares cached rows and KV: tenant (API key, X-EPD-Tenant; the default) or global",
    )  # fmt: skip
    group.add_argument(
        "--transport-dir", dest="transport_directory", metavar="DIR",
        help="a directory that instances share, for files; auto: for pairs without another way",
    )  # fmt: skip
    group.add_argument(
        "--run-dir", default="", metavar="DIR",
        help="parent of the private directory for ipc sockets; default $XDG_RUNTIME_DIR/epd",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"of an answer, default {max_tokens}",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Of verbs that ask: a running server, or a temporary one with all that it may need."""
    parser.add_argument("--url", default="", metavar="URL", help="a running server's base URL")
    parser.add_argument(
        "--api-key", dest="access.api_keys", nargs=1, metavar="KEY",
        help="of that server; better in EPD_API_KEY, which other users cannot see",
    )  # fmt: skip
    parser.add_argument(
        "--topology", metavar="TOPOLOGY", help="of a temporary server, default 1e1p1d"
    )
    add_place_flags(parser)
    add_model_flags(parser)
    add_config_flags(parser)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Raises UsageError."""
    from epd.cli.question import Sampling

    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: an answer has at least one token")
    return Sampling(args.max_tokens, args.temperature, args.seed)


def settings_of(args: argparse.Namespace) -> Settings:
    """File, --set and flags, put together and checked.  Raises ConfigError."""
    from epd.cli import speculative
    from epd.cli.settings import build_settings, leaves

    flags = {key: value for key, value in vars(args).items() if key in leaves()}
    if names := vars(args).get("model_names"):
        flags |= {"model_name": names[0], "model_aliases": names[1:]}
    if (text := vars(args).get("speculative_config")) is not None:
        flags |= speculative.read_flag(text)
    return build_settings(args.config, args.assignments, flags)


def log_of(args: argparse.Namespace, level: str = "info") -> LogOptions:
    """`level`: the verb's default."""
    from epd.cli.plan import LogOptions

    return LogOptions(args.log_level or level, args.log_json)


def placing_of(args: argparse.Namespace) -> Placing:
    from epd.cli.plan import Placing

    given = vars(args)
    return Placing(given.get("join", ""), given.get("listen", ""), given.get("run_dir", ""))
