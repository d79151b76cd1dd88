"""Connectors by the names that vLLM gives them, and what each of them is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Connector:
    """What a connector of theirs is here; `extra`: keys of its own configuration to settings."""

    transport: str
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_foreign: bool = False  # its own configuration is its own business


@dataclass(frozen=True, slots=True)
class Hop:
    """One of the two hops: the prefix of its keys, its ends, its connectors."""

    prefix: str
    flag: str
    sends: str
    takes: str
    connectors: Mapping[str, Connector]
    buffers: Mapping[str, str]  # which setting a buffer size is, by claim


_FILE = Connector(
    "file", {"shared_storage_path": ("transport_directory",)}, needs=("shared_storage_path",)
)
_EC_FILE = Connector(  # rows move through the directory, and stay in it
    "file",
    {"shared_storage_path": ("transport_directory", "encode.cache_dir")},
    needs=("shared_storage_path",),
)
_MOONCAKE = Connector(
    "mooncake",
    {
        "mooncake_protocol": ("mooncake.protocol",),
        "protocol": ("mooncake.protocol",),
        "device_name": ("mooncake.devices",),
    },
)
_EC_MOONCAKE = Connector(
    "mooncake", {**_MOONCAKE.extra, "master_server_address": ("encode.cache_store",)}
)
_AUTO = Connector("auto")
_NIXL = Connector("nixl")
_NCCL = "there is no NCCL transport: write auto, which takes the best way that both instances offer"
_LMCACHE = "KV is kept and found by its content in each instance anyway: write auto"
_OFFLOAD = "KV is not offloaded to host memory: give the pool more, --kv-nbytes; drop the flag"
REMEDIES = {  # connectors of theirs that have no likeness here, and what to do instead
    "ECCPUConnector": "rows stay in host memory anyway: write auto",
    "LMCacheConnectorV1": _LMCACHE,
    "LMCacheMPConnector": _LMCACHE,
    "MooncakeStoreConnector": "KV is not kept in a store: write MooncakeConnector to move it",
    "MultiConnector": "write auto: an instance offers several ways, and each pair takes the best",
    "OffloadingConnector": _OFFLOAD,
    "P2pNcclConnector": _NCCL,
    "PyNcclConnector": _NCCL,
    "SimpleCPUOffloadConnector": _OFFLOAD,
}
BUFFER_DEVICES = ("cpu", "cuda")

EC = Hop(
    "ec",
    "--ec-transfer-config",
    "encode",
    "prefill",
    {
        "ECExampleConnector": _EC_FILE,
        "ECSharedStorageConnector": _EC_FILE,
        "ECMooncakeConnector": _EC_MOONCAKE,
        "SHMConnector": Connector("shm"),
        "auto": _AUTO,
    },
    {"producer": "encode.send_buffer_nbytes", "consumer": "prefill.pool_nbytes"},
)
KV = Hop(
    "kv",
    "--kv-transfer-config",
    "prefill",
    "decode",
    {
        "ExampleConnector": _FILE,
        "SharedStorageConnector": _FILE,
        "MooncakeConnector": _MOONCAKE,
        "NixlConnector": _NIXL,
        "SHMConnector": Connector("shm"),
        "auto": _AUTO,
    },
    {"producer": "engine.kv_nbytes", "consumer": "engine.kv_nbytes"},
)
