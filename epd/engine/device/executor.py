"""Blocking work off the event loop: one launch thread per device, a small pool for images.

Theory of operation
-------------------
`launch` queues a call for the device's one launch thread,
so calls run in the order in which they were queued, whatever awaits them.  `compute` hands image
decoding to a pool.  Both give an asyncio future, resolved through `call_soon_threadsafe`.

A long call (`launch_long`) gives way before each of its parts (`give_way`): queued calls run up to
the first step, unless a step has run since the part before.  Another long call never comes
between.  A brief one (`launch_brief`) takes no step's turn: where KV lands ten times between two
steps, streams would wait for as many parts of an image.

In a group of ranks the launch thread decides nothing.  A long call waits where it is cut (`pause`)
and runs queued calls, in order, until it meets `go_on` there.

When is a launched call done?  On a CPU when it has returned; on a GPU when the event recorded after
its last kernel has passed.  That difference is the `Completion` port: the launch thread hands it a
callback and goes on to the next call.  A call whose result lies in memory that the device still
fills returns a `Deferred`; its `finish` runs behind the completion and gives the result.

A call that raises may have launched work before; it, too, is over when its completion has fired.
Some errors of a GPU are sticky: every later call of the process fails at once.  So after an error
the completion is asked whether the device still works.  If not, the error is `DeviceLost` and the
instance must end: one that fails all work at once has no load and would get more (fault F49).  A
thread that ends by itself (its start fails, or code around a call raises) gives the same error to
all waiting and later calls.

Cancelling the future does not cancel the work: it goes on and its result is dropped.  The queue
entry, and through it every tensor of the call, lives until the completion has fired, so nothing is
freed under a running kernel.

Both queues have a bound; a full one raises EngineError at once (work waits in the role's own
queue)."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from epd.engine.base import LAUNCH_STACK_NBYTES, DeviceLost, EngineError, nothing

T = TypeVar("T")
Deliver = Callable[[BaseException | None], None]


class Weight(Enum):
    """Of a call, for the device."""

    BRIEF = "hardly any"
    STEP = "one of those who take turns"
    LONG = "cut into parts"
    GO_ON = "none: a long call that waits for its turn has it"


@dataclass(frozen=True, slots=True)
class Deferred(Generic[T]):
    """A launched call's word that its result is ready once the device has passed it.

    `lane`: the stream whose end counts, where that is not the one of the kernels.
    """

    finish: Callable[[], T]  # on the thread that waits for the device; does not block
    lane: str = ""


class Completion:
    """When work launched by the calling thread is done; here, on a CPU: when the call has
    returned."""

    def watch(self, deliver: Deliver, lane: str = "") -> None:
        """Call `deliver(error or None)` once, from any thread, when all work launched so far by the
        calling thread (into the stream of that lane) is done.  Does not block."""
        deliver(None)

    def works(self) -> bool:
        """Whether the device still takes work; asked after an error, from any thread."""
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for what is watched, at most so long."""


