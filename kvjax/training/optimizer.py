"""AdamW with decoupled weight decay on matrices, gradient clipping and a learning-rate schedule."""

from __future__ import annotations

from typing import Any

import jax
import optax

from kvjax.config import Config, ModelConfig, OptimizerConfig, require
from kvjax.model import parameters


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by number of finished steps: step n of 1..steps uses the value at n - 1.

    It rises linearly to the peak at step `warmup_steps`, and step `steps` uses the final value exactly.
    Raises ConfigError if warm-up and decay are longer than the run.
    """
    require(config.warmup_steps < steps, f"optimizer.warmup_steps {config.warmup_steps} does not end before the run of "
            f"train.steps {steps}: lower --optimizer.warmup-steps (of compare: --warmup-steps) or raise the steps")
    left = steps - config.warmup_steps
    final = config.peak_lr * config.final_lr_fraction
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.peak_lr, left, config.final_lr_fraction)
    elif config.schedule == "wsd":
        decay = round(config.decay_fraction * steps)
        require(decay <= left, f"optimizer.warmup_steps {config.warmup_steps} and a decay of {decay} steps "
                f"(optimizer.decay_fraction {config.decay_fraction}) are longer than the run of train.steps {steps}: "
                "lower one of them or raise train.steps")
        after = optax.linear_schedule(config.peak_lr, final, decay, transition_begin=left - decay)
    else:
        after = optax.constant_schedule(config.peak_lr)
    warmup = optax.linear_schedule(0.0, config.peak_lr, max(config.warmup_steps, 1))
    by_number = optax.join_schedules([warmup, after], [config.warmup_steps])
    return lambda finished: by_number(finished + 1)


def decay_mask(config: ModelConfig) -> Any:
    """Tree like the parameters: True where weight decay applies, that is for matrices.

    Biases are not decayed, whatever their shape.
    """
    return jax.tree.map(lambda param: param.is_matrix, parameters(config))


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer of a run. Raises ConfigError if the schedule doesn't fit into the run."""
    settings = config.optimizer
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    adamw = optax.adamw(learning_rate(settings, config.train.steps), settings.b1, settings.b2, settings.eps,
                        weight_decay=settings.weight_decay, mask=decay_mask(config.model))
    return optax.chain(clip, adamw)
