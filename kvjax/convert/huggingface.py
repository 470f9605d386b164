"""Models in the Hugging Face format: folders with config.json and safetensors files, read and written.

Llama, Mistral, Qwen2, Qwen3, GPT-2, and DeepSeek's latent attention without experts. Weights keep their bits: nothing
is permuted for another order of rotated pairs, and bfloat16 and float16 are exact in float32.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ModelConfig, require
from kvjax.convert.architectures import ARCHITECTURES, read_config, write_config
from kvjax.convert.checks import check_params, prepare_folder
from kvjax.convert.layouts import HEAD, Layout, leaf_paths, on_device
from kvjax.convert.settings import CONFIG, Settings, read_settings
from kvjax.convert.weight_files import FLOATS, WeightFiles, write_weights
from kvjax.model.parameters import Shapes, flat, shape_differences

DTYPES = ("float32", "bfloat16")
SHARD_BYTES = 5 * 10**9


def from_huggingface(folder: Path | str) -> tuple[ModelConfig, dict[str, Any]]:
    """The model in a Hugging Face folder.

    Which architecture it is, `model_type` of config.json says. Computation is in the type that config.json names
    (float32 if none); its dropout rates are left behind. Ignored by name are tensors that are no weights of the model:
    rotary tables, GPT-2's masks, the layers of multi-token prediction.

    Args:
        folder: with config.json, and model.safetensors or its shards.
    Returns:
        The configuration, and the parameters in float32, on JAX's default device.
    Raises:
        ConfigError: the folder holds no such model, settings mean a model that kvjax does not have, or weights are
            missing, unknown, misshapen, quantised: all of them are listed.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    architecture, config = read_config(settings)
    return config, _read_params(folder, settings, config, architecture.layout)


def _read_params(folder: Path, settings: Settings, config: ModelConfig, layout: Layout) -> dict[str, Any]:
    with WeightFiles(folder) as files:
        sources = _sources(files, settings, config, layout)
        return on_device(layout.params(config, lambda name: files.read(sources[name])))


def _sources(files: WeightFiles, settings: Settings, config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Names in the files by full name. Raises ConfigError that lists what is wrong with the weights."""
    names = [name for name in files.shapes if not _is_ignored(name, settings, config, layout)]
    sources, wanted = {layout.full_name(name): name for name in names}, layout.shapes(config)
    found: Shapes = {name: files.shapes[source] for name, source in sources.items()}
    tied = found.pop(HEAD, None) if config.tie_embeddings else None
    lines = shape_differences(found, wanted)
    lines += [f"twice: {name}, with and without {layout.prefix}"
              for name in names if sources[layout.full_name(name)] != name]
    lines += [f"of type {files.dtypes[sources[name]]}: {name}, only {', '.join(sorted(FLOATS))} are read"
              for name in found if files.dtypes[sources[name]] not in FLOATS]
    require(not lines, "\n  ".join(["the weights are not those of the model that config.json describes:", *lines]))
    if tied is not None:
        embedding = files.read(sources[layout.full_name(layout.outer[0].name)])
        require(np.array_equal(files.read(HEAD), embedding), f"tie_word_embeddings is true, and {HEAD} is not the "
                "embedding: set it to false in config.json if the model has both")
    return sources


def _is_ignored(name: str, settings: Settings, config: ModelConfig, layout: Layout) -> bool:
    extra = range(config.layers, config.layers + settings.size("num_nextn_predict_layers", 0, least=0))
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return bool(re.fullmatch(layout.buffers, name)) or bool(layer) and int(layer[1]) in extra


def check_dtype(dtype: str) -> None:
    """Raises ConfigError unless `to_huggingface` writes weights of this type."""
    require(dtype in DTYPES, f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")


def to_huggingface(config: ModelConfig, params: dict[str, Any], folder: Path | str, dtype: str = "float32",
                   eos_id: int | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model as a Hugging Face folder, which transformers 4 and 5 read.

    The architecture is the first of these that says all that `config` does: Llama; Mistral (a window, or a width that
    is no multiple of the heads); Qwen2 (biases of queries, keys and values only); Qwen3 (QK-norm); GPT-2 (learned
    positions, LayerNorm, GELU, all biases); DeepSeek-V3 for latent attention. Settings of training (dropout, remat,
    the compute type, initial values) are not part of it.

    Args:
        config, params: the model.
        folder: made if it is not there; must be empty.
        dtype: element type of the weights, float32 or bfloat16; config.json names it.
        eos_id: the token at which generation ends; None: config.json names none.
        shard_bytes: above this the weights are split over several files.
    Raises:
        ConfigError: no architecture expresses the model (a sharing scheme, another attention, a soft-cap …), with the
            reason for each; `params` are another model's; the folder is not empty or cannot be made.
    """
    folder = Path(folder)
    check_dtype(dtype)
    kind, values = write_config(config)
    check_params(config, params)
    prepare_folder(folder)
    _write_params(folder, config, params, ARCHITECTURES[kind].layout, dtype, shard_bytes)
    values |= {"dtype": dtype, "bos_token_id": None, "eos_token_id": eos_id}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def _write_params(folder: Path, config: ModelConfig, params: dict[str, Any], layout: Layout, dtype: str,
                  limit: int) -> None:
    arrays, tensors = flat(params), {name: (tensor, layer) for name, tensor, layer in layout.tensors(config)}

    def make(name: str) -> np.ndarray:
        tensor, layer = tensors[name]
        leaves = [arrays[path] if layer is None else arrays[path][layer] for path in leaf_paths(tensor, layer)]
        return tensor.join([np.asarray(leaf, np.float32) for leaf in leaves])

    write_weights(folder, layout.shapes(config), make, dtype, limit)
