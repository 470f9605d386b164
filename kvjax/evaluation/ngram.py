"""Byte n-gram models: what a loss in nats per byte has to beat."""

from __future__ import annotations

import numpy as np

from kvjax.config import require

MAX_ORDER = 7
"""A byte and its context are packed into one 64-bit integer."""


def byte_model_nats(train: bytes, validation: bytes, order: int) -> float:
    """Mean nats per byte of `validation` under an order-`order` byte model counted on `train`.

    Order n conditions each byte on the n before it. Counts are smoothed by the model one order lower
    (down to the uniform distribution over 256 bytes), which weighs as much as one observation:

        p_n(b | context) = (count(context b) + p_(n-1)(b | shorter context)) / (count(context) + 1)

    Bytes that have a full context are scored: all but the first `order`.
    Raises ConfigError if `order` is not in 0..7 or a text is too short to hold one byte with its context.
    """
    require(0 <= order <= MAX_ORDER, f"order is {order}: it must be between 0 and {MAX_ORDER}")
    for name, text in (("train", train), ("validation", validation)):
        require(len(text) > order, f"{name} has {len(text)} bytes: an order-{order} byte model needs more than {order}")
    scored = _packed(validation, order)
    probability = np.full(len(scored), 1 / 256)
    for n in range(order + 1):
        probability = _interpolate(np.sort(_packed(train, n)), _last(scored, n), probability)
    return float(-np.log(probability).mean())


def _packed(text: bytes, order: int) -> np.ndarray:
    """Every run of order + 1 bytes as one integer, its last byte in the lowest bits."""
    values = np.frombuffer(text, np.uint8).astype(np.uint64)
    packed = np.zeros(len(values) - order, np.uint64)
    for i in range(order + 1):
        packed = (packed << np.uint64(8)) | values[i : len(values) - order + i]
    return packed


def _last(packed: np.ndarray, order: int) -> np.ndarray:
    """The same runs cut to their last order + 1 bytes."""
    return packed & np.uint64(256 ** (order + 1) - 1)


def _interpolate(counted: np.ndarray, scored: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Probabilities of `scored` runs from `counted` (sorted) runs and the probabilities one order lower."""
    first = scored & ~np.uint64(255)

    def count(low, high):
        return np.searchsorted(counted, high, "right") - np.searchsorted(counted, low, "left")

    return (count(scored, scored) + shorter) / (count(first, first | np.uint64(255)) + 1)
