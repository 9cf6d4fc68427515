"""Are these arrays what the kernel was built for? Works on NumPy arrays, torch tensors and CuTe tensors
alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oproj_lib.layouts.fragments import CHUNK_BYTES
from oproj_lib.problem import N

DTYPE = "bfloat16"


@dataclass(frozen=True)
class ArrayFacts:
    """shape and strides in elements; address None where there is no memory yet (CuTe's tensors while
    compiling)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    address: int | None


def array_facts(name: str, array: Any) -> ArrayFacts:
    """Shape, strides, element type and address of an array of any of the three libraries.

    Raises ValueError for an object that lacks ``shape`` or ``dtype`` or strides, or whose shape is not
    static.
    """
    shape = getattr(array, "shape", None)
    dtype = getattr(array, "element_type", None) or getattr(array, "dtype", None)
    strides, address = _strides_and_address(array)
    if shape is None or dtype is None or strides is None:
        raise ValueError(f"{name} is a {type(array).__name__}: it needs shape, dtype and strides")
    if not all(isinstance(extent, int) for extent in shape):
        raise ValueError(f"{name} has shape {shape}: every extent must be a number when the kernel is built")
    return ArrayFacts(tuple(shape), strides, _dtype_name(dtype), address)


def check_inputs(x: Any, weight: Any, mailbox: Any = None) -> None:
    """Check x [M, K], weight [7168, K] and, if given, mailbox [slots, tokens >= M, 7168].

    All must be bfloat16, contiguous and row-major, and start at a multiple of 16 bytes (one access is 16
    bytes).

    Raises ValueError with what was found and what is needed.
    """
    x_facts, weight_facts = _checked("x", x, 2), _checked("weight", weight, 2)
    (batch, k), (rows, weight_k) = x_facts.shape, weight_facts.shape
    if rows != N:
        raise ValueError(f"weight has {rows} rows, it must have N = {N}")
    if weight_k != k:
        raise ValueError(f"x has K = {k} columns and weight {weight_k}: they must be equal")
    if mailbox is None:
        return
    _, tokens, columns = _checked("mailbox", mailbox, 3).shape
    if columns != N:
        raise ValueError(f"mailbox has {columns} columns, it must have N = {N}")
    if tokens < batch:
        raise ValueError(f"mailbox has {tokens} tokens per slot and x has M = {batch}: it needs at least M")


def _checked(name: str, array: Any, rank: int) -> ArrayFacts:
    facts = array_facts(name, array)
    if len(facts.shape) != rank:
        raise ValueError(f"{name} has shape {facts.shape}: it must have {rank} dimensions")
    if min(facts.shape) < 1:
        raise ValueError(f"{name} has shape {facts.shape}: every extent must be at least 1")
    if facts.dtype != DTYPE:
        raise ValueError(f"{name} has dtype {facts.dtype}: it must be {DTYPE}")
    expected = [1] * rank
    for axis in reversed(range(rank - 1)):
        expected[axis] = expected[axis + 1] * facts.shape[axis + 1]
    # An axis of extent 1 is never stepped along, and NumPy gives it any stride.
    wrong = [axis for axis in range(rank) if facts.shape[axis] > 1 and facts.strides[axis] != expected[axis]]
    if wrong:
        raise ValueError(
            f"{name} of shape {facts.shape} has strides {facts.strides} (elements): it must be contiguous "
            f"and row-major, strides {tuple(expected)}; copy it first"
        )
    if facts.address is not None and facts.address % CHUNK_BYTES:
        raise ValueError(
            f"{name} starts at address {facts.address:#x}, which is {facts.address % CHUNK_BYTES} bytes past "
            f"a multiple of {CHUNK_BYTES}: 16-byte accesses need a multiple"
        )
    return facts


def _strides_and_address(array: Any) -> tuple[tuple[int, ...] | None, int | None]:
    stride = getattr(array, "stride", None)
    if callable(stride):  # torch
        return tuple(stride()), array.data_ptr() if hasattr(array, "data_ptr") else None
    if stride is not None:  # CuTe
        return tuple(stride), None
    strides, itemsize = (
        getattr(array, "strides", None),
        getattr(getattr(array, "dtype", None), "itemsize", None),
    )
    if strides is None or not itemsize:
        return None, None
    pointer = getattr(getattr(array, "ctypes", None), "data", None)  # NumPy
    return tuple(stride // itemsize for stride in strides), pointer


def _dtype_name(dtype: Any) -> str:
    name = str(getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or dtype)
    name = name.removeprefix("torch.")
    return DTYPE if name == "BFloat16" else name
