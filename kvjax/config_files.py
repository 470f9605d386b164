"""Configurations in Python files: `configs/NAME.py` holds one `config = Config(...)`.

Where the model is that of a trained one with changes, `config` is a function: of the trained model's configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from kvjax.config import Config, ConfigError, ModelConfig, load_module, require


def config_folders() -> list[Path]:
    """Where names are looked up: `configs/` in the current folder, then beside the kvjax package."""
    return [Path("configs"), Path(__file__).resolve().parents[1] / "configs"]


def config_names() -> list[str]:
    """Names that `load_config` knows, sorted."""
    return sorted({path.stem for folder in config_folders() for path in folder.glob("[!_]*.py")})


def listed_names() -> str:
    """All names, a line for each first word, as a shell would expand them: mha{_125m,_353m}."""
    families: dict[str, list[str]] = {}
    for name in config_names():
        first, _, rest = name.partition("_")
        families.setdefault(first, []).append(f"_{rest}" if rest else "")
    return "\n".join(first + (rests[0] if len(rests) == 1 else f"{{{','.join(rests)}}}")
                     for first, rests in families.items())


def load_config(name_or_path: str, source: ModelConfig | None = None) -> Config:
    """Loads a configuration by its name, or from the path of a Python file.

    Args:
        name_or_path: a name in `configs/`, or a path that ends with .py.
        source: the trained model that the run starts from, if any.
    Raises:
        ConfigError: there is none (with the nearest names), the file fails or holds no `config`, or what it holds is
            made for a trained model and none is given.
    """
    path = _find(name_or_path)
    try:
        module = load_module(f"kvjax_config_{path.stem}", path)
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(f"{path} does not load: {type(error).__name__}: {error}") from error
    config = getattr(module, "config", None)
    if callable(config):
        require(source is not None, f"{name_or_path!r} continues a trained model: give one with --init-from, a run's "
                "folder or a converted model")
        config = _made_for(source, config, name_or_path)
    require(isinstance(config, Config), f"{path} holds no `config = Config(...)`")
    return config


def _made_for(source: ModelConfig, make: Callable[[ModelConfig], Config], name: str) -> Config:
    try:
        return make(source)
    except ConfigError:
        raise
    except Exception as error:  # whatever a function of the user's raises
        raise ConfigError(f"{name!r} cannot be made of a model of {source.attention}: {error}") from error


def _find(name_or_path: str) -> Path:
    candidates = [folder / f"{name_or_path}.py" for folder in config_folders()]
    if name_or_path.endswith(".py"):
        candidates = [Path(name_or_path)]
    for path in candidates:
        if path.is_file():
            return path
    near = difflib.get_close_matches(Path(name_or_path).stem, config_names(), 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known:\n{listed_names()}"
    raise ConfigError(f"there is no configuration {name_or_path!r}, in configs/ or as a path to a .py file: {hint}")
