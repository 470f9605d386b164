"""Checkpoints: state and data position in one Orbax bundle, so that they can't diverge.

A damaged checkpoint is noticed also where its files still parse: a checksum of the weights and one of the rest are
saved with them, sums of the arrays' bits, which don't depend on how arrays are split over devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from kvjax.config import CheckpointConfig, Config, ConfigError, load, require
from kvjax.model.parameters import parameters, shape_differences, tree_shapes
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import default_device
from kvjax.training import run_folder
from kvjax.training.state import TrainState

SHOWN = 20
"""Weights listed in an error."""
ABSTRACT_CHECKSUMS = {"params": np.empty((), np.uint32), "rest": np.empty((), np.uint32)}
T = TypeVar("T")


class Damaged(Exception):
    """A checkpoint that can't be read, or not as it was written."""


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for saves in progress when it ends."""

    def __init__(self, run_dir: Path, config: CheckpointConfig):
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(config.keep_latest)]
        if config.keep_every is not None:
            kept.append(policies.EveryNSteps(config.keep_every))
        self._run_dir = run_dir
        self._orbax = ocp.training.Checkpointer(
            (run_dir / run_folder.CHECKPOINTS).absolute(), cleanup_tmp_directories=True,
            preservation_policy=policies.AnyPreservationPolicy(kept))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self._orbax.close()

    def wait(self) -> None:
        """Returns once every save is complete."""
        self._orbax.wait()

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Starts to save the state and the position of the data iterator; waits only for an earlier save."""
        bundle = {"state": state, "data": data, "checksums": _checksums(state)}
        self._orbax.save_checkpointables_async(step, bundle, force=True)

    def restore(self, abstract: TrainState, data: Any) -> TrainState | None:
        """The newest state that is intact, placed as `abstract` says; sets `data` to its position.

        Damaged newer checkpoints are moved to `damaged/`, with a warning. None if there is no checkpoint.
        Raises ConfigError if the checkpoint is of another architecture, or none is intact.
        """
        if not self.steps:
            return None

        def read(step: int) -> TrainState:
            parts = {"params": abstract.params, "opt_state": abstract.opt_state}
            _refuse_other_weights(_folder(self._run_dir, step), parts)
            bundle = self._orbax.load_checkpointables(
                step, {"state": abstract, "data": data, "checksums": ABSTRACT_CHECKSUMS})
            _verify(_checksums(bundle["state"]), bundle["checksums"])
            return bundle["state"]

        _, state, damaged = _newest_intact(self._run_dir, self.steps, read)
        run_folder.wait_for_all("restored")
        if jax.process_index() == 0:
            for step in damaged:
                _set_aside(self._run_dir, step)
        run_folder.wait_for_all("set aside")
        self._orbax.reload()
        return state


def restore_params(run_dir: Path | str, step: int | None = None, mesh: Mesh | None = None) -> tuple[Config, Any, int]:
    """The configuration, the parameters and the step of a run, without the optimizer's state.

    Args:
      run_dir: folder of the run.
      step: which checkpoint; None: the newest that is intact.
      mesh: where the parameters are placed, split as in training; None: on JAX's default device.
    Kernels of other devices than those that are here are not asked for: `kernel` is then auto.
    Raises ConfigError if there is no such checkpoint, none is intact, or it is of another architecture.
    """
    run_dir = Path(run_dir)
    config = load(Config, run_dir / run_folder.CONFIG)
    if config.model.kernel in {"tpu", "gpu"} - {(mesh.devices.flat[0] if mesh else default_device()).platform}:
        config = replace(config, model=replace(config.model, kernel="auto"))
    steps = sorted(int(path.name) for path in (run_dir / run_folder.CHECKPOINTS).glob("*") if path.name.isdecimal())
    require(bool(steps), f"{run_dir} holds no checkpoint: train it first")
    require(step is None or step in steps, f"{run_dir} holds no checkpoint of step {step}: there are {steps}")
    abstract = {"params": _abstract_params(config, mesh)}

    def read(step: int) -> Any:
        folder = _folder(run_dir, step)
        _refuse_other_weights(folder, abstract)
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            params = ocp.load(folder, abstract, checkpointable_name="state")["params"]
            saved = ocp.load(folder, ABSTRACT_CHECKSUMS, checkpointable_name="checksums")
        _verify({"params": _checksum(params)}, saved)
        return params

    step, params, _ = _newest_intact(run_dir, steps if step is None else [step], read)
    return config, params, step


