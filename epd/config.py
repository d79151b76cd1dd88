"""Every number that an operator may want to change, in one place, with its unit in its name.

Plain frozen structs, read from flags or a TOML/JSON file by the command line and handed down; no
module reads the environment or a global.  Defaults serve the bundled tiny model on two CPU cores.
"""

from __future__ import annotations

import re

import msgspec

TRANSPORTS = ("auto", "shm", "tcp", "mooncake", "file")
REASONING_PARSERS = ("", "qwen3")  # how answers mark their reasoning: epd/api/reasoning.py
CACHE_SCOPES = ("tenant", "global")  # who shares rows and KV: epd/api/identity.py
ENCODE_POLICIES = ("affinity", "round_robin", "random")  # who encodes: scheduling/placement.py
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
SPECULATIVE_METHODS = ("ngram",)
CHECKSUMS = ("auto", "always", "never")  # what they mean: epd/transport/checksum.py


FOREIGN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_foreign(name: str) -> bool:
    """Whether a transport's name is `package.module:factory`, code of others."""
    return FOREIGN.fullmatch(name) is not None


def is_transport(text: str) -> bool:
    """`auto`, or names of transports with commas between them, none twice."""
    names = text.split(",")
    known = TRANSPORTS[1:] if len(names) > 1 else TRANSPORTS
    return len(set(names)) == len(names) and all(n in known or is_foreign(n) for n in names)


class ConfigError(Exception):
    """The configuration cannot be used; the text names the setting and the remedy."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway refuses before it does any work (faults F33, F39, F46)."""

    max_body_nbytes: int = 64 << 20
    max_text_nbytes: int = 4 << 20  # of a body, besides the base64 data of its media
    max_json_values: int = 65_536  # members of arrays and objects of a body
    max_inflight_nbytes: int = 1 << 30  # of the bodies of all open requests
    read_timeout_s: float = 30.0  # a request's head, then its body, must arrive within
    write_timeout_s: float = 30.0  # a client that reads nothing for so long is dropped
    max_images: int = 16
    max_image_nbytes: int = 32 << 20
    max_pixels: int = 64_000_000
    max_side_ratio: int = 200
    max_videos: int = 4
    max_video_nbytes: int = 48 << 20  # about what a body of 64 MiB holds in base64
    max_video_frames: int = 768  # that are taken of one
    max_video_pixels: int = 8_000_000_000  # of all frames that are decoded to take some
    max_encoder_pixels: int = 2_000_000_000  # of pictures before one encoder, or in it
    max_pixels_share_per_key: float = 0.5  # of those of all encoders, for one API key
    max_open_requests: int = 256
    max_choices: int = 16
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3
    allow_private_networks: bool = False  # http(s) images from loopback, link-local, private ranges
    allowed_media_domains: tuple[str, ...] = ()  # hosts that URLs may name; none: any
    allowed_local_media_path: str = ""  # file: URLs may lie below; empty: there are none
    retry_after_s: int = 1


class AccessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask the gateway; what it means: epd/api/access.py."""

    api_keys: tuple[str, ...] = ()  # one of these is needed; none: nobody is asked for one
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers; "*": any
    ssl_keyfile: str = ""  # PEM; empty: the key is in the certificate's file
    ssl_certfile: str = ""  # PEM; empty: plain HTTP
    ssl_ca_certs: str = ""  # clients must show a certificate of these; empty: none is asked for


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines and intervals.  Times are never a way to free memory, only to give up on work."""

    first_token_timeout_s: float = 120.0  # a client waits so long for the first token,
    token_timeout_s: float = 60.0  # for each one after it,
    request_timeout_s: float = 3600.0  # and for the whole answer, which is cut there, not failed
    accept_timeout_s: float = 5.0  # gateway waits for RequestAccepted
    stall_timeout_s: float = 30.0  # gateway waits for the next token of a running attempt
    topology_timeout_s: float = 15.0  # gateway waits for an instance that a request lacks
    abort_timeout_s: float = 5.0  # gateway waits for RequestAborted
    link_timeout_s: float = 2.0  # no echo of a peer: its link is opened anew; twice: given up there
    retry_interval_s: float = 0.5  # grants, commits, cancels, joins are repeated
    fence_interval_s: float = 0.5
    tombstone_s: float = 60.0
    heartbeat_interval_s: float = 0.5
    suspect_after_s: float = 2.0
    lost_after_s: float = 5.0
    drain_timeout_s: float = 30.0
    kv_lease_s: float = 30.0  # a prompt's KV is held so long for the request that goes on with it
    max_attempts: int = 4  # that fail for the same kind of reason


class EncodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_queue: int = 512  # images waiting or being encoded
    max_batch_patches: int = 1024  # of one vision batch; a CPU gains nothing from larger ones
    cache_device_nbytes: int = 0  # rows where the tower leaves them, host memory; 0: 16,384 rows
    cache_host_nbytes: int = 0  # a second tier, of host memory as well; 0: none
    cache_dir: str = ""  # rows in files, kept over restarts; prefill instances find them there
    cache_disk_nbytes: int = 8 << 30  # of that directory
    cache_store: str = ""  # rows in Mooncake Store: HOST:PORT of its master, instead of files
    cache_store_nbytes: int = 1 << 30  # of an encoder's memory, given to that store
    cache_load_timeout_s: float = 2.0  # a storage that is slower is not waited for
    send_buffer_nbytes: int = 0  # ring of send slots; 0: writes read rows where they are
    send_slot_nbytes: int = 0  # 0: from the row width (about 64 rows)
    max_send_share_per_peer: float = 0.75  # of the ring, per receiving instance


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_queue: int = 512
    pool_nbytes: int = 0  # receive pool, split into slots; 0: 8,192 rows
    slot_nbytes: int = 0  # 0: from the row width (about 64 rows)
    max_slots_share_per_peer: float = 0.75  # in flight (fault F41)
    rows_timeout_s: float = 0.0  # of waiting for an encoder, then another is asked; 0: no bound
    min_early_tokens: int = 64  # a prompt begins before its pictures if so much can be computed


class DecodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_queue: int = 512
    max_running: int = 256  # sequences of one step


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the mooncake transport moves bytes with."""

    protocol: str = "tcp"  # one of MOONCAKE_PROTOCOLS
    devices: str = ""  # rdma: names as in /sys/class/infiniband, with commas; empty: all
    min_port: int = 15000  # each instance listens on two ports from here
    max_port: int = 17000  # to here, on all interfaces


MOONCAKE_OVER_TCP = MooncakeConfig()


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Guesses of the next tokens that a step confirms or rejects; names are vLLM's."""

    method: str = ""  # one of SPECULATIVE_METHODS; empty: none
    num_speculative_tokens: int = 0  # guesses per request and step, at most
    prompt_lookup_min: int = 0  # n-grams of so many tokens at least are looked up in the text,
    prompt_lookup_max: int = 0  # and of so many at most; the longest that is found wins


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str = "cpu"  # cpu, cuda, cuda:1 and so on
    dtype: str = "float32"
    load_format: str = "auto"  # dummy: random weights made on the device, of config.json alone
    allow_unused_tensors: bool = False  # a checkpoint may have some that config.json lacks
    block_size: int = 16
    kv_nbytes: int = 128 << 20  # 0: what is free on the device
    kv_layer_groups: int = 4  # a last chunk's KV is sent in so many parts; 1: behind its last layer
    kv_landing_nbytes: int = 2 << 30  # of a GPU: host memory for KV that arrives, or leaves
    gpu_memory_utilization: float = 0.9  # share of the device's memory that kv_nbytes 0 fills
    cuda_graphs: bool = True  # steps are captured and replayed: those of decodes alone,
    max_captured_tokens: int = 2048  # and those with prompts of so many tokens, rounded up
    async_scheduling: bool = False  # the next step is launched while one runs: pays on a GPU
    max_step_tokens: int = 1024  # token budget of a step
    max_chunk_tokens: int = 512  # of one prefill chunk
    min_partial_tokens: int = 0  # fewer, before a picture that lacks, wait for it
    max_quantum_ms: float = 0.0  # that pictures and prompts may hold streams up for; 0: any time
    min_chunk_tokens: int = 16  # prompts get so many of a step, whatever bounds its length
    max_itl_impact: float = (
        0.0  # a step with prompts takes at most so many times one without; 0: any
    )
    prefix_caching: bool = True  # KV blocks that nobody uses are found again by their content
    speculative: SpeculativeConfig = SpeculativeConfig()
    threads: int = 0  # 0: half of the CPUs; all but one (for the event loop) where they are its own
    cpu_affinity: str = ""  # CPUs of the process, such as 0-3,8; empty: those it was started with
    checksums: str = "auto"  # of what moves, one of CHECKSUMS


class InstanceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving process."""

    instance_id: str
    roles: tuple[str, ...]
    model_dir: str
    gateway_endpoint: str = ""
    endpoint: str = ""
    cluster_key: str = ""  # path of the key file; required where an endpoint leaves the host
    transport: str = "auto"  # of rows and KV: auto, or some of TRANSPORTS or others, with commas
    transport_directory: str = ""  # for the file transport: shared by instances
    transport_options: str = ""  # for a transport of others: a JSON object
    mooncake: MooncakeConfig = MooncakeConfig()
    timing: Timing = Timing()
    encode: EncodeConfig = EncodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    engine: EngineConfig = EngineConfig()
    profile_dir: str = ""  # of traces; empty: it cannot be profiled


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instance_id: str = "gateway"
    model_dir: str = ""
    model_name: str = ""
    chat_template: str = ""  # a file, instead of the model's own
    reasoning_parser: str = ""  # one of REASONING_PARSERS
    model_aliases: tuple[str, ...] = ()  # other names that requests may give
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str = ""
    cluster_key: str = ""
    tenant: str = ""
    cache_scope: str = "tenant"  # one of CACHE_SCOPES
    cpu_affinity: str = ""  # as in EngineConfig
    profile_dir: str = ""  # empty: there is no /start_profile
    health_when_ready: bool = False  # /health is 200 only when /ready is
    otlp_traces_endpoint: str = ""  # or env: what OpenTelemetry's variables say
    encode_policy: str = "affinity"  # one of ENCODE_POLICIES
    prefix_affinity: bool = True  # prompts go where their beginnings are, if that is not overloaded
    access: AccessConfig = AccessConfig()
    limits: Limits = Limits()
    timing: Timing = Timing()


# What a GPU starts from instead; whatever is set explicitly wins.
CUDA_DEFAULTS: dict[str, object] = {
    "engine.dtype": "bfloat16",
    "engine.kv_nbytes": 0,
    "engine.async_scheduling": True,
    "engine.max_step_tokens": 8192,
    "engine.max_chunk_tokens": 8192,
    "engine.min_partial_tokens": 1024,
    "engine.max_quantum_ms": 10.0,
    "engine.min_chunk_tokens": 704,
    "encode.max_batch_patches": 8192,
    "encode.cache_device_nbytes": 2 << 30,
    "prefill.pool_nbytes": 2 << 30,
}
