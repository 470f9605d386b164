"""A Hugging Face config.json, read by name: what is missing or means another model is refused, with its value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.config import ConfigError, require

CONFIG = "config.json"
LARGEST_SIZE, MOST_LAYERS = 10**9, 10**5
"""Above every model, and small enough that counting to it ends."""
LARGEST_NUMBER = 1e38
"""What float32 holds, nearly."""


def is_size(value: Any, least: int = 1, most: int = LARGEST_SIZE) -> bool:
    """Whether a value of a file is a whole number within these limits, which true is not."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number above 0 that float32 holds: not infinite, not NaN."""
    return type(value) in (int, float) and 0 < value <= LARGEST_NUMBER


@dataclass(frozen=True)
class Settings:
    """The values of a config.json. Names of the methods' arguments are its keys."""

    values: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """A value; `default` if it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        require(value is not None, f"{CONFIG} has no {name}: its model cannot be known")
        return value

    def size(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number from `least` to `most`; `default` if it is absent or null."""
        value = self._needed(name, default)
        require(is_size(value, least, most), f"{name} is {value!r}: it must be a whole number from {least} to {most:,}")
        return value

    def size_or_none(self, name: str, default: int | None = None) -> int | None:
        """A size, or None where it is null; `default` if it is absent."""
        null = name in self.values and self.values[name] is None
        return None if null else self.size(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; `default` if it is absent or null."""
        value = self._needed(name, default)
        require(is_number(value), f"{name} is {value!r}: it must be a number above 0, and at most {LARGEST_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false; `default` if it is absent or null."""
        value = self._needed(name, default)
        require(type(value) is bool, f"{name} is {value!r}: it must be true or false")
        return value

    def only(self, name: str, *allowed: Any, why: str = "") -> Any:
        """A value that must be one of those `allowed`; absent, it is the first of them. The error says `why`."""
        value = self.values.get(name, allowed[0])
        choices = " or ".join(map(repr, allowed))
        same = any(value == choice and (type(value) is bool) == (type(choice) is bool) for choice in allowed)
        require(same, f"{name} is {value!r}: {why or 'kvjax has no such model'}; only {choices} is read")
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
