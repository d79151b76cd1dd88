"""Work that ends as it is asked to, for a fork server."""

from __future__ import annotations

import ctypes
import os
import signal

from epd.api.expendable.fork_server import Say, Work


def prepare(greeting: str) -> Work:
    def work(request: bytes, say: Say) -> None:
        say(b"begun")
        match request.split():
            case [b"loop"]:
                while True:
                    pass
            case [b"sleep"]:
                signal.pause()
            case [b"take", nbytes]:
                bytearray(int(nbytes))
            case [b"crash"]:
                ctypes.string_at(8)
            case [b"abort"]:
                os.abort()
            case [b"end", b"server"]:
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
        say(greeting.encode() + request)

    return work
