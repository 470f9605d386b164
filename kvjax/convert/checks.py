"""What is checked before a model is read or written: names and shapes of its weights, and the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvjax.config import ConfigError, ModelConfig, require
from kvjax.model.parameters import shape_differences, shapes_of, tree_shapes


def check_params(config: ModelConfig, params: Any, name: str = "these parameters") -> None:
    """Raises ConfigError that lists every weight in which a tree of arrays is not a parameter tree of `config`."""
    lines = shape_differences(tree_shapes(params), shapes_of(config))
    require(not lines, "\n  ".join([f"{name} are not those of the model's configuration:", *lines]))


def prepare_folder(folder: Path) -> None:
    """Makes a folder to write to. Raises ConfigError if it holds something already, or cannot be made."""
    try:
        require(not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
                f"{folder} is not an empty folder: choose another")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}; choose another folder") from error
