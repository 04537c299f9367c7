"""A program for custom storage (driver 615): ``python custom_storage.py DIRECTORY``.

The driver maps the GPU memory of another process, and the program copies it to files and back. Data passes through a
ring of host memory that is allocated once. For speed, it uses huge pages if available, is populated before use, and is
page-locked during each operation if the driver permits it. While a block is transferred to or from the GPU, threads
write the blocks before it (or read the blocks after it).

A process whose memory is mapped cannot be released without completing the operation, so everything that can fail is
done before: reserving space for the files and creating contexts. Blocks that nevertheless cannot be written are kept in
host memory, and the process is restored from them.

Source: CUDA driver API 13.4, ``cuCheckpointProcessCheckpoint``, ``cuCheckpointOperationComplete``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _REPOSITORY = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_REPOSITORY), str(_REPOSITORY / "tests")]

from gpu import protocol

from slurm_affinode.checkpoint.cuda import driver as cuda_driver
from slurm_affinode.checkpoint.cuda.driver import Driver, DriverCallError, NotAvailableError
from slurm_affinode.checkpoint.cuda.features import COMPLETE, ENTRY_POINTS

BLOCK = 64 << 20
SLOTS = 4
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_OUT_AT = {"CUcheckpointCheckpointArgs": 0, "CUcheckpointRestoreArgs": 16}
"""Offset of ``customStorageInfo_out`` in the structure, in bytes."""


class StorageError(Exception):
    """The files cannot be written or read. The text is one line."""


class _PerDevice(ctypes.Structure):
    _fields_ = (("devPtr", ctypes.c_uint64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p))


class _Info(ctypes.Structure):
    _fields_ = (("handle", ctypes.c_void_p), ("devices", ctypes.POINTER(_PerDevice)), ("count", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """The process's memory on one GPU, mapped into this process."""

    uuid: str
    ordinal: int
    at: int
    size: int
    stream: int


