"""Folders of converted models, and `load_model`, which reads those and every other form of a trained model.

    config.json (of the ModelConfig)  params/ (Orbax)  tokenizer/ (tokenizer.json)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from kvjax.config import Config, ConfigError, ModelConfig, load, require, save
from kvjax.convert.architectures import read_config
from kvjax.convert.checks import check_params, prepare_folder
from kvjax.convert.huggingface import from_huggingface
from kvjax.convert.settings import CONFIG, read_settings
from kvjax.data.tokenizers import Tokenizer, load_tokenizer
from kvjax.model import abstract_parameters
from kvjax.sharding import default_device
from kvjax.training.checkpoint import restore_params

PARAMS, TOKENIZER, TOKENIZER_FILE = "params", "tokenizer", "tokenizer.json"
Model = tuple[ModelConfig, dict[str, Any], Tokenizer | None]


def save_model(folder: Path | str, config: ModelConfig, params: Any, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model as a folder that `load_model` reads.

    Args:
        folder: made if it is not there; must be empty.
        config, params: the model.
        tokenizer: saved with it; None: the folder has none.
    Raises:
        ConfigError: the folder is not empty or cannot be made, or `params` are another model's.
    """
    folder = Path(folder)
    check_params(config, params)
    prepare_folder(folder)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    ocp.save((folder / PARAMS).absolute(), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    save(config, folder / CONFIG)  # last: it marks the folder as complete


def load_model(source: Path | str) -> Model:
    """Configuration, float32 parameters on JAX's default device, and tokenizer (None: it brings none) of a model.

    Args:
        source: the folder of a run, whose newest intact checkpoint is taken; a folder of `save_model`; a Hugging Face
            folder; or a .gguf file.
    Raises:
        ConfigError: it is none of these, or cannot be read as what it is.
    """
    source = Path(source)
    if source.suffix == ".gguf":
        from kvjax.convert.gguf import from_gguf
        return from_gguf(source)
    keys = read_settings(source).values.keys()
    if "model_type" in keys:
        model = from_huggingface(source)
    elif {"model", "train"} <= keys:
        config, params, _ = restore_params(source)
        model = config.model, params
    else:
        require("attention" in keys, _no_model(source))
        model = _load_converted(source)
    return *model, load_model_tokenizer(source)


def load_model_config(source: Path | str) -> ModelConfig:
    """The configuration of `load_model`, without reading weights. Raises what that raises for it."""
    source = Path(source)
    if source.suffix == ".gguf":
        from kvjax.convert.gguf import config_of_gguf
        return config_of_gguf(source)
    settings = read_settings(source)
    keys = settings.values.keys()
    if "model_type" in keys:
        return read_config(settings)[1]
    if {"model", "train"} <= keys:
        return load(Config, source / CONFIG).model
    require("attention" in keys, _no_model(source))
    return load(ModelConfig, source / CONFIG)


def _no_model(source: Path) -> str:
    return (f"{source / CONFIG} is no model's: it has neither model_type (Hugging Face) nor model and train (a run) "
            "nor attention (a converted model)")


def load_model_tokenizer(source: Path | str) -> Tokenizer | None:
    """The tokenizer of `load_model`, without reading weights; None if the model brings none."""
    source = Path(source)
    if source.suffix == ".gguf":
        from kvjax.convert.gguf import tokenizer_of_gguf
        return tokenizer_of_gguf(source)
    folder = source if "model_type" in read_settings(source).values else source / TOKENIZER
    return load_tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() else None


def _load_converted(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    config = load(ModelConfig, folder / CONFIG)
    place = SingleDeviceSharding(default_device())
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=place),
                            abstract_parameters(config))
    weights = (folder / PARAMS).absolute()
    try:
        check_params(config, ocp.metadata(weights).metadata, str(weights))
        params = ocp.load(weights, abstract)
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise a dozen types for files that are cut or missing
        raise ConfigError(f"{weights} cannot be read: {type(error).__name__}: "
                          f"{str(error).splitlines()[0][:200] if str(error) else ''}") from error
    return config, params
