"""The training loop, from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh

from kvjax.config import Config, require
from kvjax.data.pipeline import TrainingIterator, training_iterator
from kvjax.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, make_tokenizer
from kvjax.evaluation.held_out import HeldOut
from kvjax.evaluation.perplexity import evaluate
from kvjax.flops import training_flops_per_token
from kvjax.model import build_model
from kvjax.model.placement import check
from kvjax.sharding import make_mesh
from kvjax.training import report, run_folder, start
from kvjax.training.checkpoint import Checkpoints
from kvjax.training.hooks import Every, Hook, Profiler, StopSignal
from kvjax.training.metrics import Display, Meter, MetricsFiles, check_wandb, is_reported
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import TrainState, abstract_state, init_state
from kvjax.training.step import Metrics, make_train_step, place, process_part


class Diverged(FloatingPointError):
    """Loss or gradient are no longer finite."""


@dataclass(frozen=True)
class Run:
    """What stays the same for a whole run."""

    config: Config
    folder: Path
    mesh: Mesh
    model: nn.Module
    optimizer: optax.GradientTransformation
    tokenizer: Tokenizer
    data: TrainingIterator
    """Endless batches of this process's rows."""

    def validation(self, params: Any, limit: int | None) -> dict[str, float]:
        """Results of `evaluate` on the held-out split, or on `limit` batches spread over it."""
        text = HeldOut(self.config, self.tokenizer, self.mesh, limit)
        with text.batches() as batches:
            return evaluate(self.model, params, batches, mesh=self.mesh, text_bytes=text.size())


def train(config: Config, run_dir: Path | str, *, overwrite: bool = False, devices: Sequence[jax.Device] | None = None,
          stop_after: int | None = None, source: start.Source | None = None) -> TrainState:
    """Trains in `run_dir` until `train.steps` steps are done, from its newest checkpoint if there is one.

    Args:
      config: the run. A folder that holds another one is refused.
      run_dir: receives config.json, tokenizer/, checkpoints/, metrics.jsonl and tensorboard/.
      overwrite: starts afresh: deletes what an earlier run left in the folder.
      devices: to train on; None: all.
      stop_after: saves and stops after this step, as SIGTERM would; the same call without it resumes.
      source: a trained model to start from, instead of random weights.

    Returns: the last state.
    Raises ConfigError on settings that can't work, and Diverged when loss or gradient are no longer finite; such a
      state is never saved.
    """
    require((source is None) == (config.train.init_from is None), f"train.init_from is {config.train.init_from!r}: it "
            "goes with the trained model itself, train.py --init-from MODEL or train(..., source=Source(MODEL))")
    check_wandb(config.train)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        run = open_run(config, Path(run_dir), overwrite, devices, source)
        stack.enter_context(run_folder.locked(run.folder))
        stack.enter_context(jax.set_mesh(run.mesh))
        stack.enter_context(closing(run.data))
        checkpoints = stack.enter_context(Checkpoints(run.folder, config.checkpoint))
        state = checkpoints.restore(abstract_state(run.model, run.optimizer, config, run.mesh), run.data)
        first = 0 if state is None else int(state.step)
        display = Display(config.train, config.model.context_length, first)
        display.say(report.summary(config, run.mesh, run.tokenizer))
        if first:
            display.say(f"resuming after step {first}")
        state = initial_state(run, source, display) if state is None else state
        if first == config.train.steps and is_reported(run.folder, first):
            display.say(f"{run.folder} is complete, all {first} steps are done; --overwrite starts it afresh")
            return state
        files = stack.enter_context(MetricsFiles(run.folder, first, config))

        hooks = periodic(run, checkpoints, display, files, first)
        last = config.train.steps if stop_after is None else min(stop_after, config.train.steps)
        started = time.perf_counter()
        with display:
            state = run_steps(run, state, hooks, Monitor(run, display, files), stop, range(first + 1, last + 1))
        checkpoints.wait()
        if int(state.step) == config.train.steps:
            finish(run, state, display, files)
            if jax.process_index() == 0:
                display.say(report.ending(run.folder, last - first, time.perf_counter() - started, run.mesh))
        else:
            display.say(f"stopped and saved after step {int(state.step)}: the same command resumes {run.folder}")
    return state


def initial_state(run: Run, source: start.Source | None, display: Display) -> TrainState:
    """A new state: of random weights, or of a trained model's, whose conversion is reported."""
    if source is None:
        return init_state(run.model, run.optimizer, run.config, run.mesh)
    converted = start.convert_source(source, run.config, run.tokenizer, run.mesh)
    display.say(start.described(converted))
    if jax.process_index() == 0:
        start.write_report(source, converted, run.folder)
    source.release()
    return init_state(run.model, run.optimizer, run.config, run.mesh, converted.params)


def periodic(run: Run, checkpoints: Checkpoints, display: Display, files: MetricsFiles, first: int) -> list[Hook]:
    """What a run does between steps: checkpoints, validation, a profiler trace."""
    def validate(step: int, state: TrainState) -> None:
        loss = run.validation(state.params, run.config.train.eval_batches)["loss"]
        display.say(f"step {step}: validation loss {loss:.4f}")
        files.write(step, {"validation_loss": loss})

    def save(step: int, state: TrainState) -> None:
        checkpoints.save(step, state, run.data)

    return [
        Every(run.config.checkpoint.every_steps, save, at_end=True),
        Every(run.config.train.eval_every, validate, at_end=False),
        Profiler(run.config.train, first, run.folder / run_folder.PROFILE),
    ]


