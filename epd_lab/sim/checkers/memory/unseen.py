"""Numbers of the configuration that `bounds` and `durations` do not look at, and why.

`ELSEWHERE` names the checker that looks at a bound instead; `NOT_SEEN` has the reason why none can
in simulation, or why it bounds nothing.  A number in none of these lists fails a test.
"""

from __future__ import annotations

ELSEWHERE = {
    "timing.first_token_timeout_s": "deadlines",
    "timing.token_timeout_s": "deadlines",
    "timing.request_timeout_s": "deadlines",
    "timing.stall_timeout_s": "silence",
    "timing.tombstone_s": "tombstones",
    "timing.group_step_timeout_s": "groups",
    "timing.move_timeout_s": "durations",
    "limits.max_hedged_share": "elsewhere",
}

_EDGE = "HTTP is outside the simulator; tests/api looks at it"
_FOREIGN = "real adapters are outside the simulator; their contract kits look at it"
_OFTEN = "how often something is said or asked again, not how much may be held"
_LEARNT = "a step's cost is learnt while it runs; tests/scheduling compares plans with it"
_SHAPE = "the shape of memory, not how much of it is held"

NOT_SEEN = {
    "limits.max_body_nbytes": _EDGE, "limits.max_open_share_per_key": _EDGE,
    "limits.max_text_nbytes": _EDGE, "limits.max_inflight_nbytes": _EDGE,
    "limits.read_timeout_s": _EDGE, "limits.write_timeout_s": _EDGE, "limits.max_images": _EDGE,
    "limits.max_image_nbytes": _EDGE, "limits.max_pixels": _EDGE, "limits.max_videos": _EDGE,
    "limits.max_video_nbytes": _EDGE, "limits.max_video_frames": _EDGE,
    "limits.max_video_pixels": _EDGE, "limits.max_encoder_pixels": _EDGE,
    "limits.max_pixels_share_per_key": _EDGE, "limits.max_choices": _EDGE,
    "limits.per_key.requests_per_minute": _EDGE, "limits.per_key.tokens_per_minute": _EDGE,
    "limits.per_key.concurrency": _EDGE,
    "idempotency.max_answers": _EDGE, "idempotency.max_nbytes": _EDGE,
    "idempotency.keep_s": _EDGE, "idempotency.linger_s": _EDGE,
    "timing.max_clock_skew_s": "whether a life may begin, not how long anything lasts",
    "expected_instances": "what alerts compare with; nothing is held to it",
    "limits.fetch_timeout_s": _EDGE, "port": _EDGE, "cpus_per_instance": _FOREIGN,
    "mooncake.min_port": _FOREIGN, "mooncake.max_port": _FOREIGN,
    "encode.cache_store_nbytes": _FOREIGN,
    "encode.film_device_nbytes": "the decoders of a GPU; tests/engine/vision looks at it",
    "encode.cache_disk_nbytes": "the simulated disk keeps to it by itself; the real one is tested",
    "engine.kv_nbytes": "a simulated engine is given its blocks; the pool raises beyond them",
    "engine.kv_landing_nbytes": "as engine.kv_nbytes: the pool of landing blocks raises, too",
    "engine.gpu_memory_utilization": _FOREIGN, "engine.threads": _FOREIGN,
    "timing.group_join_timeout_s": "a group that forms serves nobody; tests/roles looks at it",
    "engine.lora.max_loras": "the gateway refuses one more; tests/roles looks at it",
    "engine.lora.max_lora_rank": _FOREIGN,
    "engine.tensor_parallel_size": "how many ranks there are, not how much they may hold",
    "timing.retry_interval_s": _OFTEN, "timing.heartbeat_interval_s": _OFTEN,
    "engine.max_quantum_ms": _LEARNT, "engine.max_itl_impact": _LEARNT,
    "engine.min_step_tokens": _LEARNT,
    "engine.max_captured_tokens": "how a step is launched, not how large it may be",
    "prefill.hedge_after_s": "when a question is asked; `elsewhere` counts what comes of it",
    "prefill.min_measured_loads": "how much must be known, not how much may be held",
    "engine.min_partial_tokens": "what is worth a step, not how much may be held",
    "engine.speculative.prompt_lookup_min": "which drafts are made, not how many",
    "engine.speculative.prompt_lookup_max": "which drafts are made, not how many",
    "engine.block_size": _SHAPE, "engine.kv_layer_groups": _SHAPE,
    "encode.send_slot_nbytes": _SHAPE, "prefill.slot_nbytes": _SHAPE,
}  # fmt: skip
