"""Every number that an operator may want to change, once, with its unit, bounds and help.

Plain frozen structs, read from flags or a TOML/JSON file by the command line and handed down; no
module reads the environment or a global.  Defaults serve the bundled tiny model on two CPU cores.
A process gets `Settings` with what is its own added: `InstanceConfig`, `GatewayConfig`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from epd.errors import USAGE, Told
from epd.setting import (
    Count,
    CountOrNone,
    Factor,
    Milliseconds,
    Nbytes,
    NbytesOrNone,
    Port,
    PortOrAny,
    Seconds,
    SecondsOrNone,
    Share,
    ShareOrNone,
    Texts,
    about,
    fixed,
    matches,
)


class ConfigError(Told):
    """The configuration cannot be used; the text names the setting and the remedy."""

    exit_status = USAGE


# One setting per line: its kind, what it is, its flag with the group and the word for its value.
# fmt: off
class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one API key may have; 0: no limit.  Requests without a key count by their tenant."""

    requests_per_minute: Annotated[CountOrNone, about("of one API key; without keys, of one X-EPD-Tenant; 0: no limit", "--requests-per-minute", "limits")] = 0
    tokens_per_minute: Annotated[CountOrNone, about("of its prompts and answers; 0: no limit", "--tokens-per-minute", "limits")] = 0
    concurrency: Annotated[CountOrNone, about("its open answers (each of n counts); 0: no limit", "--concurrency-per-key", "limits")] = 0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway refuses before it does any work (faults F33, F39, F46)."""

    max_body_nbytes: Annotated[Nbytes, about("of a request's body")] = 64 << 20
    max_text_nbytes: Annotated[Nbytes, about("of a body, besides the base64 data of its media")] = 4 << 20
    max_inflight_nbytes: Annotated[Nbytes, about("of the bodies of all open requests, and of media fetched for them")] = 1 << 30
    read_timeout_s: Annotated[Seconds, about("a request's head, then its body, must arrive within")] = 30.0
    write_timeout_s: Annotated[Seconds, about("a client that reads nothing for so long is dropped")] = 30.0
    max_images: Annotated[Count, about("images of one request", "--max-images", "limits")] = 16
    max_image_nbytes: Annotated[Nbytes, about("of an image, compressed")] = 32 << 20
    max_pixels: Annotated[Count, about("of an image, or of one frame of a video")] = 64_000_000
    max_videos: Annotated[Count, about("videos of one request")] = 4
    max_video_nbytes: Annotated[Nbytes, about("of a video, compressed; about as much as a body of 64 MiB holds in base64")] = 48 << 20
    max_video_frames: Annotated[Count, about("that are taken of one video")] = 768
    max_video_pixels: Annotated[Count, about("of all frames that are decoded to take some of a video")] = 8_000_000_000
    max_encoder_pixels: Annotated[Count, about("of images before one encoder, or in it")] = 2_000_000_000
    max_pixels_share_per_key: Annotated[Share, about("of the pixels before all encoders, for one API key")] = 0.5
    max_open_requests: Annotated[Count, about("above it new requests get 429 at once", "--max-open-requests", "limits")] = 256
    per_key: KeyLimits = KeyLimits()
    max_open_share_per_key: Annotated[Share, about("of max_open_requests, for one API key, where there are several")] = 0.5
    max_choices: Annotated[Count, about("answers to one request (n)")] = 16
    max_hedged_share: Annotated[ShareOrNone, about("of all images, those that a second encoder is asked for because their rows are late; and a burst of 5; 0: none")] = 0.05
    unknown_parameters: Annotated[Literal["refuse", "warn"], about("names at the top of a body that no API here has: refused, or left out and listed in the header x-epd-ignored-parameters", "--unknown-parameters", "limits", "HOW")] = "refuse"
    fetch_timeout_s: Annotated[Seconds, about("of an image or video by its URL")] = 10.0
    allow_private_networks: Annotated[bool, about("URLs may lead to loopback, link-local and private addresses")] = False
    allowed_media_domains: Annotated[Texts, about("URLs of images and videos may name these hosts only; none: any that is public", "--allowed-media-domains", "access", "HOST")] = ()
    allowed_local_media_path: Annotated[str, about("file: URLs may name files below it; empty: there are none", "--allowed-local-media-path", "access", "DIR")] = ""


class IdempotencyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are sent again (header Idempotency-Key): epd/api/http/idempotency.py."""

    keep_s: Annotated[Seconds, about("a whole answer is kept so long for a retry")] = 60.0
    linger_s: Annotated[Seconds, about("whose client is gone goes on so long, for a retry to find it")] = 10.0
    max_answers: Annotated[Count, about("that run or are kept")] = 1024
    max_nbytes: Annotated[Nbytes, about("of these answers; the oldest goes first")] = 64 << 20


class AccessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask the gateway; what it means: epd/api/http/access.py."""

    api_keys: Annotated[Texts, about("requests need one of these; better in EPD_API_KEY, which other users cannot see; none: nobody is asked for one", "--api-key", "access", "KEY")] = ()
    key_file: Annotated[str, about("hashes of API keys with tenant, limits and expiry, made by epd keys; read again when it changes", "--key-file", "access", "FILE")] = ""
    audit_log: Annotated[Literal["off", "on", "addresses"], about("a line in the log for each request that needs a key where there are some, without content; addresses: with the client's", "--audit-log", "access", "HOW")] = "off"
    allowed_origins: Annotated[Texts, about("pages of these may ask from a browser, such as https://chat.example; *: all", "--allowed-origins", "access", "ORIGIN")] = ()
    ssl_certfile: Annotated[str, about("certificate (PEM): HTTPS instead of HTTP", "--ssl-certfile", "access", "FILE")] = ""
    ssl_keyfile: Annotated[str, about("its key (PEM), if it is not in the same file", "--ssl-keyfile", "access", "FILE")] = ""
    ssl_ca_certs: Annotated[str, about("clients must show a certificate signed by one of these (PEM)", "--ssl-ca-certs", "access", "FILE")] = ""

    @property
    def has_files(self) -> bool:
        return any((self.key_file, self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs))


NO_LOAD = "the answer comes from an event loop, not from a computation; the simulator shortens it"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines and intervals.  Times are never a way to free memory, only to give up on work."""

    first_token_timeout_s: Annotated[Seconds, about("a client waits so long for the first token")] = 120.0
    token_timeout_s: Annotated[Seconds, about("a client waits so long for each later token")] = 60.0
    request_timeout_s: Annotated[Seconds, about("the whole of a request: an answer that is not at its end is cut there, not failed", "--request-timeout", "limits")] = 3600.0
    accept_timeout_s: Annotated[Seconds, fixed("the gateway waits for RequestAccepted, then inquires", NO_LOAD)] = 5.0
    stall_timeout_s: Annotated[Seconds, about("the gateway waits for the next token of a running attempt")] = 30.0
    topology_timeout_s: Annotated[Seconds, about("the gateway waits for an instance that a request lacks")] = 15.0
    abort_timeout_s: Annotated[Seconds, fixed("how long an abort waits for its confirmation", NO_LOAD)] = 5.0
    link_timeout_s: Annotated[Seconds, fixed("a link without an echo is opened anew; after twice that it is given up", NO_LOAD)] = 2.0
    retry_interval_s: Annotated[Seconds, fixed("grants, commits, cancels, joins, fences and settling are asked for again", "asking again is idempotent and small; the simulator shortens it")] = 0.5
    tombstone_s: Annotated[Seconds, fixed("ended machines are remembered for messages that come late", "it must outlive messages under way, and costs little memory; the simulator shortens it")] = 60.0
    heartbeat_interval_s: Annotated[Seconds, about("of each instance, to the gateway")] = 0.5
    suspect_after_s: Annotated[Seconds, about("an instance that was silent so long gets no new work, nor one without progress for twice as long and its work's cost")] = 2.0
    lost_after_s: Annotated[Seconds, about("an instance that was silent so long is lost, and this life of it barred")] = 5.0
    group_join_timeout_s: Annotated[Seconds, about("the ranks of an instance (--tensor-parallel-size) must have loaded within")] = 600.0
    group_step_timeout_s: Annotated[Seconds, about("every rank of an instance must have executed a step within, or it starts anew; less than stall_timeout_s, so that a client's stream is not given up first")] = 20.0
    drain_timeout_s: Annotated[Seconds, about("after SIGTERM, time for open requests to end", "--drain-timeout", "limits")] = 30.0
    move_timeout_s: Annotated[Seconds, about("after that, time for open requests to move to other instances")] = 10.0
    kv_lease_s: Annotated[Seconds, about("a prompt's KV is held so long for the request that goes on with it")] = 30.0
    max_clock_skew_s: Annotated[SecondsOrNone, about("a wall clock further from the gateway's is refused at an instance's start; 0: any")] = 300.0
    max_attempts: Annotated[Count, about("of a request that fail for the same kind of reason")] = 4


