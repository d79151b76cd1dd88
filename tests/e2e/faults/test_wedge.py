"""The thread of a device stands still, and its process's heart beats on (fault F87)."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import Reply, post_all, question
from tests.e2e.faults.one_thread import busiest, reap, stopped
from tests.e2e.server import READY_S, SLOW, Server, serving, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
NAME = "epd0"


def ask(server: Server, count: int, num_tokens: int) -> list[Reply]:
    bodies = [question(f"number {n}", max_tokens=num_tokens) for n in range(count)]
    return asyncio.run(post_all(server.base_url, bodies))


def device_thread(server: Server) -> int:
    """Of the first instance; steps of every kind were measured then."""
    return busiest(server.pid(NAME), lambda: ask(server, 6, 64))


def is_out(server: Server) -> bool:
    one = server.instances()[NAME]
    return one["state"] == "STUCK" and "makes no progress" in one["reason"]


def test_who_stands_still_is_out_of_placement_and_back_after_a_self_test() -> None:
    with serving("2epd") as server, ThreadPoolExecutor(1) as pool:
        thread = device_thread(server)
        with stopped(thread) as go_on:
            began_s = time.monotonic()
            asked = pool.submit(ask, server, 6, 16)
            wait_for(lambda: is_out(server), 5.0 * SLOW, f"{NAME} is out of placement")
            print(f"out of placement after {time.monotonic() - began_s:.1f} s")
            status, body = server.get("/ready")
            assert status == 200 and '"encode":["epd1"]' in body, "the other one serves"
            assert server.get("/health")[0] == 200
            waits = [name for name in server.metrics() if name.startswith("epd_wait_seconds{")]
            assert any(NAME in name for name in waits)
            assert all(reply.status == 200 for reply in ask(server, 4, 4))
            go_on()
        assert all(reply.status == 200 for reply in asked.result())
        wait_for(lambda: server.instances()[NAME]["state"] == "HEALTHY", READY_S, "it is back")
        assert server.instances()[NAME]["epoch"] and "gets no new work" in server.text


def test_who_never_goes_on_ends_and_is_started_again() -> None:
    """Its requests have one answer each, of whoever goes on with them."""
    with serving("2epd") as server, ThreadPoolExecutor(1) as pool:
        epoch, thread = server.instances()[NAME]["epoch"], device_thread(server)
        with stopped(thread):
            asked = pool.submit(ask, server, 6, 16)
            wait_for(lambda: is_out(server), 5.0 * SLOW, f"{NAME} is out of placement")

            def is_new() -> bool:
                reap(thread)
                one = server.instances()[NAME]
                return bool(one["epoch"] > epoch and one["state"] == "HEALTHY")

            wait_for(is_new, 60.0 + READY_S, "another life of it")
        assert all(reply.status == 200 for reply in asked.result())
        assert "device lost" in server.text and "no progress: " in server.text
