"""The two loops over every sample of a run, in C++ (csrc/data_index.cpp) or, without a compiler, in numpy
and Python."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from gptpar.system import native


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load_or_warn("data_index", "data indices are built in Python, the same but slower")
    if library is None:
        return None
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.data_index_shuffle.argtypes = [pointer, ctypes.c_uint64, i32, pointer, pointer]
    library.data_index_shuffle.restype = i32
    library.data_index_blend.argtypes = [pointer, pointer, i32, i64, i64, pointer, pointer, pointer]
    library.data_index_blend.restype = i64
    return library


def shuffle_in_place(values: np.ndarray, random: np.random.RandomState) -> None:
    """``random.shuffle(values)`` for a contiguous vector, bit for bit and leaving ``random`` in the same state.

    Measured on 100 million uint32: 1.4 s, against 14.3 s in numpy.
    """
    library = _library()
    if library is None:
        return random.shuffle(values)
    if values.ndim != 1 or not values.flags.c_contiguous or not values.flags.writeable:
        raise ValueError("shuffle_in_place needs a contiguous, writable vector")
    name, state, position, *gauss = random.get_state(legacy=True)
    key = np.array(state, dtype=np.uint32)
    place = ctypes.c_int32(int(position))
    if library.data_index_shuffle(
        values.ctypes.data, values.size, values.itemsize, key.ctypes.data, ctypes.byref(place)
    ):
        raise ValueError(f"shuffle_in_place does not take items of {values.itemsize} bytes")
    random.set_state((name, key, place.value, *gauss))


def blend(
    weights: np.ndarray,
    limits: np.ndarray,
    start: int,
    size: int,
    counts: np.ndarray,
    choices: np.ndarray | None = None,
    indices: np.ndarray | None = None,
) -> int:
    """Assign the samples [start, start + size) of a blend to data sets; csrc/data_index.cpp has the rule.

    Args:
        weights: float64[num_sets].
        limits: int64[num_sets], samples that each set can give.
        start, size: range of samples.
        counts: int64[num_sets], samples that each set has given so far; advanced in place.
        choices, indices: int16[size] and int64[size], filled with the data set and the index inside it; or both None.

    Returns:
        Number of samples that were assigned, fewer than ``size`` if all sets are exhausted.
    """
    library = _library()
    if library is None:
        return _blend_plain(weights, limits, start, size, counts, choices, indices)
    return library.data_index_blend(
        weights.ctypes.data,
        limits.ctypes.data,
        len(weights),
        start,
        size,
        counts.ctypes.data,
        choices.ctypes.data if choices is not None else None,
        indices.ctypes.data if indices is not None else None,
    )


def _blend_plain(
    weights: np.ndarray,
    limits: np.ndarray,
    start: int,
    size: int,
    counts: np.ndarray,
    choices: np.ndarray | None,
    indices: np.ndarray | None,
) -> int:
    for done in range(size):
        open_sets = counts < limits
        if not open_sets.any():
            return done
        best = int(np.where(open_sets, weights * max(start + done, 1) - counts, -np.inf).argmax())
        if choices is not None and indices is not None:
            choices[done], indices[done] = best, counts[best]
        counts[best] += 1
    return size