FAIR = "one peer must leave room for another; the simulator tries other shares"
ROW_WIDTH = "it follows from the width of a row (0: about 64 rows); the simulator has smaller ones"


class EncodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an encoder holds at most, and where rows are kept: docs/memory.md."""

    max_queue: Annotated[Count, about("images waiting or being encoded")] = 512
    max_batch_patches: Annotated[Count, about("of one vision batch, at each rank; a CPU gains nothing from larger ones")] = 1024
    pixels_nbytes: Annotated[Nbytes, about("decoded pixels held until their rows are made, as sent and 3 bytes each; further images wait, a larger one goes alone")] = 256 << 20
    cache_device_nbytes: Annotated[NbytesOrNone, about("rows kept where the tower leaves them: on the GPU, or in host memory; 0: 16,384 rows", "--encoder-cache-device-nbytes", "encoders")] = 0
    cache_host_nbytes: Annotated[NbytesOrNone, about("a second tier, of host memory (pinned on a GPU); 0: none", "--encoder-cache-host-nbytes", "encoders")] = 0
    film_decoder: Annotated[Literal["auto", "cpu", "nvdec"], about("decoder of films: auto, NVDEC at instances that only encode, as its start may hold steps up for 0.1 s; nvdec, at all; the CPU has the other films", "--film-decoder", "encoders", "WHO")] = "auto"
    film_device_nbytes: Annotated[Nbytes, about("of a GPU, for decoders of films; a film without room there goes to the CPU")] = 1 << 30
    cache_dir: Annotated[str, about("rows kept in files, shared by encoders, also over restarts; prefill instances with the directory find them without an encoder; empty: none", "--encoder-cache-dir", "encoders", "DIR")] = ""
    cache_disk_nbytes: Annotated[Nbytes, about("bound of that directory", "--encoder-cache-disk-nbytes", "encoders")] = 8 << 30
    cache_store: Annotated[str, about("rows kept in Mooncake Store, with its master there, instead of files; empty: none", "--encoder-cache-store", "encoders", "HOST:PORT")] = ""
    cache_store_nbytes: Annotated[Nbytes, about("memory that each encoder gives to that store", "--encoder-cache-store-nbytes", "encoders")] = 1 << 30
    cache_load_timeout_s: Annotated[Seconds, about("a storage that is slower is not waited for")] = 2.0
    send_buffer_nbytes: Annotated[NbytesOrNone, about("ring of registered memory that rows are sent from; 0: from where they are", "--encode-send-buffer-nbytes", "encoders")] = 0
    send_slot_nbytes: Annotated[NbytesOrNone, fixed("of a slot of the send buffer", ROW_WIDTH)] = 0
    max_send_share_per_peer: Annotated[Share, fixed("of the send buffer, per receiving instance", FAIR)] = 0.75


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prefill instance holds at most, and when it begins."""

    max_queue: Annotated[Count, about("requests waiting or being computed")] = 512
    pool_nbytes: Annotated[NbytesOrNone, about("receive pool of rows, split into slots; 0: 8,192 rows")] = 0
    slot_nbytes: Annotated[NbytesOrNone, fixed("of a slot of the receive pool", ROW_WIDTH)] = 0
    rows_at_ranks: Annotated[Literal["sharded", "replicated"], about("sharded: each rank of an instance gets its part of an image's rows, which ranks then exchange; replicated: all rows, as of an image of fewer rows than ranks")] = "sharded"
    max_slots_share_per_peer: Annotated[Share, fixed("of the receive pool, in flight from one encoder (fault F41)", FAIR)] = 0.75
    rows_timeout_s: Annotated[SecondsOrNone, about("of waiting for an encoder, then another is asked; 0: no bound")] = 0.0
    hedge_after_s: Annotated[Seconds, about("rows are late if they take twice as long as 99 % of the best encoder's, and at least so long; then a second encoder is asked (limits.max_hedged_share)")] = 0.25
    min_measured_loads: Annotated[Count, fixed("so many images of an encoder must be measured before one is late", "fewer have no 99th percentile; the simulator has few images")] = 20
    min_early_tokens: Annotated[Count, fixed("a prompt begins before its images if so much can be computed", "a step of its own pays for so many, whatever the model; tests begin at once")] = 64


class DecodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a decode instance holds at most."""

    max_queue: Annotated[Count, about("requests waiting or being decoded")] = 512
    max_running: Annotated[int, msgspec.Meta(gt=0, le=4096, extra={"metavar": "N"}), about("sequences of one step", "--max-num-seqs", "model")] = 256


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the mooncake transport moves bytes with."""

    protocol: Annotated[Literal["tcp", "rdma"], about("of its engine")] = "tcp"
    devices: Annotated[str, about("of rdma: names as in /sys/class/infiniband, with commas; empty: all")] = ""
    min_port: Annotated[Port, about("with mooncake each instance listens on two ports from here, on all interfaces", "--mooncake-min-port", "hosts", "PORT")] = 15000
    max_port: Annotated[Port, about("the last of these ports", "--mooncake-max-port", "hosts", "PORT")] = 17000


MOONCAKE_OVER_TCP = MooncakeConfig()


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Drafts of the next tokens, which a step accepts or rejects; names are vLLM's."""

    method: Annotated[Literal["", "ngram", "mtp", "eagle3"], about("how tokens are drafted: ngram, from the text so far; mtp, by the checkpoint's own layer, or eagle3, by that of engine.speculative.model (the same in all instances); empty: not")] = ""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64), about("drafts per request and step, at most; 3 to 8 pay")] = 0
    prompt_lookup_min: Annotated[CountOrNone, about("n-grams of so many tokens at least are looked up in the text")] = 0
    prompt_lookup_max: Annotated[CountOrNone, about("and of so many at most; the longest that is found wins")] = 0
    model: Annotated[str, about("of eagle3: the directory of its head, which must have been made for this model, on every host")] = ""

    @property
    def has_layer(self) -> bool:
        """Whether a layer drafts, whose KV is one more layer's."""
        return self.method not in ("", "ngram")


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adapters of the language model and the tower, each chosen by the `model` of a request; flags are vLLM's, but the last."""

    enabled: Annotated[bool, about("requests may name LoRA adapters of a dense model, and of its tower on a CPU", "--enable-lora", "model")] = False
    max_loras: Annotated[Count, about("adapters that an instance holds; any of them may be in one batch", "--max-loras", "model")] = 4
    max_lora_rank: Annotated[Count, about("of an adapter, in any layer", "--max-lora-rank", "model")] = 16
    modules: Annotated[Texts, about("adapters to load at start: each one's name in the API and its directory, as PEFT saves it, on every host", "--lora-modules", "model", "NAME=DIR")] = ()
    runtime_dir: Annotated[str, about("clients may load adapters below it while it serves; empty: none", "--lora-runtime-dir", "model", "DIR")] = ""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computes: the device, its memory, and the size of its steps (docs/engine.md)."""

    device: Annotated[str, matches(r"^(cpu|cuda(:\d+)?(,cuda(:\d+)?)*)$", "it must be cpu, cuda, cuda: and a number, or several: cuda:0,cuda:1"), about("cpu, cuda, cuda:1; or cuda:0,cuda:1 to give each instance of a topology, and each of its ranks, the next", "--device", "model", "DEVICE")] = "cpu"
    tensor_parallel_size: Annotated[Count, about("ranks (processes, each with a device) that share the language model of each instance with prefill and decode; or for some of a topology: 1e1pd:tp2", "--tensor-parallel-size", "model", short="-tp")] = 1
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], about("float32, bfloat16 or float16 (fp32, bf16, fp16)", "--dtype", "model", "DTYPE")] = "float32"
    quantization: Annotated[Literal["", "fp8"], about("fp8: linear layers of the language model in eight bits, faster and less exact; empty: in engine.dtype", "--quantization", "model", "METHOD")] = ""
    dequantize: Annotated[bool, about("weights that are stored in four or eight bits take engine.dtype: several times the memory, and faster on a CPU; without it those that cannot stay so are refused", "--dequantize", "model")] = False
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], about("fp8: keys and values in eight bits, half of the memory, faster decodes of long texts, and less exact; auto: in engine.dtype", "--kv-cache-dtype", "model", "DTYPE")] = "auto"
    per_layer_embeddings: Annotated[Literal["device", "host"], about("where the embeddings of every layer lie (Gemma's E models): device, or host: pinned memory of each rank's host, whose rows a step reads over the bus", "--per-layer-embeddings", "model", "WHERE")] = "device"
    load_format: Annotated[Literal["auto", "dummy"], about("auto, or dummy: random weights made on the device, of config.json alone and in its format", "--load-format", "model", "FORMAT")] = "auto"
    allow_unused_tensors: Annotated[bool, about("load a checkpoint that has more tensors than config.json has places for, such as more layers", "--allow-unused-tensors", "model")] = False
    threads: Annotated[CountOrNone, about("CPU threads per process; 0: half of the CPUs, or all but one (for the event loop) where they are its own, or of several ranks each its part", "--threads", "model")] = 0
    cpu_affinity: Annotated[str, about("CPUs of the process, such as 0-3,8; or 0-3|4-7 to give each instance of a topology the next; empty: those it was started with", "--cpu-affinity", "model", "CPUS")] = ""
    block_size: Annotated[Count, about("tokens of one KV block; the same in all instances")] = 16
    kv_nbytes: Annotated[NbytesOrNone, about("KV pool of each prefill and decode instance, such as 256MiB; 0: all that is free on a GPU", "--kv-nbytes", "model")] = 128 << 20
    kv_layer_groups: Annotated[int, msgspec.Meta(gt=0, le=256), about("a last chunk's KV is sent in so many parts, as layers are computed; 1: behind its last layer; the same in all instances")] = 4
    kv_landing_nbytes: Annotated[Nbytes, about("of a GPU: host memory for KV that arrives, or leaves, over a transport that does not reach the device")] = 4 << 30
    gpu_memory_utilization: Annotated[Share, about("of a GPU's memory, when its KV pool takes all that is free", "--gpu-memory-utilization", "model")] = 0.9
    cuda_graphs: Annotated[bool, about("on a GPU steps are captured and replayed")] = True
    max_captured_tokens: Annotated[CountOrNone, about("steps with prompts are captured up to so many, rounded up, with decodes up to 2048; 0: none")] = 4096
    async_scheduling: Annotated[bool, about("the next step is launched while one runs: pays on a GPU")] = False
    max_step_tokens: Annotated[Count, about("token budget of a step", "--max-num-batched-tokens", "model")] = 1024
    max_chunk_tokens: Annotated[Count, about("of one prefill chunk")] = 512
    min_partial_tokens: Annotated[CountOrNone, fixed("fewer, before an image that lacks, wait for it", "it goes with the device: a GPU launches kernels longer than it computes fewer")] = 0
    max_quantum_ms: Annotated[Milliseconds, about("that images and prompts may hold streams up for; 0: any time")] = 0.0
    min_step_tokens: Annotated[CountOrNone, fixed("a step may have so many, decodes included, whatever engine.max_quantum_ms is", "it goes with the device: a GPU computes tokens in tiles, and so many in about the time that it takes for few")] = 0
    max_itl_impact: Annotated[Factor, about("a step with prompts takes at most so many times one without, so tokens come evenly and prompts take longer; 0: no bound", "--max-itl-impact", "model")] = 0.0
    prefix_caching: Annotated[bool, about("KV blocks that nobody uses are found again by their content")] = True
    checksums: Annotated[Literal["auto", "always", "never"], about("of rows and KV that move; auto: that leave the host")] = "auto"
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora: LoraConfig = LoraConfig()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of one cluster share."""

    model_dir: Annotated[str, about("checkpoint directory (safetensors, tokenizer.json), or ORG/NAME of the Hugging Face hub, if it is in its cache here; empty: the bundled tiny model", "--model", "model", "MODEL")] = ""
    model_name: Annotated[str, about("in the API (--served-model-name); empty: the directory's name")] = ""
    model_aliases: Annotated[Texts, about("other names that requests may give (--served-model-name)")] = ()
    chat_template: Annotated[str, about("jinja template; empty: the model's own", "--chat-template", "model", "FILE")] = ""
    reasoning_parser: Annotated[Literal["", "gemma4", "glm41v", "glm45", "kimi", "kimi_k2", "mistral", "qwen3"], about("whose marks keep reasoning apart from the answer, as <think> and </think> (qwen3); empty: it is text", "--reasoning-parser", "model", "NAME")] = ""
    special_tokens_in_content: Annotated[Literal["keep", "escape"], about("text of special tokens in a chat request: keep, it becomes these tokens, as in transformers; escape, ordinary tokens, so that no text ends a message or begins another", "--special-tokens-in-content", "model", "HOW")] = "keep"
    additional_properties: Annotated[Literal["closed", "letter"], about("of objects whose schema lists properties, and no rule for further ones: closed, there are none, as in OpenAI's strict mode; letter: any, as in the standard", "--additional-properties", "model", "HOW")] = "closed"
    host: Annotated[str, about("HTTP address", "--host", "where", "ADDRESS")] = "127.0.0.1"
    port: Annotated[PortOrAny, about("HTTP port; it also names the cluster among those of this host", "--port", "where")] = 8000
    tenant: Annotated[str, about("whose rows and KV are shared where a request names none (X-EPD-Tenant)")] = ""
    cache_scope: Annotated[Literal["tenant", "global"], about("cached rows and KV are shared by a tenant (API key, X-EPD-Tenant), or global", "--cache-scope", "where", "SCOPE")] = "tenant"
    placement: Annotated[Literal["auto", "fixed"], about("which instances serve a request: auto, by predicted completion; fixed: by counts of requests, and prefill encodes its own images if it can", "--placement", "where", "RULE")] = "auto"
    autoscale: Annotated[Literal["off", "roles"], about("roles: an instance gets other roles where much more work waits, for a while, than at its own", "--autoscale", "where", "RULE")] = "off"
    encode_policy: Annotated[Literal["affinity", "round_robin", "random"], about("which encoder an image goes to")] = "affinity"
    prefix_affinity: Annotated[bool, about("prompts go where their beginnings are, if that is not overloaded")] = True
    cluster_key: Annotated[str, about("key file, required between hosts; its holders are members (made by --new-key)", "--cluster-key", "hosts", "FILE")] = ""
    peers: Annotated[Texts, about("gateways over the same instances, such as http://HOST:8000: a request with an Idempotency-Key runs at the one that has its key; a name may have several addresses, and this gateway's", "--peers", "hosts", "URL")] = ()
    transport: Annotated[str, about("how rows and KV move: auto (by pair of instances), or some of the transports that epd doctor names and package.module:factory of your own, with commas", "--transport", "where", "NAMES")] = "auto"
    transport_directory: Annotated[str, about("a directory that instances share, for files; auto: for pairs without another way", "--transport-dir", "where", "DIR")] = ""
    transport_options: Annotated[str, about("a JSON object, for a transport of your own: package.module:factory")] = ""
    profile_dir: Annotated[str, about("POST /start_profile and /stop_profile write a trace of each instance there, CPU and GPU, for Perfetto; empty: neither is there", "--profile-dir", "watch", "DIR")] = ""
    health_when_ready: Annotated[bool, about("GET /health is 200 only when a request would be served, as GET /ready is; for checkers with one address only", "--health-when-ready", "watch")] = False
    expected_instances: Annotated[CountOrNone, about("that a cluster has at least: epd_instances_expected in GET /metrics, for an alert; 0: as many as the gateway's command starts")] = 0
    metrics_names: Annotated[Literal["epd", "vllm"], about("in GET /metrics: epd; vllm, also vLLM's of waiting and running requests and the KV cache, for pickers, scalers and dashboards", "--metrics-names", "watch", "WHOSE")] = "epd"
    otlp_traces_endpoint: Annotated[str, matches(r"^$|^env$|^https?://[^/]", "it must be the collector's address for OTLP over HTTP: http://host:4318/v1/traces"), about("OpenTelemetry collector for traces, such as http://host:4318/v1/traces; empty: by OpenTelemetry's own variables", "--otlp-traces-endpoint", "config", "URL")] = ""
    otlp_metrics_endpoint: Annotated[str, matches(r"^$|^env$|^https?://[^/]", "it must be the collector's address for OTLP over HTTP: http://host:4318/v1/metrics"), about("OpenTelemetry collector for metrics by GenAI's names, such as http://host:4318/v1/metrics; empty: by OpenTelemetry's own variables", "--otlp-metrics-endpoint", "config", "URL")] = ""
    cpus_per_instance: Annotated[CountOrNone, about("CPUs of its own for each instance; the gateway gets the rest; 0: shared", "--cpus-per-instance", "model")] = 0
    access: AccessConfig = AccessConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    limits: Limits = Limits()
    timing: Timing = Timing()
    encode: EncodeConfig = EncodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    engine: EngineConfig = EngineConfig()
    mooncake: MooncakeConfig = MooncakeConfig()


