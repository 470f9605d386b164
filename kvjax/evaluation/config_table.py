"""A Markdown table of all configurations: parameters and cache, beside multi-head attention.

    python -m kvjax.evaluation.config_table
"""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.config_files import config_names, load_config
from kvjax.evaluation.cache_report import report
from kvjax.model import parameter_count


def row(name: str) -> str:
    """One configuration; its cache is measured on an allocated one."""
    model = load_config(name).model
    cache = report(model, length=128)
    elements = cache.measured / model.layers / jnp.dtype(cache.dtype).itemsize
    return (f"| `{name}` | {parameter_count(model) / 1e6:,.1f}M | {model.layers} x {model.width} | "
            f"{elements:,.0f} | {cache.measured:,.0f} | {cache.factor:.2f} |")


def main() -> None:
    """Prints the table."""
    print("| config | parameters | layers x width | elements / token, layer | bytes / token | times smaller than MHA |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in config_names():
        print(row(name))


if __name__ == "__main__":
    main()
