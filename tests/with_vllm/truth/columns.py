"""The columns with vLLM: our gateway and encoders in front of two servers, and vLLM alone.

vLLM alone has an ECExampleConnector between two encoders and a server of prefill and decode, then
a NixlConnector between prefill and decode; its front is the algorithm of its example proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import psutil
from safetensors.torch import load_file, save_file

from epd.cli.start.ports import any_free
from epd.vllm.command import kv_transfer_config, transfer_config
from epd_lab.bench.chaos.process import ClusterFailed, Command, wait_for
from epd_lab.bench.truth.cluster import Skipped, TruthCluster
from epd_lab.bench.truth.ours import DTYPE, OurCluster
from epd_lab.bench.truth.run import TOPOLOGY
from tests.with_vllm.server import START_S, TIMING, VllmServer
from tests.with_vllm.truth.files import LEFT, RowFiles, leave_rows
from tests.with_vllm.truth.proxy import ExampleProxy


class TruthServer(VllmServer):
    """With the connectors that a column has."""

    def __init__(self, model: Path, *, ec: object = None, kv: object = None, port: int = 0) -> None:
        """`ec`, `kv`: what its two connectors are given."""
        port = port or any_free("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        configs = {"--ec-transfer-config": ec, "--kv-transfer-config": kv}
        given = [(flag, json.dumps(config)) for flag, config in configs.items() if config]
        Command.__init__(
            self,
            *(str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"),
            *("--port", str(port), "--dtype", DTYPE, "--max-model-len", "1024"),
            *("--enforce-eager", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.1"),
            *("--limit-mm-per-prompt", '{"image": 16, "video": 0}', "--enable-scale-out"),
            *(word for pair in given for word in pair),
        )

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def serves(self) -> bool:
        return self.get("/health") == 200


class Servers:
    """vLLM servers by name.  What does not serve is started anew, all of these at once."""

    def __init__(self, make: Callable[[str], TruthServer]) -> None:
        self._make = make
        self.by_name: dict[str, TruthServer] = {}

    def __getitem__(self, name: str) -> TruthServer:
        return self.by_name[name]

    def serve(self, *names: str) -> None:
        """These, and no others.  Raises ClusterFailed."""
        for name, server in list(self.by_name.items()):
            if name not in names or not server.serves():
                self.by_name.pop(name).discard()
        for name in names:
            if name not in self.by_name:
                self.by_name[name] = self._make(name)
        for server in self.by_name.values():
            ends = lambda s=server: s.serves() or s.process.poll() is not None  # noqa: E731
            wait_for(ends, START_S, "vLLM is up, or has ended")
            if not server.serves():
                raise ClusterFailed(server.text[-2000:])

    def close(self) -> None:
        for server in self.by_name.values():
            server.discard()


class OurColumn(OurCluster):
    """This project alone, with rows that an earlier life left."""

    def __init__(self, directory: Path, model: Path, topology: str, *flags: str) -> None:
        self.files = RowFiles(directory / "rows")
        kept = ("--encoder-cache-dir", str(self.files.directory))
        super().__init__(topology, *kept, *flags, model=model)
        self.directory = directory

    async def begin(self) -> str:
        assert self.model is not None
        await leave_rows(self.files, self, self.model)
        return await asyncio.to_thread(self.start)

    async def end(self) -> None:
        self.close()


def our_column(directory: Path, model: Path) -> OurColumn:
    return OurColumn(directory, model, TOPOLOGY)


class FrontCluster(OurColumn):
    """Gateway and encoders of this project; vLLM servers compute prompts and answers."""

    names: ClassVar = {
        "e+pd": ("pd0", "pd1"),
        "2p+d": ("p0", "p1", "d0"),
        "p+2d": ("p0", "d0", "d1"),
    }
    roles: ClassVar = {"p": "prefill", "d": "decode"}

    def __init__(self, directory: Path, model: Path) -> None:
        endpoint = f"tcp://127.0.0.1:{any_free('127.0.0.1')}"
        super().__init__(directory, model, "2e", "--for", "vllm", "--listen", endpoint)
        self._endpoint, self.servers = endpoint, Servers(self._make)

    def _make(self, name: str) -> TruthServer:
        role, port = self.roles.get(name[:-1]), any_free("127.0.0.1")
        run_dir = f"{self.gateway.run_dir}-{name}"
        flags = f"--join {self._endpoint} --id {name} --run-dir {run_dir}"
        flags += f" --role {role}" if role else ""
        config = transfer_config(f"http://127.0.0.1:{port}", flags)
        kv = kv_transfer_config("cpu", TIMING.token_timeout_s) if role else None
        assert self.model is not None
        return TruthServer(self.model, ec=config, kv=kv, port=port)

    def ready(self, setup: str) -> None:
        self.servers.serve(*self.names[setup])
        self.gateway.wait_healthy(2 + len(self.names[setup]))

    def victims(self, role: str) -> Sequence[Callable[[], None]]:
        if role == "encode":
            return super().victims(role)
        kind = role if role == "pd" else role[0]
        return [one.kill for name, one in self.servers.by_name.items() if name[:-1] == kind]

    def encoder_url(self) -> str:
        raise Skipped("its encoders have no port for clients")

    def engine_url(self) -> str:
        return self.servers["pd0"].url

    def metrics_urls(self) -> Sequence[str]:
        servers = self.servers.by_name.values()
        return [self.gateway.base_url, *(server.url for server in servers)]

    def close(self) -> None:
        self.servers.close()
        super().close()


class VllmCluster(TruthCluster):
    """vLLM alone, in two setups."""

    names: ClassVar = {"e+pd": ("e0", "e1", "pd"), "2p+d": ("p", "d"), "p+2d": ("p", "d")}
    roles: ClassVar = {"encode": ("e0", "e1"), "pd": ("pd",), "prefill": ("p",), "decode": ("d",)}

    def __init__(self, directory: Path, model: Path) -> None:
        self._model = model
        self.files = RowFiles(directory / "rows")
        self.files.directory.mkdir()
        self.servers = Servers(self._make)
        self.proxy = ExampleProxy(any_free("127.0.0.1"))

    def _make(self, name: str) -> TruthServer:
        if name in {"p", "d"}:
            kv = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            return TruthServer(self._model, kv=kv)
        role = "ec_producer" if name in self.roles["encode"] else "ec_consumer"
        store = {"shared_storage_path": str(self.files.directory)}
        ec = {"ec_connector": "ECExampleConnector", "ec_role": role}
        return TruthServer(self._model, ec=ec | {"ec_connector_extra_config": store})

    async def begin(self) -> str:
        """Rows are left by an encoder alone; their file names no checkpoint, so another one's are
        made of it."""
        await self.proxy.open()
        await asyncio.to_thread(self.ready, "e+pd")
        await self.files.left_by(self.servers["e0"].url, list(LEFT))
        stale = self.files.by_kind["stale"]
        save_file({name: -one for name, one in load_file(stale).items()}, stale)
        return self.proxy.url

    def ready(self, setup: str) -> None:
        self.servers.serve(*self.names[setup])
        urls = {name: server.url for name, server in self.servers.by_name.items()}
        self.proxy.encoders = [urls[name] for name in self.roles["encode"] if name in urls]
        self.proxy.prefill, self.proxy.decode = urls.get("p", ""), urls.get("d") or urls["pd"]

    def victims(self, role: str) -> Sequence[Callable[[], None]]:
        return [self.servers[name].kill for name in self.roles[role]]

    def encoder_url(self) -> str:
        return self.servers["e0"].url

    def engine_url(self) -> str:
        return self.servers["pd"].url

    def metrics_urls(self) -> Sequence[str]:
        return [server.url for server in self.servers.by_name.values()]

    async def end(self) -> None:
        self.servers.close()
        await self.proxy.close()
