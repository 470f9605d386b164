"""Configurations in Python files: `configs/NAME.py` holds one `config = Config(...)`."""

from __future__ import annotations

import difflib
from pathlib import Path

from kvjax.config import Config, ConfigError, load_module, require


def config_folders() -> list[Path]:
    """Where names are looked up: `configs/` in the current folder, then beside the kvjax package."""
    return [Path("configs"), Path(__file__).resolve().parents[1] / "configs"]


def config_names() -> list[str]:
    """Names that `load_config` knows, sorted."""
    return sorted({path.stem for folder in config_folders() for path in folder.glob("[!_]*.py")})


def load_config(name_or_path: str) -> Config:
    """Loads a configuration by its name, or from the path of a Python file.

    Raises ConfigError, with the nearest names, if there is none, or if the file fails or holds no `config`.
    """
    path = _find(name_or_path)
    try:
        module = load_module(f"kvjax_config_{path.stem}", path)
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(f"{path} does not load: {type(error).__name__}: {error}") from error
    config = getattr(module, "config", None)
    require(isinstance(config, Config), f"{path} holds no `config = Config(...)`")
    return config


def _find(name_or_path: str) -> Path:
    candidates = [folder / f"{name_or_path}.py" for folder in config_folders()]
    if name_or_path.endswith(".py"):
        candidates = [Path(name_or_path)]
    for path in candidates:
        if path.is_file():
            return path
    near = difflib.get_close_matches(Path(name_or_path).stem, config_names(), 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(config_names())}"
    raise ConfigError(f"there is no configuration {name_or_path!r}, in configs/ or as a path to a .py file: {hint}")
