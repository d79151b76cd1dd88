"""A GPU as the data plane uses it, by the calls of CUDA's driver.

Memory comes from the virtual-memory calls, which count the processes that have mapped it.  It is
exported as a file descriptor.  Whoever imports it maps it for its own device, which makes the copy
a peer copy (two H200: 394 GB/s, and 38 if it is mapped for the owner's).  `cuda-bindings` comes
with torch where that is built for CUDA; nothing here is imported before it is used."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from epd.transport.cuda.device import Copies, DeviceError

UNTIMED = 2  # of an event
UNTIED = 1  # of a stream: to the default one
NOT_READY = 600  # CUDA_ERROR_NOT_READY
POLL_S = 20e-6
LINK_BYTES_PER_S = 450e9  # of NVLink 4, one way
AWAKE_S = 150e-6  # before copies can have ended at best, who waits is awake
LATE = 1.3  # times as long as at best: so late copies end as a rule
BATCH = "cuMemcpyBatchAsync_v2"  # of CUDA 13
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class Driver(NamedTuple):
    """NVIDIA's: by cuda-bindings, and calls of its library that take a microsecond or two.

    The latter keep the interpreter's lock: to let it go costs a turn of each thread that computes.
    A copy from pageable memory may block, and is not among them.
    """

    bindings: Any
    quick: Any

    def check(self, code: int) -> None:
        """What a quick call gives.  Raises DeviceError."""
        if code:
            raise DeviceError(self.bindings.CUresult(code).name)

    def lacks(self) -> str:
        """Why the transport cannot work with it; empty if it can."""
        driver = self.bindings
        _ask(driver.cuInit(0))
        count = _ask(driver.cuDeviceGetCount())
        if not count:
            return "transport cuda needs a GPU"
        if not hasattr(self.quick, BATCH):
            return "transport cuda needs NVIDIA's driver 580 or later"
        attributes = driver.CUdevice_attribute
        needed = (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        for index in range(count):
            device = _ask(driver.cuDeviceGet(index))
            if not all(_ask(driver.cuDeviceGetAttribute(one, device)) for one in needed):
                return f"GPU {index} cannot export memory as a file descriptor"
        return ""


@functools.cache
def installed() -> Driver:
    """This host's.  Raises ImportError and OSError."""
    from cuda.bindings import driver

    library = ctypes.PyDLL("libcuda.so.1")
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuEventRecord.argtypes = [pointer, pointer]
    library.cuStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, size, pointer]
    if hasattr(library, BATCH):
        columns, attributes = [pointer] * 3, [pointer, pointer]
        getattr(library, BATCH).argtypes = [*columns, size, *attributes, size, pointer]
    return Driver(driver, library)


@functools.cache
def missing() -> str:
    """Why this host cannot use the transport; empty if it can."""
    if importlib.util.find_spec("cuda") is None or not importlib.util.find_spec("cuda.bindings"):
        return "transport cuda needs cuda-bindings, which comes with torch for CUDA"
    try:
        return installed().lacks()
    except Exception as error:  # a driver that is not there, or too old
        return f"transport cuda: NVIDIA's driver does not work here ({error})"


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; places are of managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


ATTRIBUTES = _Attributes(IN_STREAM_ORDER)  # of all copies from
FIRST = ctypes.c_size_t(0)  # on


def _ask(answer: Any) -> Any:
    """What a call of the bindings gives.  Raises DeviceError."""
    error, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(error):
        raise DeviceError(getattr(error, "name", str(error)))
    return values[0] if len(values) == 1 else tuple(values)


class DeviceBytes:
    """A part of a device's memory, to be sliced; torch takes it as a tensor without a copy."""

    def __init__(self, memory: CudaMemory, offset: int, nbytes: int) -> None:
        self._memory = memory
        self._offset = offset
        self.nbytes = nbytes
        self.device = memory.place

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._memory.address + self._offset, False),
            "version": 3,
        }

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBytes(self._memory, self._offset + start, max(0, stop - start))

    def read(self) -> memoryview:
        """A copy in host memory; blocks."""
        return memoryview(self._memory.read(self._offset, self.nbytes))