def _folder(run_dir: Path, step: int) -> Path:
    return (run_dir / run_folder.CHECKPOINTS / str(step)).absolute()


def _set_aside(run_dir: Path, step: int) -> None:
    """Moves a damaged checkpoint out of the way: its step will be saved again."""
    parent = run_dir / run_folder.DAMAGED
    parent.mkdir(exist_ok=True)
    number = len([path for path in parent.iterdir() if path.name.split(".")[0] == str(step)])
    _folder(run_dir, step).rename(parent / f"{step}.{number}")


def _abstract_params(config: Config, mesh: Mesh | None) -> Any:
    table = parameters(config.model)
    first = SingleDeviceSharding(default_device())
    shardings = jax.tree.map(lambda _: first, table) if mesh is None else parameter_shardings(config.model, mesh)
    return jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=s), table, shardings)


def _newest_intact(run_dir: Path, steps: list[int], read: Callable[[int], T]) -> tuple[int, T, list[int]]:
    """Reads the newest of `steps` that can be read. Returns its number, what was read, and newer, damaged steps."""
    damaged: list[int] = []
    for step in reversed(steps):
        result, error = None, None
        try:
            result = read(step)
        except (ConfigError, MemoryError, PermissionError):
            raise
        except Exception as caught:  # Orbax and TensorStore raise a dozen types for files that are cut or missing
            if "RESOURCE_EXHAUSTED" in str(caught):
                raise  # too little memory says nothing about the file
            error = caught
        if _all_agree(error is None):
            return step, result, damaged
        damaged.append(step)
        warnings.warn(f"the checkpoint of step {step} in {run_dir} is damaged and skipped ({_first_line(error)})",
                      stacklevel=3)
    raise ConfigError(f"no checkpoint of {run_dir} among steps {steps} can be read: the last error was "
                      f"{_first_line(error)}") from error


def _first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _all_agree(fine: bool) -> bool:
    if jax.process_count() == 1:
        return fine
    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))


def _refuse_other_weights(folder: Path, wanted: dict[str, Any]) -> None:
    """Compares names and shapes of the parts `wanted` of a state before anything is read, and lists what differs.

    Raises ConfigError on a difference, Damaged if the checkpoint doesn't say what it holds.
    """
    saved = ocp.metadata(folder, checkpointable_name="state").metadata
    if not isinstance(saved, dict):
        raise Damaged("it doesn't say what it holds")
    for part, tree in wanted.items():  # the weights first: what differs in the optimizer only follows from them
        lines = shape_differences(tree_shapes({part: saved.get(part)}), tree_shapes({part: tree}))
        shown = "\n".join(f"  {line}" for line in lines[:SHOWN])
        more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        require(not lines, f"{folder} is a checkpoint of another architecture; its weights differ:\n{shown}{more}")


def _words(x: Array) -> Array:
    """The bits of an array as unsigned integers."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


@jax.jit
def _checksum(tree: Any) -> Array:
    """Sum modulo 2^32 of the bits of all arrays: the same in whatever order and on however many devices."""
    return sum((jnp.sum(_words(x), dtype=jnp.uint32) for x in jax.tree.leaves(tree)), jnp.uint32(0))


def _checksums(state: TrainState) -> dict[str, Array]:
    return {"params": _checksum(state.params), "rest": _checksum((state.step, state.opt_state, state.key))}


def _verify(found: dict[str, Array], saved: dict[str, Array]) -> None:
    for name, value in found.items():
        if int(value) != int(saved[name]):
            raise Damaged(f"its {name} are not what was saved")
