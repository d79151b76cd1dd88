"""An asyncio event loop on virtual time: one thread, no I/O, the same order in every run.

Theory of operation
-------------------
Callbacks that are ready run first in, first out; when none is, time jumps to the next timer.  Equal
times keep the order in which they were asked for.  Time stands still while a callback runs, so a
process is never preempted inside one, as in a real event loop.  The cost of a computation is a
timer of its simulated engine.

Each callback belongs to the process of the context that it was made in (see `core/process.py`).
Before it runs, its process is asked whether it still lives.  Tasks of killed processes are kept
here until the world ends: garbage collection of a coroutine would run its `finally` blocks, which
`kill -9` does not do.

`asyncio` itself iterates sets of tasks (`TaskGroup`, `wait`); tasks and futures made here hash by
their number, so that those orders are the same everywhere.

What would leave the simulation raises `SimulationEscape`: sockets, subprocesses, signals, threads
here, wall-clock reads in `epd_lab.sim.core.guard`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any

from epd_lab.sim.core.process import CURRENT, SimProcess

EXECUTOR_COST_S = 0.0005
IDLE_S = 0.005
SAME_TIME_LIMIT = 200_000


class SimulationEscape(RuntimeError):
    """Code under simulation tried to reach the real world."""


class Deadlock(RuntimeError):
    """Nothing can run any more, and the run has not ended."""


class StepLimitReached(RuntimeError):
    """The run used more steps than it was allowed: probably a livelock."""


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by its number."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimHandle(list[Any]):
    """A callback that waits for its turn, `[when_s, serial, callback, args, context, process]`;
    a list, because that is what a heap compares and a loop unpacks without running Python."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None

    def cancelled(self) -> bool:
        return self[2] is None

    def when(self) -> float:
        when_s: float = self[0]
        return when_s


# Before Python 3.12 asyncio keeps every task in a WeakSet of Python code for `all_tasks()`, which
# nothing asks for here (`SimLoop.open_tasks` knows them): an eighth of a run's time.
ALL_TASKS: Any = getattr(asyncio.tasks, "_all_tasks", None)


def _forget(task: asyncio.Task[Any]) -> None:
    """Instead of `ALL_TASKS.add`, while a simulation runs."""


NOWHERE = contextvars.Context()  # what belongs to no process shares one empty context