def open_run(config: Config, folder: Path, overwrite: bool = False, devices: Sequence[jax.Device] | None = None,
             source: start.Source | None = None) -> Run:
    """Checks a configuration, reads its data, builds what a run needs, and only then opens or resumes the folder.

    The tokenizer is that of the folder, else the trained model's that the run starts from, else the configuration's.
    """
    mesh = make_mesh(config.mesh, devices)
    check(config, mesh)
    if source is not None:
        start.check_source(source, config, mesh, folder)
    model, optimizer = build_model(config.model), make_optimizer(config)
    resuming = run_folder.resumes(config, folder, overwrite)

    def build(tokenizer: Tokenizer) -> Run:
        check_vocabulary(tokenizer, config.model.vocab_size)
        part, parts = process_part(mesh, config.train.batch_size)
        data = training_iterator(config.data, tokenizer, config.train.batch_size // parts,
                                 config.model.context_length, config.train.seed, part, parts)
        return Run(config, folder, mesh, model, optimizer, tokenizer, data)

    # The first process makes the tokenizer, and opens the folder when all have looked at it; the others read it there.
    saved, run = folder / run_folder.TOKENIZER, None
    if jax.process_index() == 0:
        new = partial(make_tokenizer, config.data) if source is None else lambda: source.tokenizer
        run = build(load_tokenizer(saved) if resuming else new())
    run_folder.wait_for_all("checked")
    if run:
        run_folder.open_folder(config, run.tokenizer, folder, overwrite)
    run_folder.wait_for_all("opened")
    return run or build(load_tokenizer(saved))


def run_steps(run: Run, state: TrainState, hooks: Sequence[Hook], monitor: Monitor, stop: StopSignal,
              steps: range) -> TrainState:
    """Runs numbered steps, until the last or until a signal asks to stop. At most two are in flight."""
    train_step = make_train_step(run.model, run.optimizer, run.config, run.mesh)
    unread: tuple[int, Metrics] | None = None
    for step in steps:
        batch = place(next(run.data), run.mesh, run.config.train.batch_size)
        state, metrics = train_step(state, batch)
        if unread:
            monitor.read(*unread)  # the step before, while this one runs
        unread = step, metrics
        ending = stop.requested(step) or step == steps[-1]
        due = [hook for hook in hooks if hook.due(step, ending)]
        if due:
            monitor.read(*unread)  # before any hook: a state that diverged must not be saved
            unread = None
            for hook in due:
                hook.run(step, state)
            monitor.restart_clock()
        if ending:
            break
    return state


class Monitor:
    """Reads the metrics of finished steps: stops a run that diverged, shows progress, writes metric files."""

    def __init__(self, run: Run, display: Display, files: MetricsFiles):
        self._config, self._display, self._files = run.config.train, display, files
        length = run.config.model.context_length
        self._meter = Meter(run.config.train.batch_size * length, training_flops_per_token(run.config.model, length),
                            run.mesh.devices.flat)

    def read(self, step: int, metrics: Metrics) -> None:
        """Waits for a step to finish. Raises Diverged, naming the step, if its loss or gradient isn't finite."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise Diverged(f"step {step}: the loss is {values['loss']}, its gradient's norm {values['grad_norm']}: "
                           "this state was not saved. Look at the data of this step, or start another run with a "
                           "lower --optimizer.peak-lr or a longer warm-up")
        self._meter.finished_step()
        self._display.advance(step)
        if step % self._config.log_every == 0 or step == self._config.steps:
            values |= self._meter.rates()
            self._display.report(step, values)
            self._files.write(step, values)
            self._meter.restart()

    def restart_clock(self) -> None:
        """Leaves out of the speed what happened since the last step."""
        self._meter.restart()


def finish(run: Run, state: TrainState, display: Display, files: MetricsFiles) -> None:
    """Reports the final validation loss, how it compares with byte models where the source is text, and a sample."""
    config, readable = run.config, report.has_readable_text(run.config.data)
    results = run.validation(state.params, None if readable else config.train.eval_batches)
    some = "" if readable else f" of {config.train.eval_batches} batches of the held-out text"
    display.say(f"final validation loss {results['loss']:.4f} ({results['tokens']:,} tokens{some}), "
                f"{results['nats_per_byte']:.4f} nats ({results['bits_per_byte']:.4f} bits) per byte")
    numbers = {"validation_loss": results["loss"], "validation_nats_per_byte": results["nats_per_byte"]}
    if readable:
        orders = report.byte_models(config.data)
        display.say("on the same text: " + ", ".join(f"order-{n} byte model {x:.4f} nats" for n, x in orders.items()))
        numbers |= {f"order_{n}_nats_per_byte": x for n, x in orders.items()}
    files.write(config.train.steps, numbers)
    if config.train.sample_tokens and jax.process_count() == 1:
        display.say("sample:\n" + report.text_sample(run.model, config, state.params, run.tokenizer))
