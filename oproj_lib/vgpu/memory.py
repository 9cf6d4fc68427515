"""Memory of the virtual GPU: global allocations of R virtual ranks in one flat 64-bit address space,
multicast windows over them, and the shared and local memory of one launch. Everything is bytes; nothing here
knows instructions."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sentinel import Sentinel

ALIGNMENT = 256  # of every allocation, as cudaMalloc guarantees
GUARD = 1 << 16  # bytes between allocations that belong to nobody, so that running over an end is noticed
RANK_SPAN = 1 << 44
MULTICAST_BASE = 1 << 52
SHARED_BASE = 1 << 56  # generic-address windows (PTX ISA, "Generic Addressing")
LOCAL_BASE = 1 << 57
WINDOW_SPAN = 1 << 32


@dataclass(eq=False)
class Region:
    """A run of bytes that instructions can touch. `undefined` (uint16 per granule: an origin id, 0 = defined)
    and `written` (bool per byte) exist only where they are tracked."""

    name: str
    space: str
    bytes: np.ndarray
    granule: int = 1
    undefined: np.ndarray | None = None
    written: np.ndarray | None = None

    def view(self, dtype: np.dtype, count: int) -> np.ndarray:
        """The bytes as rows of `count` elements."""
        size = dtype.itemsize * count
        return self.bytes[: self.bytes.size // size * size].view(dtype).reshape(-1, count)


@dataclass(eq=False)
class Buffer(Region):
    """A global allocation: `address` is what kernels receive, `array` is the caller's own numpy array (no
    copy).

    axes: what the array's axes are called in messages. writer_of: says who should write the element at an index
    tuple, for messages about threads that poll it for ever.
    """

    address: int = 0
    rank: int = 0
    array: np.ndarray = field(default_factory=lambda: np.zeros(0))
    axes: tuple[str, ...] = ()
    writer_of: Callable[[tuple[int, ...]], str] | None = None
    sentinel: Sentinel | None = None

    @property
    def end(self) -> int:
        return self.address + self.bytes.size

    def index(self, offset: int) -> tuple[int, ...]:
        """The index tuple of the element that holds a byte."""
        return tuple(int(i) for i in np.unravel_index(offset // self.array.itemsize, self.array.shape))

    def element(self, offset: int) -> str:
        """`mailbox [slot 3, token 0, column 128]`: the element that holds a byte."""
        index = self.index(offset)
        names = self.axes or ("",) * len(index)
        return (
            f"{self.name} [{', '.join(f'{name} {i}'.strip() for name, i in zip(names, index, strict=True))}]"
        )

    def writer(self, offset: int) -> str:
        """Who should write a byte; "" if nobody said."""
        return self.writer_of(self.index(offset)) if self.writer_of is not None else ""


@dataclass(eq=False)
class MulticastWindow:
    """A window of addresses that stands for the same offset in every member (PTX ISA, "multimem
    addresses")."""

    address: int
    members: tuple[Buffer, ...]

    @property
    def end(self) -> int:
        return self.address + self.members[0].bytes.size


class AddressSpace:
    """Allocations and windows, found by address."""

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"ranks = {ranks}: a virtual machine has at least 1 rank")
        self.ranks = ranks
        self.next_free = [RANK_SPAN * (rank + 1) for rank in range(ranks)]
        self.next_window = MULTICAST_BASE
        self.starts: list[int] = []
        self.items: list[Buffer | MulticastWindow] = []

    def add(
        self,
        array: Any,
        name: str,
        rank: int,
        *,
        defined: bool,
        space: str = "global",
        axes: tuple[str, ...] = (),
    ) -> Buffer:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of buffer {name!r}: ranks here are 0..{self.ranks - 1}")
        array = as_numpy(array, name)
        if not array.flags.c_contiguous:
            raise ValueError(
                f"buffer {name!r}: shape {array.shape} with strides {array.strides} "
                "is not contiguous; pass numpy.ascontiguousarray(array)"
            )
        if axes and len(axes) != array.ndim:
            raise ValueError(
                f"buffer {name!r}: {len(axes)} names for the {array.ndim} axes of shape {array.shape}"
            )
        raw = array.reshape(-1).view(np.uint8)
        address = self.next_free[rank]
        self.next_free[rank] = -(-(address + raw.size + GUARD) // ALIGNMENT) * ALIGNMENT
        written = None if defined else np.zeros(raw.size, bool)
        buffer = Buffer(name, space, raw, 1, None, written, address, rank, array, tuple(axes))
        self._insert(address, buffer)
        return buffer

    def add_window(self, members: tuple[Buffer, ...]) -> MulticastWindow:
        sizes = {member.bytes.size for member in members}
        if not members or len(sizes) != 1:
            raise ValueError(f"a multicast window needs members of one size; got {sorted(sizes) or 'none'}")
        window = MulticastWindow(self.next_window, members)
        self.next_window = -(-(window.end + GUARD) // ALIGNMENT) * ALIGNMENT
        self._insert(window.address, window)
        return window

    def remove(self, item: Buffer | MulticastWindow) -> None:
        index = self.items.index(item)
        del self.items[index], self.starts[index]

    def _insert(self, address: int, item: Buffer | MulticastWindow) -> None:
        index = bisect.bisect(self.starts, address)
        self.starts.insert(index, address)
        self.items.insert(index, item)

    def at(self, address: int) -> Buffer | MulticastWindow | None:
        """The item that contains the address."""
        index = bisect.bisect(self.starts, address) - 1
        if index >= 0 and address < self.items[index].end:
            return self.items[index]
        return None

    def describe(self, address: int) -> str:
        """`x + 0x40`, or where the address lies relative to the nearest allocation."""
        index = bisect.bisect(self.starts, address) - 1
        if index < 0:
            return f"address {address:#x}, before every allocation"
        item = self.items[index]
        name = item.name if isinstance(item, Buffer) else f"multicast window of {item.members[0].name}"
        offset, size = address - item.address, item.end - item.address
        if offset < size:
            return f"{name} + {offset} bytes"
        if offset - size < GUARD:
            return f"{name} + {offset} bytes, {offset - size} past its end ({size} bytes)"
        return f"address {address:#x}, in no allocation (the one below is {name})"


def as_numpy(array: Any, name: str) -> np.ndarray:
    """numpy arrays as they are, CPU torch tensors as a view of the same memory."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach") and hasattr(array, "data_ptr"):
        tensor = array.detach()
        if str(tensor.device) != "cpu":
            raise ValueError(
                f"buffer {name!r}: a tensor on {tensor.device}; the virtual GPU takes CPU tensors"
            )
        if str(tensor.dtype) == "torch.bfloat16":
            import ml_dtypes
            import torch

            return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()
    raise TypeError(
        f"buffer {name!r}: expected a numpy array or a CPU torch tensor, not {type(array).__name__}"
    )


class LaunchMemory:
    """Shared and local memory of one launch: all CTAs in one flat array, CTA after CTA."""

    def __init__(self, ctas: int, shared_bytes: int, threads: int, local_bytes: int) -> None:
        self.shared_bytes, self.local_bytes = shared_bytes, local_bytes
        # The stride keeps every CTA's shared memory aligned for any access and any swizzle period.
        self.shared_stride = -(-max(shared_bytes, 1) // 1024) * 1024
        # 0xFF everywhere: NaN as BF16, F16 and FP32, so undefined data shows even without checks.
        self.shared = Region("shared memory", "shared", np.full(ctas * self.shared_stride, 0xFF, np.uint8))
        self.local_stride = -(-local_bytes // 16) * 16
        self.local = Region("local memory", "local", np.full(threads * self.local_stride, 0xFF, np.uint8))
