"""Settings of the clusters that tests share (conftest.py)."""

from __future__ import annotations

DEADLINE_S = 300.0
MAX_OPEN_REQUESTS = 60
MAX_BODY_NBYTES = 8 << 20
MAX_IMAGE_NBYTES = 1 << 20
FETCH_TIMEOUT_S = 4.0
APART: dict[str, object] = {
    "limits__max_open_requests": MAX_OPEN_REQUESTS,
    "limits__max_body_nbytes": MAX_BODY_NBYTES,
    "timing__request_timeout_s": DEADLINE_S,
    "timing__kv_lease_s": 60,
    "metrics_names": "vllm",
}
TOGETHER: dict[str, object] = {
    "limits__allow_private_networks": "true",
    "limits__max_image_nbytes": MAX_IMAGE_NBYTES,
    "limits__fetch_timeout_s": FETCH_TIMEOUT_S,
}
