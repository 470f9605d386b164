"""What a run does between steps, and when."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
from jax.experimental import multihost_utils

from kvjax.config import TrainConfig
from kvjax.training.state import TrainState


class Hook(Protocol):
    """Something done after certain steps, before the next one starts."""

    def due(self, step: int, ending: bool) -> bool:
        """Whether to run after `step`; `ending` says that the run stops there."""

    def run(self, step: int, state: TrainState) -> None:
        """Does it."""


@dataclass(frozen=True)
class Every:
    """Runs after multiples of `steps`; after the last step of all always (`at_end`) or never."""

    steps: int
    run: Callable[[int, TrainState], None]
    at_end: bool

    def due(self, step: int, ending: bool) -> bool:
        return self.at_end if ending else step % self.steps == 0


class Profiler:
    """Traces `profile_steps` steps, from `profile_start` on, into `folder` (for TensorBoard or Perfetto)."""

    def __init__(self, config: TrainConfig, start: int, folder: Path):
        self._folder = folder
        self._before = None if config.profile_start is None else config.profile_start - 1
        self._last = None if config.profile_start is None else self._before + config.profile_steps
        self._tracing = False
        if self._before == start:
            self._toggle()

    def due(self, step: int, ending: bool) -> bool:
        return (ending or step == self._last) if self._tracing else (step == self._before and not ending)

    def run(self, step: int, state: TrainState) -> None:
        jax.block_until_ready(state.params)
        self._toggle()

    def _toggle(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(self._folder)
        self._tracing = not self._tracing


class StopSignal:
    """Turns SIGTERM and Ctrl-C into a request to save and stop; a second one stops at once. A context manager.

    With several processes, SIGTERM to any of them stops all after the same step.
    """

    def __init__(self):
        self._received = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        # With several processes JAX's coordination service listens for SIGTERM, and agrees on the step.
        if jax.process_count() == 1:
            self._previous = {n: signal.signal(n, self._receive) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        self._received = True
        print("\nstopping after this step and saving; once more stops at once, unsaved", file=sys.stderr, flush=True)
        signal.signal(number, self._previous[number])

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`; to be asked after every step, by every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received