class SimLoop(asyncio.BaseEventLoop):
    """See the module's docstring."""

    def __init__(self, *, max_steps: int = 5_000_000) -> None:
        super().__init__()
        self.now_s = 0.0
        self.steps = 0
        self.max_steps = max_steps
        self.describe: Callable[[], str] = lambda: ""  # every machine's story, for failures
        self.marks: dict[str, int] = {}  # steps at which something of interest happened
        self.escaped: list[str] = []  # exceptions that nobody handled
        self.after_step: Callable[[], None] | None = None
        self.on_idle: list[Callable[[], None]] = []  # nothing happens for `IDLE_S` or longer
        self._ready_queue: deque[SimHandle] = deque()
        self._timers: list[SimHandle] = []  # a heap
        self._serial = itertools.count(1).__next__
        self._tasks: dict[int, SimTask] = {}
        self._prune_at = 64
        self._frozen = False
        self.set_exception_handler(self._note_escaped)

    # --- time and order ---------------------------------------------------------------------------

    get_debug = staticmethod(bool)  # never: each future asks, and this runs no Python

    def time(self) -> float:
        return self.now_s

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        if context is None:
            context = contextvars.copy_context()
        handle = SimHandle((0.0, 0, callback, args, context, context.get(CURRENT)))
        if not self._frozen:
            self._ready_queue.append(handle)
        return handle

    def call_next(self, callback: Any, *args: Any) -> None:
        """Run before anything else that is ready, outside every process."""
        self._ready_queue.appendleft(SimHandle((0.0, 0, callback, args, NOWHERE, None)))

    def call_outside(self, when_s: float, callback: Any, *args: Any) -> None:
        """Run then, whatever becomes of the process that asks."""
        if not self._frozen:
            timer = SimHandle((when_s, self._serial(), callback, args, NOWHERE, None))
            heappush(self._timers, timer)

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        if context is None:
            context = contextvars.copy_context()
        timer = SimHandle((when, self._serial(), callback, args, context, context.get(CURRENT)))
        if not self._frozen:
            heappush(self._timers, timer)
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    # --- running ----------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run until `future` is done.  Raises Deadlock, StepLimitReached."""
        owned = not asyncio.isfuture(future)
        task = self.create_task(future) if owned else future
        self.run_while(lambda: not task.done())
        return task.result()

    def run_until(self, until_s: float) -> None:
        """Run everything that is due up to and at `until_s`."""
        to_reach = [until_s]
        self.call_at(until_s, to_reach.clear)
        self.run_while(to_reach.__len__)

    def run_while(self, wanted: Callable[[], object]) -> None:
        """Run step by step while `wanted()` holds."""
        if events._get_running_loop() is not None:
            raise RuntimeError("a simulation cannot run inside another event loop")
        events._set_running_loop(self)
        if ALL_TASKS is not None:
            ALL_TASKS.add = _forget
        try:
            self._run(wanted)
        finally:
            if ALL_TASKS is not None:
                del ALL_TASKS.add
            events._set_running_loop(None)

    def _run(self, wanted: Callable[[], object]) -> None:
        ready, timers = self._ready_queue, self._timers
        next_ready, limit = ready.popleft, self.max_steps
        at_this_time = 0
        while wanted():
            if ready:
                handle = next_ready()
            elif timers:
                handle = heappop(timers)
                when_s = handle[0]
                if when_s > self.now_s and handle[2] is not None:
                    if when_s > self.now_s + IDLE_S:
                        for look in self.on_idle:
                            look()
                    self.now_s = when_s
                    at_this_time = 0
                while timers and timers[0][0] <= self.now_s:
                    ready.append(heappop(timers))
            else:
                raise Deadlock(f"nothing left to run at {self.now_s:.3f} s{self._stories()}")
            _, _, callback, args, context, process = handle
            if callback is None:
                continue
            if process is not None and not process.runs:
                if process.alive:
                    process.parked.append(handle)
                continue
            self.steps += 1
            at_this_time += 1
            if self.steps > limit or at_this_time > SAME_TIME_LIMIT:
                raise StepLimitReached(f"{self.steps} steps at {self.now_s:.3f} s{self._stories()}")
            try:
                if context is NOWHERE:
                    callback(*args)
                else:
                    context.run(callback, *args)
            except Exception as error:
                self.call_exception_handler(
                    {"message": f"exception in {callback}", "exception": error}
                )
            if self.after_step is not None:
                self.after_step()

    def _stories(self) -> str:
        told = self.describe()
        return f"; the machines:\n{told}" if told else ""

    # --- processes --------------------------------------------------------------------------------

    def kill(self, process: SimProcess) -> None:
        """`kill -9`: none of its callbacks runs any more."""
        process.alive = process.runs = False
        process.parked.clear()

    def stall(self, process: SimProcess) -> None:
        """SIGSTOP: its callbacks wait, in order."""
        process.stalled, process.runs = True, False

    def resume(self, process: SimProcess) -> None:
        """SIGCONT."""
        if process.stalled:
            process.stalled, process.runs = False, process.alive
            self._ready_queue.extend(process.parked)
            process.parked.clear()

    # --- tasks ------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        future = SimFuture(loop=self)
        future.number = self._serial()
        return future

    def create_task(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        number = self._serial()
        if name is None:
            name = f"task-{number}"  # not asyncio's counter, which outlives the loop
        task = SimTask(coroutine, loop=self, name=name, context=context)
        task.number = number
        self._tasks[task.number] = task
        if len(self._tasks) >= self._prune_at:
            self._tasks = {n: t for n, t in self._tasks.items() if not t.done()}
            self._prune_at = max(64, 2 * len(self._tasks))
        return task

    def open_tasks(self) -> list[SimTask]:
        return [task for task in self._tasks.values() if not task.done()]

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Inline work that takes a little virtual time."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(EXECUTOR_COST_S, work)
        return future

    def freeze(self) -> None:
        """The world ends: nothing is scheduled any more, and open coroutines are closed quietly."""
        self._frozen = True
        self._ready_queue.clear()
        self._timers.clear()
        for task in self.open_tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
        self._tasks.clear()
        self.close()

    # --- what would leave the simulation ----------------------------------------------------------

    def _note_escaped(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.escaped.append(f"{context.get('message')}: {error!r}")

    def _escape(self, *args: Any, **kwargs: Any) -> Any:
        raise SimulationEscape("real I/O inside the simulation: use the injected port instead")

    add_reader = remove_reader = add_writer = remove_writer = _escape
    sock_recv = sock_recv_into = sock_sendall = sock_connect = sock_accept = _escape
    create_connection = create_server = create_datagram_endpoint = _escape
    create_unix_connection = create_unix_server = _escape
    subprocess_shell = subprocess_exec = connect_read_pipe = connect_write_pipe = _escape
    getaddrinfo = getnameinfo = add_signal_handler = remove_signal_handler = _escape
    sendfile = start_tls = connect_accepted_socket = _escape

    def _process_events(self, event_list: Any) -> None:
        """No I/O, no events."""

    def run_forever(self) -> None:
        raise SimulationEscape("a simulation ends: use run_until or run_until_complete")


def _close(coroutine: Any) -> None:
    """Close a coroutine, and those that it was given before it ever ran."""
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == "CORO_CREATED":
        frame: Any = coroutine.cr_frame
        for value in list(frame.f_locals.values()):
            if inspect.iscoroutine(value):
                _close(value)
    try:
        coroutine.close()
    except BaseException:  # it awaited in a `finally`: it is over all the same
        return