class CudaMemory:
    """Mapped for one device; unmapped when nothing refers to it, or at once (`close`)."""

    def __init__(self, device: CudaDevice, handle: Any, nbytes: int) -> None:
        driver, self._device = device.driver, device
        self._handle = handle
        self.place = device.name
        self.nbytes = nbytes
        self.address = int(_ask(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
        _ask(driver.cuMemMap(self.address, nbytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = device.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _ask(driver.cuMemSetAccess(self.address, nbytes, [access], 1))
        end = weakref.finalize(self, _unmap, driver, handle, self.address, nbytes)
        end.atexit = False  # the driver does it, in an order of its own
        self._unmap: Callable[[], object] = end

    @property
    def whole(self) -> DeviceBytes:
        return DeviceBytes(self, 0, self.nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._device.read(self.address + offset, nbytes)

    def export(self) -> int:
        driver = self._device.driver
        return int(_ask(driver.cuMemExportToShareableHandle(self._handle, self._device.fd_type, 0)))

    def close(self) -> None:
        self._unmap()


class PlainMemory(CudaMemory):
    """As other libraries take it, which hand it on by handles of their own."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, self.place, self.nbytes = device, device.name, nbytes
        self.address = int(_ask(device.driver.cuMemAlloc(nbytes)))
        self._unmap = end = weakref.finalize(self, device.driver.cuMemFree, self.address)
        end.atexit = False  # see `CudaMemory`

    def export(self) -> int:
        raise DeviceError("this memory has no file descriptor")


def _unmap(driver: Any, handle: Any, address: int, nbytes: int) -> None:
    driver.cuMemUnmap(address, nbytes)
    driver.cuMemRelease(handle)
    driver.cuMemAddressFree(address, nbytes)


class CudaDevice:
    """See `Device`.  Raises DeviceError.

    A waiting thread asks again and again while the copies are expected to end, without the
    interpreter's lock, and sleeps before: to be woken by the end would take longer.  If they take
    longer than that, it sleeps between two questions.

    Many copies are shared out to two streams, so that some begin while others end.
    """

    def __init__(self, index: int, its: Driver | None = None) -> None:
        its = its or installed()
        self.driver = driver = its.bindings
        self._quick, self._check = its.quick, its.check
        self._batch = getattr(its.quick, BATCH)
        self._of_all = (ctypes.byref(ATTRIBUTES), ctypes.byref(FIRST), 1)
        _ask(driver.cuInit(0))
        self.name = f"cuda:{index}"
        self._own = _ask(driver.cuDeviceGet(index))
        self._context = int(_ask(driver.cuDevicePrimaryCtxRetain(self._own)))
        types = driver.CUmemAllocationHandleType
        self.fd_type = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._properties.requestedHandleTypes = self.fd_type
        self.location = self._properties.location
        self.enter()
        self._first, self._second = (int(_ask(driver.cuStreamCreate(UNTIED))) for _ in range(2))
        self._joined = self._new_event()
        self._is_split = False  # since the last mark, something is on the second stream
        self._queued_nbytes = 0  # since then
        self._marks: list[int] = []  # events that nobody waits for

    def _new_event(self) -> int:
        return int(_ask(self.driver.cuEventCreate(UNTIMED)))

    def enter(self) -> None:
        """The calling thread works on this device."""
        self._check(self._quick.cuCtxSetCurrent(self._context))

    @property
    def domain(self) -> str:
        """The GPUs that this one reaches, among those that this process sees, and itself."""
        driver = self.driver
        seen = [_ask(driver.cuDeviceGet(i)) for i in range(_ask(driver.cuDeviceGetCount()))]
        reached = [
            device
            for device in seen
            if int(device) == int(self._own)
            or _ask(driver.cuDeviceCanAccessPeer(self._own, device))
        ]
        return ",".join(sorted(bytes(_ask(driver.cuDeviceGetUuid(d)).bytes).hex() for d in reached))

    def allocate(self, nbytes: int) -> CudaMemory:
        self.enter()
        size = self._rounded(nbytes)
        memory = CudaMemory(self, _ask(self.driver.cuMemCreate(size, self._properties, 0)), size)
        return self._zeroed(memory)

    def allocate_plain(self, nbytes: int) -> CudaMemory:
        """Zeroed; not for `open`.  Raises DeviceError."""
        self.enter()
        return self._zeroed(PlainMemory(self, nbytes))

    def _zeroed(self, memory: CudaMemory) -> CudaMemory:
        _ask(self.driver.cuMemsetD8(memory.address, 0, memory.nbytes))
        _ask(self.driver.cuCtxSynchronize())
        return memory

    def _rounded(self, nbytes: int) -> int:
        kind = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit: int = _ask(self.driver.cuMemGetAllocationGranularity(self._properties, kind))
        return -(-nbytes // unit) * unit

    def open(self, fd: int, nbytes: int) -> CudaMemory:
        self.enter()
        handle = _ask(self.driver.cuMemImportFromShareableHandle(fd, self.fd_type))
        return CudaMemory(self, handle, self._rounded(nbytes))

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self.enter()
        self._queued_nbytes += nbytes
        _ask(self.driver.cuMemcpyAsync(target, source, nbytes, self._first))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.enter()
        self._queued_nbytes += nbytes
        self._check(self._quick.cuMemcpyAsync(target, source, nbytes, self._first))

    def copy_all(self, copies: Copies) -> None:
        self.enter()
        ends = np.cumsum(copies.nbytes)
        self._queued_nbytes += int(ends[-1])
        half = max(1, int(np.searchsorted(ends, ends[-1] / 2, "right")))
        self._queue(copies[:half], self._first)
        if half < len(copies):
            self._is_split = True
            self._queue(copies[half:], self._second)

    def _queue(self, copies: Copies, stream: int) -> None:
        self._check(self._batch(*copies.places, len(copies), *self._of_all, stream))

    def mark(self) -> Callable[[], None]:
        self.enter()
        quick = self._quick
        if self._is_split:
            self._check(quick.cuEventRecord(self._joined, self._second))
            self._check(quick.cuStreamWaitEvent(self._first, self._joined, 0))
            self._is_split = False
        event = self._marks.pop() if self._marks else self._new_event()
        self._check(quick.cuEventRecord(event, self._first))
        best_s = self._queued_nbytes / LINK_BYTES_PER_S
        self._queued_nbytes = 0

        def passed() -> None:
            self.enter()
            due_s = time.perf_counter() + LATE * best_s + AWAKE_S
            if best_s > AWAKE_S:
                time.sleep(best_s - AWAKE_S)
            while int((code := self.driver.cuEventQuery(event))[0]) == NOT_READY:
                if time.perf_counter() > due_s:
                    time.sleep(POLL_S)
            _ask(code)
            self._marks.append(event)

        return passed

    def read(self, address: int, nbytes: int) -> bytes:
        self.enter()
        data = bytearray(nbytes)
        _ask(self.driver.cuMemcpyDtoH(data, address, nbytes))
        return bytes(data)
