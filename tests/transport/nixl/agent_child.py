"""One bare agent of NIXL in a process of its own: a line of JSON asks, a line answers."""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any

import numpy as np

from epd.transport.host_memory import address_of, anonymous
from epd.transport.nixl.library import MEMORY, load

module = load()


class Side:
    """The names of its methods are the questions."""

    def __init__(self) -> None:
        sync = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._api = module.nixl_agent(
            f"agent-{time.time_ns()}",
            module.nixl_agent_config(backends=["UCX"], sync_mode=sync),
        )
        self._handle: Any = None
        self._peer = ""

    def own(self, nbytes: int) -> list[Any]:
        """Registered memory, as a peer needs it."""
        self._memory = np.frombuffer(anonymous(nbytes), np.uint8)
        self._address = address_of(memoryview(self._memory))
        own = [(self._address, nbytes, 0, "")]
        self._registered = self._api.register_memory(own, MEMORY)
        metadata = self._api.get_partial_agent_metadata(self._registered, True, ["UCX"])
        return [base64.b64encode(metadata).decode(), self._address]

    def load(self, metadata: str, address: int) -> str:
        self._peer = self._api.add_remote_agent(base64.b64decode(metadata)).decode()
        self._target = address
        return self._peer

    def remove(self) -> None:
        self._api.remove_remote_agent(self._peer)

    def deregister(self) -> None:
        self._api.deregister_memory(self._registered)

    def fill(self, byte: int) -> None:
        self._memory[:] = byte

    def count(self, byte: int) -> int:
        return int(np.count_nonzero(self._memory == byte))

    def post(self, nbytes: int) -> str:
        ends = [
            self._api.get_xfer_descs([(address, nbytes, 0)], MEMORY)
            for address in (self._address, self._target)
        ]
        self._handle = self._api.initialize_xfer("WRITE", *ends, self._peer)
        return self._state(self._api.transfer)

    def wait(self, limit_s: float) -> str:
        """Its state when it has ended, or after so long."""
        until_s = time.monotonic() + limit_s
        while (state := self._state(self._api.check_xfer_state)) == "PROC":
            if time.monotonic() > until_s:
                break
            time.sleep(0.001)
        return state

    def _state(self, ask: Any) -> str:
        try:
            return str(ask(self._handle))
        except Exception as error:
            return type(error).__name__

    def release(self) -> None:
        self._api.release_xfer_handle(self._handle)

    def notifications(self) -> int:
        return len(self._api.get_new_notifs())


if __name__ == "__main__":
    side = Side()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(*arguments)), flush=True)
