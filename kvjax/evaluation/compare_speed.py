"""What configurations of a comparison take: seconds of a decode step and memory of a training step.

Kept in OUT/speed.json, so that they are measured once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.ahead_of_time import compile_train_step
from kvjax.config import Config, ModelConfig, require, to_dict
from kvjax.evaluation.decode_speed import STEPS, DecodeLoop, check_contexts, in_turns, pretended
from kvjax.model import abstract_parameters, build_model
from kvjax.sharding import make_mesh

FILE = "speed.json"


@dataclass(frozen=True)
class Decoding:
    """How decoding is timed."""

    batch: int = 8
    """Sequences."""
    contexts: tuple[int, ...] = (256, 1024, 4096)
    """Tokens of context of each; the cache has room for the longest."""
    rounds: int = 5
    """Times that every configuration has its turn; the median counts."""

    def check(self, models: dict[str, ModelConfig]) -> None:
        """Raises ConfigError if it can't be done."""
        require(self.batch > 0, f"the batch to decode is {self.batch}: it must be above 0")
        for model in models.values():
            check_contexts(model, self.contexts)


@dataclass(frozen=True)
class Speed:
    """What one configuration takes."""

    batch: int
    decode_seconds: dict[int, float]
    """Of a decode step of `batch` rows, by tokens of context."""
    step_bytes: int
    """Memory of a device for the compiled training step: its arguments (state and batch) and temporaries."""
    device: str


def measure(configs: dict[str, Config], out: Path, decoding: Decoding) -> dict[str, Speed]:
    """The speeds of all configurations: those in the folder's file, or measured and written there.

    Decoding is timed again for all unless all are in the file: only turns in one process can be compared.
    """
    settings = asdict(decoding) | {"steps": STEPS, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    settings["contexts"] = list(decoding.contexts)
    kept = _kept(out / FILE, settings)
    known = {name: kept[name] for name, config in configs.items() if kept.get(name, {}).get("of") == _key(config)}
    if set(known) != set(configs):
        print(f"\nmeasuring speed of {len(configs)} configurations, in turns", flush=True)
        seconds = _decode_seconds({name: config.model for name, config in configs.items()}, decoding)
        known = {name: {"of": _key(config), "decode_seconds": seconds[name],
                        "step_bytes": known[name]["step_bytes"] if name in known else step_bytes(config)}
                 for name, config in configs.items()}
        (out / FILE).write_text(json.dumps({"settings": settings, "configs": known}, indent=2) + "\n")
    return {name: Speed(decoding.batch, {int(n): s for n, s in entry["decode_seconds"].items()}, entry["step_bytes"],
                        settings["device"]) for name, entry in known.items()}


def _kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the file holds by configuration; nothing if it is damaged or was measured otherwise."""
    try:
        found = json.loads(path.read_text())
        return found["configs"] if found["settings"] == settings else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _key(config: Config) -> dict[str, Any]:
    """The settings that speed depends on."""
    return {"model": to_dict(config.model), "mesh": to_dict(config.mesh), "pack": config.data.pack,
            "batch_size": config.train.batch_size, "accumulation": config.train.accumulation}


def step_bytes(config: Config) -> int:
    """Bytes that the compiled training step takes of each device: its arguments and temporaries."""
    memory = compile_train_step(config, make_mesh(config.mesh)).memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def _decode_seconds(models: dict[str, ModelConfig], decoding: Decoding) -> dict[str, dict[int, float]]:
    """Seconds of a decode step, by name and context: of random weights, on one device."""
    caches = partial(pretended, batch=decoding.batch, room=max(decoding.contexts))
    loops = {name: DecodeLoop(build_model(model), _random_weights(model), caches(model))
             for name, model in models.items()}
    return in_turns(loops, decoding.contexts, decoding.rounds)


def _random_weights(model: ModelConfig) -> Any:
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: jax.numpy.asarray(0.02 * draw(x.shape, np.float32), x.dtype),
                        abstract_parameters(model))
