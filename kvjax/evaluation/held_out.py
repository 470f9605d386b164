"""The held-out text of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from kvjax.config import Config
from kvjax.data.pipeline import validation_batches, validation_bytes
from kvjax.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class HeldOut:
    """The held-out split of a run, or so many batches of it, spread evenly."""

    config: Config
    tokenizer: Tokenizer
    mesh: Mesh
    """Batches have as many rows as a part of a training batch, or the next more that split over it."""
    limit: int | None = None
    """Batches; None: all."""

    def batches(self) -> closing[Iterator[dict[str, np.ndarray]]]:
        """As `kvjax.data.pipeline.validation_batches` makes them, to be used in a `with` statement."""
        return closing(validation_batches(*self._scope()))

    def size(self) -> float:
        """UTF-8 bytes that their targets stand for."""
        return validation_bytes(*self._scope())

    def _scope(self) -> tuple:
        train, ways = self.config.train, self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        rows = -(-train.batch_size // train.accumulation // ways) * ways
        return self.config.data, self.tokenizer, rows, self.config.model.context_length, self.limit