@dataclass(slots=True)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    weight: Weight
    future: asyncio.Future[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    def complete(self, result: Any, error: BaseException | None) -> None:
        """From any thread: what the call returned, now that the device has passed it."""
        if error is None and isinstance(result, Deferred):
            try:
                result = result.finish()
            except BaseException as raised:
                error = raised
        self.resolve(result, error)

    def resolve(self, result: Any, error: BaseException | None) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # cancelled: the result is dropped
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.future.set_exception(error)
        else:  # SystemExit in a future would end the loop; StopIteration a future cannot carry
            self.future.set_exception(EngineError(f"a call ended with {error!r}"))


class _Threads:
    """Threads that serve one bounded queue in order."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_queue: int,
        completion: Completion,
        on_start: Callable[[], None] = lambda: None,
        stack_nbytes: int = 0,
    ) -> None:
        """`stack_nbytes`: of each thread; 0: what threads have."""
        self._on_start = on_start
        self._name = name
        self._max_queue = max_queue
        self._completion = completion
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._ending = False  # the word to end was read
        self._lost: DeviceLost | None = None  # a thread has ended by itself
        self._postponed: deque[_Job] = deque()  # long calls that were met within one
        self._is_due = False  # nothing else has run since a long call gave way
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        usual_nbytes = threading.stack_size(stack_nbytes)
        for thread in self._threads:
            thread.start()
        threading.stack_size(usual_nbytes)

    def submit(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], weight: Weight = Weight.STEP
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise EngineError(f"{self._name} is closed; no new work is accepted")
        is_full = self._jobs.qsize() + len(self._postponed) >= self._max_queue
        if is_full and weight is not Weight.GO_ON:  # which nothing else could make up for
            raise EngineError(f"{self._name} has {self._max_queue} calls waiting; try again later")
        job = _Job(function, arguments, asyncio.get_running_loop(), weight)
        self._jobs.put(job)
        if self._lost is not None:  # who ended has emptied the queue before this came
            self._refuse_all(self._lost)
        return job.future

    def close(self) -> None:
        """No new work; what is queued still runs."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, until_s: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        job: _Job | None = None
        try:
            self._on_start()
            while self._postponed or not self._ending:
                job = self._postponed.popleft() if self._postponed else self._jobs.get()
                self._take(job)
                job = None  # a call's tensors must not outlive it until the next one arrives
        except BaseException as error:
            self._lost = DeviceLost(f"a thread of {self._name} has ended: {error!r}")
            if job is not None:
                job.resolve(None, self._lost)
            while self._postponed:
                self._postponed.popleft().resolve(None, self._lost)
            self._refuse_all(self._lost)

    def _refuse_all(self, error: DeviceLost) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.resolve(None, error)

    def _take(self, job: _Job | None) -> None:
        if job is None:
            self._ending = True
        else:
            self._run(job)

    def give_way(self) -> bool:
        was_due = self._is_due
        with contextlib.suppress(queue.Empty):
            while self._is_due:
                self._let_in(self._jobs.get_nowait())
        has_run, self._is_due = was_due and not self._is_due, True
        return has_run

    def pause(self) -> bool:
        self._is_due = True
        while not self._ending:
            if self._let_in(self._jobs.get()) is Weight.GO_ON:
                return not self._is_due
        raise EngineError(f"{self._name} is closed; a call that waited for its turn has ended")

    def _let_in(self, job: _Job | None) -> Weight | None:
        """From within a long call: another one comes behind it."""
        if job is not None and job.weight is Weight.LONG:
            self._postponed.append(job)
        else:
            self._take(job)
        return None if job is None else job.weight

    def _run(self, job: _Job) -> None:
        self._is_due &= job.weight is not Weight.STEP
        result: Any = None
        failure: BaseException | None = None
        try:
            result = job.function(*job.arguments)
        except BaseException as error:
            failure = error

        def over(error: BaseException | None) -> None:
            job.complete(result, self._judged(failure or error))

        try:
            self._completion.watch(over, result.lane if isinstance(result, Deferred) else "")
        except BaseException as error:
            over(error)

    def _judged(self, error: BaseException | None) -> BaseException | None:
        if error is None:
            return None
        try:
            works = self._completion.works()
        except Exception:  # who cannot even be asked
            works = False
        return error if works else DeviceLost(f"the device does not work any more: {error}")


class DeviceExecutor:
    def __init__(
        self,
        name: str = "device",
        *,
        num_pool_threads: int = 2,
        max_queue: int = 1024,
        completion: Completion | None = None,
        on_start: Callable[[], None] = lambda: None,
        streams: Any = None,
    ) -> None:
        """`streams`: of a CUDA device (`DeviceStreams`), for the engines on it.  `on_start` runs
        first on the launch thread: which device is current is thread-local."""
        self.streams, self.on_start = streams, on_start
        self._completion: Completion = completion or Completion()
        self._launch = _Threads(
            f"{name}-launch", 1, max_queue, self._completion, on_start, LAUNCH_STACK_NBYTES
        )
        self._pool = _Threads(f"{name}-pool", num_pool_threads, max_queue, Completion())
        self._num_pool_threads = num_pool_threads
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = WeakKeyDictionary()

    def launch(
        self, function: Callable[..., T | Deferred[T]], *arguments: Any
    ) -> asyncio.Future[T]:
        """Run on the launch thread, after everything launched before.  Raises EngineError."""
        return self._launch.submit(function, arguments)

    def launch_long(
        self, function: Callable[..., T | Deferred[T]], *arguments: Any
    ) -> asyncio.Future[T]:
        """As `launch`, for work that holds others up; among such calls the order is kept."""
        return self._launch.submit(function, arguments, Weight.LONG)

    def launch_brief(
        self, function: Callable[..., T | Deferred[T]], *arguments: Any
    ) -> asyncio.Future[T]:
        """As `launch`, for work that holds nobody up: a long call gives way to a step besides."""
        return self._launch.submit(function, arguments, Weight.BRIEF)

    def give_way(self) -> bool:
        """From within a long call, before a part of it: run what is queued up to the first step,
        unless a step has run since the part before.  Other long calls are put off.  Whether a step
        has run."""
        return self._launch.give_way()

    def pause(self) -> bool:
        """From within a long call, before a part of it: run whatever is queued, in order, until
        `go_on` is met there.  Whether a step has run.  Raises EngineError where nothing is to
        come."""
        return self._launch.pause()

    def go_on(self) -> asyncio.Future[list[Any]]:
        """Whoever is in `pause` when this is met goes on.  Done, with nothing, when the device has
        passed what was launched before."""
        return self._launch.submit(list, (), Weight.GO_ON)

    def here(self, then: Callable[[], object] = nothing) -> threading.Event:
        """From within a launched call: set when the device has passed what is launched so far.
        `then` is called before, from any thread, unless the device has failed."""
        passed = threading.Event()

        def deliver(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the device has failed since; a loop is closed
                if error is None:
                    then()
            passed.set()

        try:
            self._completion.watch(deliver)
        except Exception:  # the call will meet the same error
            passed.set()
        return passed

    def mark(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """From within a launched call: run `callback` on the loop when the device has passed all
        that the call has launched so far.  It is run before the call's result arrives, or never."""
        self.here(partial(loop.call_soon_threadsafe, callback))

    def compute(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run on a pool thread, in no promised order.  Raises EngineError."""
        return self._pool.submit(function, arguments)

    async def compute_in_turn(
        self, on_begin: Callable[[], None], function: Callable[..., T], *arguments: Any
    ) -> T:
        """As `compute`, in the order of the calls, each when no other one of these keeps a thread;
        `on_begin` is called on the loop before."""
        fresh = asyncio.Semaphore(self._num_pool_threads)
        async with self._turns.setdefault(asyncio.get_running_loop(), fresh):
            on_begin()
            return await self.compute(function, *arguments)

    async def rest(self, timeout_s: float = 5.0) -> bool:
        """Whether the device has passed all that was launched until now, within that time."""
        passed = self.launch(nothing if self.streams is None else self.streams.wait)
        await asyncio.wait((passed,), timeout=timeout_s)
        return passed.done() and passed.exception() is None

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Run what is queued, then stop.  False: a thread still ran after `timeout_s`; threads are
        daemons, so it does not keep the process alive."""
        until_s = time.monotonic() + timeout_s
        self._launch.close()
        self._pool.close()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._join, until_s)

    def _join(self, until_s: float) -> bool:
        joined = all([self._launch.join(until_s), self._pool.join(until_s)])
        self._completion.close(max(0.0, until_s - time.monotonic()))
        return joined
