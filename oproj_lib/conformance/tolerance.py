"""How far an approximate function may lie from the correctly rounded value, as the PTX ISA documents it."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

FLOATS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Tolerance:
    """The larger of `absolute` and `relative` x |exact| as a bound on |result - exact|, or `ulps` between the result
    and the correctly rounded value. `source` says where the bound stands.

    The exact value is known through the correctly rounded one, which adds half an ulp. A subnormal result, which has
    too few digits for a relative bound, adds the half ulp of its own rounding. Infinities, NaNs and the signs of zeros
    are held to the expected value.
    """

    type: str
    source: str
    absolute: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0

    def allows(
        self, got: npt.NDArray[np.unsignedinteger], want: npt.NDArray[np.unsignedinteger]
    ) -> npt.NDArray[np.bool_]:
        """Per word, whether every element it holds (two, if packed) is within the bound."""
        return self.share(got, want) <= 1.0

    def distance(
        self, got: npt.NDArray[np.unsignedinteger], want: npt.NDArray[np.unsignedinteger]
    ) -> npt.NDArray[np.float64]:
        """Per word, the distance of the worse of its elements; 0 where either is not finite."""
        values, reference = (elements(self.type, words).astype(np.float64) for words in (got, want))
        finite = np.isfinite(values) & np.isfinite(reference)
        with np.errstate(invalid="ignore"):
            return np.where(finite, np.abs(values - reference), 0.0).max(axis=-1)

    def share(
        self, got: npt.NDArray[np.unsignedinteger], want: npt.NDArray[np.unsignedinteger]
    ) -> npt.NDArray[np.float64]:
        """Per word, the part of the bound that the worse of its elements uses; infinity where no distance is
        allowed."""
        values, reference = (elements(self.type, words).astype(np.float64) for words in (got, want))
        info = ml_dtypes.finfo(FLOATS[self.type])
        smallest = float(info.smallest_normal)
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.abs(reference)
            ulp = np.exp2(np.floor(np.log2(np.maximum(size, smallest)))) * float(info.eps)
            halves = np.where(size < smallest, 1.0, 0.5)
            bound = (
                self.ulps * ulp
                if self.ulps
                else np.maximum(self.absolute, self.relative * size) + halves * ulp
            )
            used = np.abs(values - reference) / bound
        same = (np.isnan(values) & np.isnan(reference)) | (
            (values == reference) & (np.signbit(values) == np.signbit(reference))
        )
        comparable = np.isfinite(reference) & np.isfinite(values) & (values != reference)
        return np.where(same, 0.0, np.where(comparable, used, np.inf)).max(axis=-1)


def elements(type_name: str, words: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.generic]:
    """[threads, columns, elements of a word]."""
    return np.ascontiguousarray(words)[..., None].view(FLOATS[type_name])


def ulps_apart(
    type_name: str, got: npt.NDArray[np.unsignedinteger], want: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.int64]:
    """Per word, how many representable numbers further the worse of its elements lies; 0 for two NaNs."""
    dtype = FLOATS[type_name]
    top = np.int64(1) << np.int64(8 * dtype.itemsize - 1)
    places = []
    for words in (got, want):
        bits = elements(type_name, words).view(f"u{dtype.itemsize}").astype(np.int64)
        places.append(np.where(bits >= top, top - bits, bits))  # numbered along the real line
    both_nan = np.isnan(elements(type_name, got)) & np.isnan(elements(type_name, want))
    return np.where(both_nan, 0, np.abs(places[0] - places[1])).max(axis=-1)
