"""Where the copies of a save lie: buffers that are allocated once and used again by the next save.

Memory that is touched for the first time costs 2.7 to 5.4 s per GB (the kernel clears each page), a copy into memory
that was used before 0.2 s per GB. So an `Arena` keeps its buffers between saves. While one is recording, copies of
large arrays and tensors made by this thread land in it; small ones are ordinary copies.

Memory: one copy of the large arrays of a state, at most a quarter more; what a save did not use is given back at once.
A save that has ended before training goes on needs no copy of tensors: its arena `lends` them.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

THRESHOLD = 64 << 10  # [bytes]; below, allocating is as cheap as looking for a buffer

_recording: ContextVar[Arena | None] = ContextVar("recording", default=None)


class Arena:
    """Buffers for one snapshot at a time, which lives from `recording` to `release`.

    Args:
        allocate: returns a new buffer of so many bytes.
        discard: called with a buffer that is given up, before it is let go.
        pinned: whether copies from a GPU go into pinned memory, on a stream of their own, so that the program need not
            wait for them; else they go into the same buffers as all others, and it waits.
        lends: whether large contiguous tensors on the CPU are taken as they are, in place of a copy: for snapshots that
            are given up before the program goes on.
    """

    def __init__(
        self,
        allocate: Callable[[int], Bytes] | None = None,
        *,
        discard: Callable[[Bytes], None] | None = None,
        pinned: bool = True,
        lends: bool = False,
    ) -> None:
        self.lends = lends
        self._buffers = Pool(allocate or (lambda size: np.empty(size, np.uint8)), discard)
        self._pinned = Pool(_pinned_buffer) if pinned else None
        self._copies: list[Any] = []  # events of torch.cuda, behind the copies that are on their way
        self._streams: dict[Any, Any] = {}

    @property
    def nbytes(self) -> int:
        """Size of all buffers [bytes]."""
        return self._buffers.nbytes + (self._pinned.nbytes if self._pinned else 0)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Makes large copies of this thread land in the arena for the block.

        Buffers that the block did not need are given back after it; if it fails, all of them are free again.
        """
        pools = [self._buffers, *([self._pinned] if self._pinned else [])]
        assert not any(pool.busy for pool in pools), "a snapshot is still in the arena"
        token = _recording.set(self)
        try:
            yield
        except BaseException:
            self._order_copies()
            self.release()
            raise
        finally:
            _recording.reset(token)
        for pool in pools:
            pool.trim()
        self._order_copies()

    def release(self) -> None:
        """Gives the snapshot up: its buffers are free for the next one."""
        self.wait_for_copies()
        self._buffers.release()
        if self._pinned:
            self._pinned.release()

    def take(self, size: int) -> Bytes:
        """Returns a buffer of exactly so many bytes; its content is anything."""
        found: Bytes = self._buffers.take(size)[:size]
        return found

    def wait_for_copies(self) -> None:
        """Waits until copies from a GPU have arrived. The writer calls it before it reads the snapshot."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()

    def copy_from_gpu(self, tensor: Any) -> Any:
        """Returns a copy of a CUDA tensor on the CPU; without pinned memory it is complete, else see `wait_for_copies`.

        The copy runs on a stream of its own, after all work that was queued on the current one. What is queued there
        once the recording has ended waits for the copy, so that it may change the tensor.
        """
        torch = sys.modules["torch"]
        size = tensor.numel() * tensor.element_size()
        if self._pinned is None:
            target = _shaped(torch, torch.from_numpy(self.take(size)), tensor)
            return target.copy_(tensor)
        target = _shaped(torch, self._pinned.take(size)[:size], tensor)
        current = torch.cuda.current_stream(tensor.device)
        if current not in self._streams:
            self._streams[current] = torch.cuda.Stream(tensor.device)
        stream = self._streams[current]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            target.copy_(tensor, non_blocking=True)
        # its memory must not be given to another tensor before the copy has read it
        tensor.record_stream(stream)
        return target

    def _order_copies(self) -> None:
        for current, stream in self._streams.items():
            event = stream.record_event()
            current.wait_event(event)
            self._copies.append(event)
        self._streams.clear()


class Pool:
    """Buffers of one kind of memory: free ones by size, and those of the present snapshot."""

    def __init__(self, allocate: Callable[[int], Any], discard: Callable[[Any], None] | None = None) -> None:
        self._allocate = allocate
        self._discard = discard
        self._free: list[Any] = []
        self._used: list[Any] = []

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in it."""
        return bool(self._used)

    @property
    def nbytes(self) -> int:
        """Size of all buffers [bytes]."""
        return sum(buffer.nbytes for buffer in (*self._free, *self._used))

    def take(self, size: int) -> Any:
        """Returns a buffer of at least `size` bytes, at most a quarter more: the smallest free one, or a new one."""
        wanted = _rounded(size)
        place = bisect.bisect_left(self._free, wanted, key=_nbytes)
        if place < len(self._free) and self._free[place].nbytes <= wanted + wanted // 10:
            buffer = self._free.pop(place)
        else:
            buffer = self._allocate(wanted)
        self._used.append(buffer)
        return buffer

    def trim(self) -> None:
        """Gives up the free buffers."""
        if self._discard is not None:
            for buffer in self._free:
                self._discard(buffer)
        self._free.clear()

    def release(self) -> None:
        """Makes all buffers free."""
        self._free = sorted([*self._free, *self._used], key=_nbytes)
        self._used = []


_nbytes = operator.attrgetter("nbytes")


def _rounded(size: int) -> int:
    """Returns `size` or at most an eighth more [bytes], so that lengths that vary a little find the same buffer."""
    step = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step


def _pinned_buffer(size: int) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _shaped(torch: Any, flat: Any, like: Any) -> Any:
    """Returns bytes as a tensor of the dtype and shape of another one, in C order."""
    return flat.view(like.dtype).view(like.shape)


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an array to be filled: in the arena that is recording, if it is large; its content is anything."""
    size = math.prod(shape) * dtype.itemsize
    arena = _recording.get()
    if arena is None or size < THRESHOLD or dtype.hasobject:
        return np.empty(shape, dtype)
    found: np.ndarray[Any, Any] = arena.take(size).view(dtype).reshape(shape)
    return found


def copy_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy that shares no memory: in the arena that is recording, in C order, or else in the same order."""
    arena = _recording.get()
    if arena is None or array.nbytes < THRESHOLD or array.dtype.hasobject:
        return np.array(array, order="K", copy=True, subok=False)
    copy: np.ndarray[Any, Any] = arena.take(array.nbytes).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def copy_tensor(tensor: Any) -> Any:
    """Returns a copy of a strided tensor, without its graph; in the arena that is recording, if it is large.

    There it is on the CPU and in C order. From a GPU it comes whatever its size, and may still be on its way. An arena
    that lends gives the tensor itself, without a copy, if that is so already.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    arena = _recording.get()
    if arena is None:
        return tensor.clone()
    size, device = tensor.numel() * tensor.element_size(), tensor.device.type
    if device == "cuda" and size:
        # small ones too: what is left on the GPU would have to be fetched behind the work of the training thread
        return arena.copy_from_gpu(tensor)
    if size < THRESHOLD or device != "cpu":
        return tensor.clone()
    if arena.lends and tensor.is_contiguous():
        return tensor.detach()
    torch = sys.modules["torch"]
    return _shaped(torch, torch.from_numpy(arena.take(size)), tensor).copy_(tensor)