class Storage:
    """Copies GPU memory to files and back."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ring = _ring()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._ring))
        self._slots = [memoryview(self._ring)[at * BLOCK : (at + 1) * BLOCK] for at in range(SLOTS)]
        self._kept: set[str] = set()
        """UUIDs of the GPUs with a retained primary context."""

    def checkpoint(self, pid: int, directory: str, held: Mapping[str, int]) -> list[dict[str, Any]]:
        """LOCKED -> CHECKPOINTED, with one file per GPU of ``held`` (UUID -> upper bound of the memory in bytes).

        Raises ``StorageError`` if there is no space or a file cannot be written. In the latter case the process has
        been restored; in both cases it is LOCKED.
        """
        self._driver.initialise()
        place = Path(directory)
        files = _reserved(place, pid, held)
        try:
            with self._contexts(list(held)):
                handle, mapped = self._mapped("CUcheckpointCheckpointArgs", "cuCheckpointProcessCheckpoint", pid, None)
                rescued = self._copy_out(mapped, place, files)
                self._complete(handle)
            stored = [{"uuid": memory.uuid, "file": files[memory.uuid], "size": memory.size} for memory in mapped]
            if rescued:
                self.restore(pid, directory, stored, rescued=rescued)
        except BaseException:
            _removed(place, files.values())
            raise
        if rescued:
            _removed(place, files.values())
            raise StorageError(f"{directory}: {len(rescued)} blocks could not be written; the process was restored")
        return stored

    def restore(
        self,
        pid: int,
        directory: str,
        stored: Sequence[Mapping[str, Any]],
        pairs: Mapping[str, str] | None = None,
        rescued: Mapping[tuple[str, int], bytes] | None = None,
    ) -> None:
        """CHECKPOINTED -> LOCKED, from those files, which are kept.

        Raises ``StorageError`` if a file is missing or has the wrong size. ``rescued``: blocks that could not be
        written, (UUID, offset) -> bytes.
        """
        self._driver.initialise()
        sources = {}
        for file in stored:
            path = Path(directory, file["file"])
            if not rescued and _size(path) != file["size"]:
                raise StorageError(f"{path}: is missing or has the wrong size")
            sources[(pairs or {}).get(file["uuid"], file["uuid"])] = (file["uuid"], path)
        arguments = cuda_driver.restore_arguments(self._driver.load(), pairs) if pairs else None
        with self._contexts(list(sources)):
            handle, mapped = self._mapped("CUcheckpointRestoreArgs", "cuCheckpointProcessRestore", pid, arguments)
            for memory in mapped:
                old, path = sources[memory.uuid]
                self._copy_in(memory, path, old, rescued or {})
            self._complete(handle)
            self._keep(sources)

    # --- driver calls

    def _keep(self, uuids: Iterable[str]) -> None:
        """Retain the primary contexts of the GPUs until this process exits.

        Restored programs have crashed when the context of the restoring process was released before they had ended
        (ai-dynamo/snapshot, with driver 615).
        """
        shown = cuda_driver.devices(self._driver)
        for uuid in set(uuids) - self._kept:
            self._driver.call("cuDevicePrimaryCtxRetain", self._driver.call("cuDeviceGet", shown.index(uuid)))
            self._kept.add(uuid)

    @contextlib.contextmanager
    def _contexts(self, uuids: list[str]) -> Iterator[None]:
        """Retain primary contexts on those GPUs and page-lock the ring."""
        call = self._driver.call
        shown = cuda_driver.devices(self._driver)
        with contextlib.ExitStack() as stack:
            for uuid in uuids:
                device = call("cuDeviceGet", shown.index(uuid))
                context = call("cuDevicePrimaryCtxRetain", device)
                stack.callback(call, "cuDevicePrimaryCtxRelease", device)
                call("cuCtxSetCurrent", context)
            with contextlib.suppress(DriverCallError, NotAvailableError):
                call("cuMemHostRegister", self._address, SLOTS * BLOCK, 1)  # for all contexts
                stack.callback(call, "cuMemHostUnregister", self._address)
            yield

    def _mapped(self, structure: str, function: str, pid: int, arguments: Any) -> tuple[int, list[MappedMemory]]:
        """Map the process's memory. Return the handle for ``_complete`` and the mappings."""
        module = self._driver.load()
        arguments = arguments or getattr(module, structure)()
        cell = ctypes.c_void_p(None)
        # The bindings wrap the field as a structure, but the driver expects the address of a pointer to a structure.
        field = ctypes.c_void_p.from_address(int(arguments.getPtr()) + _OUT_AT[structure])
        field.value = ctypes.addressof(cell)
        try:
            self._driver.call(function, pid, arguments)
        finally:
            field.value = None
        info = ctypes.cast(cell, ctypes.POINTER(_Info)).contents
        shown = cuda_driver.devices(self._driver)
        mapped = []
        for number in range(info.count):
            mapping = info.devices[number]
            ordinal = self._ordinal(mapping.stream or 0, mapping.devPtr)
            mapped.append(MappedMemory(shown[ordinal], ordinal, mapping.devPtr, mapping.size, mapping.stream or 0))
        return info.handle, mapped

    def _ordinal(self, stream: int, at: int) -> int:
        """Return the GPU of a mapping: from the stream's context, or from the address for the default stream."""
        call = self._driver.call
        if stream:
            call("cuCtxSetCurrent", call("cuStreamGetCtx", stream))
            return int(call("cuCtxGetDevice"))
        attribute = self._driver.load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(call("cuPointerGetAttribute", attribute, at))

    def _complete(self, handle: int) -> None:
        """Complete the operation.

        The function is called by address: bindings 13.5 look it up for CUDA 13.5, but driver 615 has it since 13.4.
        """
        at = cuda_driver.address(self._driver, COMPLETE, ENTRY_POINTS[COMPLETE])
        if not at:
            raise NotAvailableError(f"the driver has no {COMPLETE}")
        code = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(at)(handle)
        if code:
            raise DriverCallError(self._driver.load().CUresult(code).name)

    def _current(self, memory: MappedMemory) -> None:
        device = self._driver.call("cuDeviceGet", memory.ordinal)
        context = self._driver.call("cuDevicePrimaryCtxRetain", device)
        self._driver.call("cuDevicePrimaryCtxRelease", device)  # _contexts still holds a reference
        self._driver.call("cuCtxSetCurrent", context)

    # --- copying

    def _copy_out(
        self, mapped: list[MappedMemory], directory: Path, files: Mapping[str, str]
    ) -> dict[tuple[str, int], bytes]:
        """Copy all memory to the files. Return the blocks that could not be written: (UUID, offset) -> bytes."""
        rescued: dict[tuple[str, int], bytes] = {}
        with ThreadPoolExecutor(SLOTS) as pool:
            for memory in mapped:
                self._current(memory)
                descriptor = os.open(directory / files[memory.uuid], os.O_WRONLY | os.O_CLOEXEC)
                try:
                    self._copy_out_memory(memory, descriptor, pool, rescued)
                    with contextlib.suppress(OSError):
                        os.ftruncate(descriptor, memory.size)
                finally:
                    os.close(descriptor)
        return rescued

    def _copy_out_memory(
        self, memory: MappedMemory, descriptor: int, pool: ThreadPoolExecutor, rescued: dict[tuple[str, int], bytes]
    ) -> None:
        """Copy one GPU's memory to its file, writing earlier blocks during the transfer of later ones."""
        writing: list[Future[None] | None] = [None] * SLOTS

        def write(offset: int, slot: int, size: int) -> None:
            try:
                _write_all(descriptor, self._slots[slot][:size], offset)
            except OSError:
                rescued[memory.uuid, offset] = bytes(self._slots[slot][:size])

        for number, offset in enumerate(range(0, memory.size, BLOCK)):
            slot, size = number % SLOTS, min(BLOCK, memory.size - offset)
            before = writing[slot]
            if before is not None:
                before.result()
            target = self._address + slot * BLOCK
            self._driver.call("cuMemcpyDtoHAsync", target, memory.at + offset, size, memory.stream)
            self._driver.call("cuStreamSynchronize", memory.stream)
            writing[slot] = pool.submit(write, offset, slot, size)
        for pending in writing:
            if pending is not None:
                pending.result()

    def _copy_in(self, memory: MappedMemory, path: Path, uuid: str, rescued: Mapping[tuple[str, int], bytes]) -> None:
        """Copy one GPU's memory from its file, reading later blocks during the transfer of earlier ones."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        blocks = [(offset, min(BLOCK, memory.size - offset)) for offset in range(0, memory.size, BLOCK)]

        def read(slot: int, offset: int, size: int) -> None:
            kept = rescued.get((uuid, offset))
            if kept is None:
                _read_all(descriptor, self._slots[slot][:size], offset, path)
            else:
                self._slots[slot][:size] = kept

        self._current(memory)
        try:
            with ThreadPoolExecutor(SLOTS) as pool:
                reading = {at: pool.submit(read, at, *blocks[at]) for at in range(min(SLOTS, len(blocks)))}
                for number, (offset, size) in enumerate(blocks):
                    reading.pop(number).result()
                    slot = number % SLOTS
                    source = self._address + slot * BLOCK
                    self._driver.call("cuMemcpyHtoDAsync", memory.at + offset, source, size, memory.stream)
                    self._driver.call("cuStreamSynchronize", memory.stream)
                    after = number + SLOTS
                    if after < len(blocks):
                        reading[after] = pool.submit(read, slot, *blocks[after])
        finally:
            os.close(descriptor)


def _ring() -> mmap.mmap:
    """Allocate and populate the host memory for the copies, with huge pages if available."""
    made = mmap.mmap(-1, SLOTS * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(_MADV_HUGEPAGE)
    try:
        made.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # Linux before 5.14
        for at in range(0, len(made), mmap.PAGESIZE):
            made[at] = 0
    return made


def _reserved(directory: Path, pid: int, held: Mapping[str, int]) -> dict[str, str]:
    """Create a file with reserved space for each GPU and return UUID -> name.

    Raises ``StorageError`` if there is no space; no file is left then.
    """
    files: dict[str, str] = {}
    for uuid, size in held.items():
        name = f"{pid}-{uuid}.vram"
        path = directory / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            files[uuid] = name
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            _removed(directory, files.values())
            raise StorageError(f"{path}: cannot reserve {size} bytes: {error.strerror}") from None
    return files


def _removed(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def _read_all(descriptor: int, into: memoryview, offset: int, path: Path) -> None:
    while into:
        done = os.preadv(descriptor, [into], offset)
        if done == 0:
            raise StorageError(f"{path}: is shorter than what was written")
        into, offset = into[done:], offset + done


def timed(action: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the result of an action and the seconds that it took."""
    began = time.monotonic()
    result = action(**arguments)
    return {"result": result, "seconds": time.monotonic() - began}


def main() -> None:
    """Execute the commands in the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    protocol.detach()
    storage = protocol.built(options.directory, lambda: Storage(cuda_driver.Driver()))
    commands = {"checkpoint": partial(timed, storage.checkpoint), "restore": partial(timed, storage.restore)}
    protocol.serve(options.directory, commands)


if __name__ == "__main__":
    main()
