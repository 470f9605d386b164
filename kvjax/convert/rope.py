"""Rotary settings of a config.json, and kvjax's.

Read are `rope_theta` and `rope_scaling` (transformers 4, which transformers 5 reads too) and `rope_parameters`
(transformers 5); written is the older form, which both versions read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.attention import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from kvjax.config import ConfigError, require
from kvjax.convert.settings import Settings

BASE = 10_000.0
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3 = {"factor": "factor", "original_max_position_embeddings": "original_context",
           "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_YARN = {"factor": "factor", "original_max_position_embeddings": "original_context", "beta_fast": "beta_fast",
         "beta_slow": "beta_slow", "attention_factor": "attention_factor", "mscale": "mscale",
         "mscale_all_dim": "mscale_all_dim", "truncate": "truncate"}
_FIELDS: dict[str, dict[str, str]] = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3, "yarn": _YARN}
"""For each rope type: its keys, and the fields of kvjax's scaling that they are."""
_SCALINGS: dict[str, Callable[..., RopeScaling]] = {
    "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def read_rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    Raises ConfigError for rope types other than default, linear, llama3 and yarn, for keys that these do not have, and
    for rotations of a part of the features or that differ by layer.
    """
    values = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    _refuse_unusual(settings, values)
    kind = values.get("rope_type", values.get("type", "default"))
    require(kind in _FIELDS, f"rope_type is {kind!r}: only {', '.join(_FIELDS)} can be read")
    unknown = {name: values[name] for name in values if name not in _COMMON | _FIELDS[kind].keys()}
    require(not unknown, f"the rotary settings hold {unknown}: rope type {kind!r} has no such key in kvjax")
    base = Settings({"rope_theta": values.get("rope_theta", settings.get("rope_theta"))}).number("rope_theta", BASE)
    return base, None if kind == "default" else _scaling(kind, settings, values)


def _refuse_unusual(settings: Settings, values: Any) -> None:
    require(isinstance(values, dict), f"the rotary settings are {values!r}: a table of names and values is wanted")
    nested = [name for name, value in values.items() if isinstance(value, dict)]
    require(not nested, f"the rotary settings differ by layer ({', '.join(nested)}): kvjax rotates all layers alike")
    for part in (settings.get("partial_rotary_factor", 1.0), values.get("partial_rotary_factor") or 1.0):
        require(part == 1, f"partial_rotary_factor is {part}: kvjax rotates all features of a head")


def _scaling(kind: str, settings: Settings, values: dict[str, Any]) -> RopeScaling:
    length = settings.size("max_position_embeddings")
    original = settings.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    given = {name: value for name, value in values.items() if value is not None}
    if kind in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = original or length
    if kind == "yarn":
        given = {"factor": length / (original or length), "truncate": True} | given
        given = {name: value for name, value in given.items() if value or name == "truncate"}  # 0 means not given
    fields = {field: given[name] for name, field in _FIELDS[kind].items() if name in given}
    try:
        return _SCALINGS[kind](**fields)
    except TypeError as error:
        raise ConfigError(f"the rotary settings {values} make no {kind!r} scaling: {error}") from error


def write_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Keys of a config.json. Raises ConfigError for a scaling that has no rope type."""
    if scaling is None:
        return {"rope_theta": base}
    kind = next((kind for kind, cls in _SCALINGS.items() if type(scaling) is cls), None)
    require(kind is not None, f"rope_scaling is {scaling}: it has no rope type")
    values = {name: getattr(scaling, field) for name, field in _FIELDS[kind].items()}
    values = {name: value for name, value in values.items() if value is not None}
    if values.get("truncate"):
        del values["truncate"]  # the default; versions of transformers before 4.56 do not know the key
    return {"rope_theta": base, "rope_scaling": {"rope_type": kind, **values}}