class InstanceConfig(Settings, frozen=True, kw_only=True):
    """One serving process: its settings, what it is, and where it and the gateway are."""

    instance_id: str
    roles: tuple[str, ...]
    gateway_endpoint: str = ""
    endpoint: str = ""
    rank_devices: tuple[str, ...] = ()  # of its further ranks here; the first has engine.device
    ranks_elsewhere: int = 0  # behind these, on other hosts,
    ranks_endpoint: str = ""  # which ask for their places there
    rank_of: str = ""  # it is no instance: a rank of this one, whose ranks_endpoint it is to ask
    lineage: str = ""  # random, of all its lives under one parent (INSTANCE)
    kept_roles: str = ""  # why it has not the other roles that it was last asked to have

    @property
    def num_ranks(self) -> int:
        return 1 + len(self.rank_devices) + self.ranks_elsewhere

    def having(self, roles: tuple[str, ...], kept_roles: str = "") -> InstanceConfig:
        return msgspec.structs.replace(self, roles=roles, kept_roles=kept_roles)


class GatewayConfig(Settings, frozen=True, kw_only=True):
    """The gateway's process; `otlp_*_endpoint` may be `env`: OpenTelemetry's own variables."""

    instance_id: str = "gateway"
    endpoint: str = ""
    cpu_affinity: str = ""  # as in EngineConfig
    starts_instances: bool = False  # the same command starts some, and starts anew what dies

    @property
    def base_url(self) -> str:
        scheme = "https" if self.access.ssl_certfile else "http"
        return f"{scheme}://{self.host}:{self.port}"

# fmt: on

# What a GPU starts from instead; whatever is set explicitly wins.
CUDA_DEFAULTS: dict[str, object] = {
    "engine.dtype": "bfloat16",
    "engine.kv_nbytes": 0,
    "engine.async_scheduling": True,
    "engine.max_step_tokens": 4096,
    "engine.max_chunk_tokens": 4096,
    "engine.min_partial_tokens": 1024,
    "engine.max_quantum_ms": 10.0,
    "engine.min_step_tokens": 768,
    "encode.max_batch_patches": 8192,
    "encode.cache_device_nbytes": 2 << 30,
    "encode.cache_host_nbytes": 2 << 30,
    "prefill.pool_nbytes": 2 << 30,
}
