"""Are these arrays what the kernel was built for? Works on NumPy arrays, torch tensors and CuTe tensors
alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oproj_lib.layouts.fragments import CHUNK_BYTES
from oproj_lib.problem import MAX_BATCH, N

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


def check_inputs(x: Any, weight: Any, mailbox: Any = None, *, columns: int = N) -> None:
    """Check x [M, K], weight [7168, K] and, if given, mailbox [slots, tokens >= M, columns].

    All must be bfloat16, contiguous and row-major, and start at a multiple of 16 bytes (one access is 16
    bytes). columns: N, or those of one owner for a two-shot engine.

    Raises ValueError with what was found and what is needed.
    """
    x_facts, weight_facts = _checked("x", x, 2), _checked("weight", weight, 2)
    (batch, k), (rows, weight_k) = x_facts.shape, weight_facts.shape
    if rows != N:
        raise ValueError(f"weight has {rows} rows, it must have N = {N}")
    if weight_k != k:
        raise ValueError(f"x has K = {k} columns and weight {weight_k}: they must be equal")
    if mailbox is not None:
        check_mailbox_shape("mailbox", mailbox, "x", batch, columns)


def check_mailbox_shape(
    name: str, mailbox: Any, other: str, batch: int, columns: int = N
) -> tuple[int, int, int]:
    """The shape of a mailbox [slots, tokens >= batch, columns]; ``other`` is what has ``batch`` tokens.

    Raises ValueError as ``check_inputs``.
    """
    slots, tokens, found = _checked(name, mailbox, 3).shape
    if found != columns:
        raise ValueError(
            f"{name} has {found} columns, it must have {'N = ' if columns == N else ''}{columns}"
        )
    if tokens < batch:
        raise ValueError(
            f"{name} has {tokens} tokens per slot and {other} has M = {batch}: it needs at least M"
        )
    return slots, tokens, found


def check_mailbox_and_out(mailbox: Any, out: Any) -> tuple[int, int, int]:
    """The shape of a mailbox [slots, tokens >= M, 7168] whose reduction goes to out [M, 7168], M 1 to 64.

    Raises ValueError as ``check_inputs``.
    """
    batch, columns = _checked("out", out, 2).shape
    if columns != N:
        raise ValueError(f"out has {columns} columns, it must have N = {N}")
    if batch > MAX_BATCH:
        raise ValueError(f"out has M = {batch} tokens: choose 1 to {MAX_BATCH}")
    return check_mailbox_shape("mailbox", mailbox, "out", batch)


def check_array(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Check that ``array`` is bfloat16 of this shape, contiguous, row-major, and starts at a multiple of 16
    bytes.

    Raises ValueError with what was found and what is needed.
    """
    found = _checked(name, array, len(shape)).shape
    if found != shape:
        raise ValueError(f"{name} has shape {found}: this kernel is built for {shape}")


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
