"""Read-only memory maps of data files: a bounded number per process, without an open file
descriptor each.

Python's own maps keep a descriptor open, so a store of many shards would reach `ulimit -n`. Here
the descriptor is closed once the file is mapped, and the least recently used maps are dropped above
MAX_MAPS. Reading past the end of a file that became shorter kills the process with SIGBUS, so
`MappedFiles.get` checks the size at every use. That costs a microsecond; a change between check and
copy is not caught.
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

from headway.config.regular_file import regular_only
from headway.errors import DataError

MAX_MAPS = 4096
"""The usual kernel limit is 65,530 maps per process."""
# From <sys/mman.h> of Linux.
PROT_READ = 1
MAP_SHARED = 1
Array = np.ndarray[Any, Any]


def map_file(path: Path | str, dtype: Any = np.uint8) -> Array:
    """A file as a read-only array, mapped without reading it."""
    try:
        return _map(str(path), np.dtype(dtype))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be mapped: {_advice(problem)}") from None


def _map(path: str, dtype: np.dtype[Any]) -> Array:
    descriptor = regular_only(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size % dtype.itemsize:
            raise ValueError(f"has {size} bytes, not a multiple of {dtype.itemsize}")
        # mmap refuses an empty file.
        if not size:
            return np.zeros(0, dtype)
        if not sys.platform.startswith("linux"):
            return np.asarray(np.memmap(path, dtype, mode="r"))

        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        address = libc.mmap(None, size, PROT_READ, MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        # A map outlives its descriptor.
        os.close(descriptor)

    # The array keeps `whole` alive through its buffer; when the last view of it is gone, the file
    # is unmapped. Not at exit: other threads may still read then.
    whole = (ctypes.c_char * size).from_address(address)
    unmap = weakref.finalize(whole, libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
    unmap.atexit = False
    array = np.frombuffer(memoryview(whole), dtype)
    array.flags.writeable = False
    return array


def _advice(problem: OSError | ValueError) -> str:
    """The reason and the remedy."""
    if not isinstance(problem, OSError):
        return f"{problem}. Copy or build the store again."
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "too many files are open. Raise the limit (ulimit -n), or join stores with `headway "
            "data merge`."
        )
    if problem.errno == errno.ENOMEM:
        return "too many maps or too little address space. Raise vm.max_map_count or ulimit -v."
    return f"{problem.strerror or problem}. Copy or build the store again."


class MappedFiles:
    """The most recently used maps of this process."""

    def __init__(self, max_maps: int = MAX_MAPS) -> None:
        self.max_maps = max_maps
        self._maps: OrderedDict[str, tuple[int, Array]] = OrderedDict()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, path: str, dtype: str, size: int) -> Array:
        """The map of a file that must have `size` bytes; a file that was replaced is mapped
        again."""
        try:
            status = os.stat(path)
        except OSError as problem:
            raise DataError(f"{path}: cannot be read: {_advice(problem)}") from None
        if status.st_size != size:
            raise DataError(
                f"{path}: has {status.st_size} bytes; store.json says {size}. It was truncated or "
                "replaced. Copy or build the store again."
            )
        with self._guard:
            # A map keeps the file that it was made of, also after the name was given to another
            # one.
            inode, array = self._maps.get(path, (None, None))
            if array is None or inode != status.st_ino:
                array = map_file(path, dtype)
                self._maps[path] = status.st_ino, array
                while len(self._maps) > self.max_maps:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(path)
            return array


MAPS = MappedFiles()
"""Shared by all stores: the limit is per process."""
