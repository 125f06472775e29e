"""Read-only memory maps of data files, a bounded number of them in a process, without a file descriptor each.

Python's own maps keep a descriptor open, so that a store of many shards runs into `ulimit -n`; here the descriptor is closed once the map
stands. The least recently used maps are let go above MOST_MAPS. A file that became shorter under a map would end the process with SIGBUS
when it is read there: `MappedFiles.get` compares its size at every use, which costs a microsecond (reading by system calls would cost one
per document) and leaves the moment between this look and the copy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError

MOST_MAPS = 4096
"""The kernel's usual limit of a process is 65,530 maps, for everything."""
PROT_READ, MAP_SHARED = 1, 1
Array = np.ndarray[Any, Any]


def map_file(path: Path | str, dtype: Any = np.uint8) -> Array:
    """A file as a read-only array, mapped and not read; an empty file is an empty array."""
    try:
        return _map(str(path), np.dtype(dtype))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be mapped: {_advice(problem)}") from None


def _map(path: str, dtype: np.dtype[Any]) -> Array:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size % dtype.itemsize:
            raise ValueError(f"has {size} bytes, no multiple of {dtype.itemsize}")
        if not size:
            return np.zeros(0, dtype)
        if not sys.platform.startswith("linux"):
            return np.asarray(np.memmap(path, dtype, mode="r"))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        address = libc.mmap(None, size, PROT_READ, MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)
    whole = (ctypes.c_char * size).from_address(address)
    weakref.finalize(whole, libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    array = np.frombuffer(memoryview(whole), dtype)
    array.flags.writeable = False
    return array


def _advice(problem: OSError | ValueError) -> str:
    """What went wrong and what helps against that."""
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open. Raise the limit (ulimit -n), or join stores with `headway data merge`."
    if isinstance(problem, OSError) and problem.errno == errno.ENOMEM:
        return "too many maps or too little address space. Raise vm.max_map_count or ulimit -v."
    reason = problem.strerror if isinstance(problem, OSError) else None
    return f"{reason or problem}. Copy or build the store again."


class MappedFiles:
    """The maps of this process, the most recently used ones."""

    def __init__(self, most: int = MOST_MAPS) -> None:
        self.most = most
        self._maps: OrderedDict[str, tuple[int, Array]] = OrderedDict()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, path: str, dtype: str, size: int) -> Array:
        """The map of a file that must have `size` bytes; one that was replaced is mapped again."""
        try:
            now = os.stat(path)
        except OSError as problem:
            raise DataError(f"{path}: cannot be read: {_advice(problem)}") from None
        if now.st_size != size:
            raise DataError(
                f"{path}: has {now.st_size} bytes; store.json says {size}. It was cut or replaced. Copy or build the store again."
            )
        with self._guard:
            inode, found = self._maps.get(path, (None, None))
            if found is None or inode != now.st_ino:
                found = map_file(path, dtype)
                self._maps[path] = now.st_ino, found
                while len(self._maps) > self.most:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(path)
            return found


MAPS = MappedFiles()
"""One for all stores: what it bounds, the process has once."""
