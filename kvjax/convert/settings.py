"""A Hugging Face config.json, read by name: what is missing or means another model is refused, with its value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.config import ConfigError, require

CONFIG = "config.json"


@dataclass(frozen=True)
class Settings:
    """The values of a config.json. Names of the methods' arguments are its keys."""

    values: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """A value; `default` if it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; `default` if it is absent or null."""
        value = self.get(name, default)
        require(value is not None, f"{CONFIG} has no {name}: its model cannot be known")
        require(type(value) is int and value > 0, f"{name} is {value!r}: it must be a whole number above 0")
        return value

    def number(self, name: str, default: float) -> float:
        """A number above 0; `default` if it is absent or null."""
        value = self.get(name, default)
        require(type(value) in (int, float) and value > 0, f"{name} is {value!r}: it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` if it is absent or null."""
        value = self.get(name, default)
        require(type(value) is bool, f"{name} is {value!r}: it must be true or false")
        return value

    def only(self, name: str, *allowed: Any, why: str = "") -> Any:
        """A value that must be one of those `allowed`; absent, it is the first of them. The error says `why`."""
        value = self.values.get(name, allowed[0])
        choices = " or ".join(map(repr, allowed))
        require(value in allowed, f"{name} is {value!r}: {why or 'kvjax has no such model'}; only {choices} is read")
        return value


def read_settings(folder: Path) -> Settings:
    """The config.json of a folder. Raises ConfigError if it is missing or unreadable."""
    require(folder.is_dir(), f"{folder} is not a folder: name one that holds a model, kvjax downloads nothing")
    path = folder / CONFIG
    require(path.is_file(), f"{path} does not exist: the folder holds no model")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(values, dict), f"{path} holds no settings")
    return Settings(values)
