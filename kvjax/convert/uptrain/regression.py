"""Least squares behind conversions: linear maps of a layer's inputs that imitate a source model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RIDGE = 1e-5
"""Ridge, as a share of the mean squared input: inputs of real models lie close to a few directions."""


@dataclass(frozen=True)
class Calibration:
    """Normed attention inputs of a source model's layers, float32."""

    fit: np.ndarray
    """[L, N, D]: what maps are fitted on."""
    test: np.ndarray
    """[L, M, D]: other text, what they are judged on."""
    length: int
    """Tokens per sequence."""
    window: int | None = None
    """How many tokens a query sees at most, itself included; None: all before it."""


    @property
    def apart(self) -> np.ndarray:
        """How many pairs of a query and a token that it sees are 0, 1, 2 ... tokens apart."""
        return self.length - np.arange(min(self.length, self.window or self.length))


@dataclass(frozen=True)
class Fit:
    """How well a converted layer makes the source's keys or values, on text that it was not fitted on."""

    layer: int
    state: str
    r_squared: float


def least_squares(x: np.ndarray, y: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    """W [D, Y] that minimises |x W - y|² + ridge · (mean x²) N |W|², for x [N, D] and y [N, Y]."""
    gram = (x.T @ x).astype(np.float64)
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    return np.linalg.solve(gram, x.astype(np.float64).T @ y)


def reduced_rank(x: np.ndarray, y: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(down [D, rank], up [rank, Y]) that minimise |x down up - y|² (reduced-rank regression, Izenman 1975).

    The rows of `up` are orthonormal. Of a rank above Y the last features are zero.
    """
    weights = least_squares(x, y)
    fitted = x @ weights
    _, vectors = np.linalg.eigh(fitted.T @ fitted)
    top = vectors[:, ::-1][:, :rank]
    missing = rank - top.shape[1]
    return np.pad(weights @ top, ((0, 0), (0, missing))), np.pad(top.T, ((0, missing), (0, 0)))


def r_squared(y: np.ndarray, prediction: np.ndarray) -> float:
    """Share of the variance of y [N, ...] about its mean that the prediction explains; below 0: worse than the mean."""
    return float(1 - ((y - prediction) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum())
