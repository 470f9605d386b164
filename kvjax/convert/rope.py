"""Rotary settings of a config.json, and kvjax's.

Read are `rope_theta` and `rope_scaling` (transformers 4, which transformers 5 reads too) and `rope_parameters`
(transformers 5); written is the older form, which both versions read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.attention import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from kvjax.config import require
from kvjax.convert.settings import Settings

BASE = 10_000.0
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"factor": "factor", _ORIGINAL: "original_context",
           "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_YARN = {"factor": "factor", _ORIGINAL: "original_context", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
         "attention_factor": "attention_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
         "truncate": "truncate"}
_FIELDS: dict[str, dict[str, str]] = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3, "yarn": _YARN}
"""For each rope type: its keys, and the fields of kvjax's scaling that they are."""
_SCALINGS: dict[str, Callable[..., RopeScaling]] = {
    "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def read_rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    Raises ConfigError for rope types other than default, linear, llama3 and yarn, for keys that these do not have, for
    values that are not of their keys' kinds, and for rotations of a part of the features or that differ by layer.
    """
    values = _table(settings)
    _refuse_unusual(settings, values)
    kind = values.get("rope_type", values.get("type", "default"))
    require(kind in [*_FIELDS], f"rope_type is {kind!r}: only {', '.join(_FIELDS)} can be read")
    unknown = {name: values[name] for name in values if name not in _COMMON | _FIELDS[kind].keys()}
    require(not unknown, f"the rotary settings hold {unknown}: rope type {kind!r} has no such key in kvjax")
    base = Settings({"rope_theta": values.get("rope_theta", settings.get("rope_theta"))}).number("rope_theta", BASE)
    return base, None if kind == "default" else _scaling(kind, settings, values)


def _table(settings: Settings) -> dict[str, Any]:
    tables = [settings.get(name, {}) for name in ("rope_scaling", "rope_parameters")]
    for table in tables:
        require(isinstance(table, dict), f"the rotary settings are {table!r}: a table of names and values is wanted")
    return tables[0] or tables[1]


def _refuse_unusual(settings: Settings, values: dict[str, Any]) -> None:
    nested = [name for name, value in values.items() if isinstance(value, dict)]
    require(not nested, f"the rotary settings differ by layer ({', '.join(nested)}): kvjax rotates all layers alike")
    for table in (settings, Settings(values)):
        table.only("partial_rotary_factor", 1.0, None, why="kvjax rotates all features of a head")


def _scaling(kind: str, settings: Settings, values: dict[str, Any]) -> RopeScaling:
    given = Settings(_given(kind, settings, values))
    readers = {_ORIGINAL: given.size, "truncate": given.flag}
    fields = {field: readers.get(name, given.number)(name) for name, field in _FIELDS[kind].items()
              if name in given.values or name == "factor"}  # the one key that has no default
    return _SCALINGS[kind](**fields)


def _given(kind: str, settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """The values that are not null, and what others say where they are."""
    given = {name: value for name, value in values.items() if value is not None}
    if kind == "linear":
        return given
    length = settings.size("max_position_embeddings")
    original = Settings({_ORIGINAL: settings.get(_ORIGINAL, given.get(_ORIGINAL))}).size(_ORIGINAL, length)
    if kind == "yarn":  # where a 0 means that nothing is given
        given = {name: value for name, value in given.items() if type(value) is bool or value != 0}
        given = {"factor": length / original} | given
    return given | {_ORIGINAL: original}


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
