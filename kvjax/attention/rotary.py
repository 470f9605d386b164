"""Rotary position embedding (Su et al., 2021) and the ways of stretching it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.config import Variant, register, require


class RopeScaling(Variant):
    """Base of scalings: a registered frozen dataclass that changes the frequencies of rotated pairs."""

    def frequencies(self, base: float, frequencies: np.ndarray) -> np.ndarray:
        """New angles per position [width / 2], of unscaled ones: pair i's is base^(-2i / width)."""
        raise NotImplementedError

    @property
    def rotation_factor(self) -> float:
        """Factor on rotated vectors."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """Factor on the scores of latent attention, whose other features are not rotated."""
        return 1.0


@register("linear")
@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al., 2023): positions count `factor` times slower."""

    factor: float

    def __post_init__(self):
        super().__post_init__()
        _require_factor(self)

    def frequencies(self, base: float, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@register("llama3")
@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those between are interpolated."""

    factor: float
    original_context: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        _require_factor(self)
        _require_context(self)
        require(self.low_frequency_factor < self.high_frequency_factor,
                f"low_frequency_factor {self.low_frequency_factor} must be below high_frequency_factor "
                f"{self.high_frequency_factor}")

    def frequencies(self, base: float, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_frequency_factor)
                       / (self.high_frequency_factor - self.low_frequency_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@register("yarn")
@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al., 2023): pairs that turn often are kept, slow ones stretched, and attention sharpened."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Pairs with more turns than this over the original context are kept."""
    beta_slow: float = 1.0
    """Pairs with fewer turns than this are stretched whole."""
    attention_factor: float | None = None
    """Factor on rotated vectors; None: as `mscale` says."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """DeepSeek's: rotations grow by the ratio of both scales, and latent scores by the square of this one's."""
    truncate: bool = True
    """The bounds between kept and stretched pairs are rounded to whole pairs."""

    def __post_init__(self):
        super().__post_init__()
        _require_factor(self)
        _require_context(self)
        require(0 < self.beta_slow < self.beta_fast,
                f"YarnScaling: beta_slow {self.beta_slow} must be above 0 and below beta_fast {self.beta_fast}")

    def frequencies(self, base: float, frequencies: np.ndarray) -> np.ndarray:
        require(base > 1, f"rope_base is {base}: YarnScaling needs one above 1")
        width = 2 * len(frequencies)
        def pair(turns: float) -> float:
            return width * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))
        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        stretched = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
        return frequencies * (1 - stretched + stretched / self.factor)

    @property
    def rotation_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_factor(self) -> float:
        return self._scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _scale(self, strength: float) -> float:
        return 0.1 * strength * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def _require_factor(scaling) -> None:
    require(scaling.factor >= 1, f"{type(scaling).__name__}.factor is {scaling.factor}: it must be 1 or more")


def _require_context(scaling) -> None:
    require(scaling.original_context > 0,
            f"{type(scaling).__name__}.original_context is {scaling.original_context}: it must be above 0")


@dataclass(frozen=True)
class Rope:
    """How a model rotates queries and keys."""

    base: float | None = 10_000.0
    """Wavelength base; None: nothing is rotated."""
    scaling: RopeScaling | None = None

    @property
    def score_factor(self) -> float:
        """Factor on the scores of latent attention."""
        return 1.0 if self.scaling is None or self.base is None else self.scaling.score_factor

    @property
    def rotation_factor(self) -> float:
        """Factor on rotated vectors."""
        return 1.0 if self.scaling is None or self.base is None else self.scaling.rotation_factor

    def frequencies(self, width: int) -> np.ndarray:
        """Angle per position of each pair of `width` features, [width / 2]; without rotation, zeros."""
        if self.base is None:
            return np.zeros(width // 2)
        frequencies = self.base ** (-2 * np.arange(width // 2) / width)
        return frequencies if self.scaling is None else self.scaling.frequencies(self.base, frequencies)

    def rotate(self, x: Array, positions: Array, interleaved: bool = False) -> Array:
        """Rotates the last axis of `x` by its token's position.

        Args:
            x: [B, T, ..., width], width even.
            positions: [B, T] integers.
            interleaved: pairs are neighbours (2i, 2i + 1); else the halves (i, i + width / 2).
        """
        if self.base is None:
            return x
        half = x.shape[-1] // 2
        angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(self.frequencies(x.shape[-1]), jnp.float32)
        angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), half)
        cos, sin = self.rotation_factor * jnp.cos(angles), self.rotation_factor * jnp.sin(angles)
        turned = _turn(x.astype(jnp.float32), cos, sin, interleaved)
        return turned.astype(x.dtype)


def _turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(parts, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(parts, axis=-1)
