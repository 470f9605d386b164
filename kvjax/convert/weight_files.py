"""The safetensors files of a Hugging Face folder: model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes  # noqa: F401 (numpy learns bfloat16 by name)
import numpy as np

from kvjax.config import ConfigError, require
from kvjax.model.parameters import Shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32", "BF16", "F16"}


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ConfigError("the Hugging Face format needs safetensors: pip install safetensors") from error
    return safetensors


class WeightFiles:
    """All tensors of a folder: shapes and element types at once, contents one at a time. A context manager.

    Raises ConfigError if files are missing or damaged, or two hold the same tensor.
    """

    def __init__(self, folder: Path):
        self._stack, self._files = ExitStack(), {}
        self._paths: dict[str, Path] = {}
        self.shapes: Shapes = {}
        self.dtypes: dict[str, str] = {}
        for path in _paths(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        safetensors = _safetensors()
        try:
            file = self._stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            for name in file.keys():
                other = self._paths.setdefault(name, path)
                require(other == path, f"{name} is in {other.name} and in {path.name}, and its values could differ: "
                                       "download the model again")
                part = file.get_slice(name)
                self._files[name], self.shapes[name] = file, tuple(part.get_shape())
                self.dtypes[name] = part.get_dtype()
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its element type."""
        return self._files[name].get_tensor(name)


def _paths(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    require((folder / INDEX).is_file(), f"{folder} holds neither {SINGLE} nor {INDEX}: weights in other formats "
                                        "(pytorch_model.bin) must be saved as safetensors first")
    names = _indexed(folder / INDEX)
    missing = [name for name in names if not (folder / name).is_file()]
    require(not missing, f"{folder} lacks {', '.join(missing)}, which {INDEX} names: download the model again")
    return [folder / name for name in names]


def _indexed(path: Path) -> list[str]:
    """Names of the files that an index lists."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    good = isinstance(files, dict) and files and all(isinstance(file, str) for file in files.values())
    require(bool(good), f"{path} names no files: its weight_map must say of each tensor which file holds it")
    return sorted(set(files.values()))


def write_weights(folder: Path, shapes: Shapes, make: Callable[[str], np.ndarray], dtype: str, limit: int) -> None:
    """Writes tensors of the given shapes, made one after the other, in files of at most `limit` bytes.

    A tensor larger than that has a file of its own.
    """
    sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, shape in shapes.items()}
    shards = _shards(sizes, limit)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: make(name).astype(dtype) for name in shard}
        _safetensors().numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {
            name: file for file, shard in zip(names, shards, strict=True) for name in shard}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards
