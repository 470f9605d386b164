"""Converts trained models:  python -m kvjax.convert SOURCE OUT [--huggingface] [--dtype bfloat16]"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvjax.config import ConfigError, require
from kvjax.convert.architectures import write_config
from kvjax.convert.folder import Model, load_model, save_model
from kvjax.convert.huggingface import check_dtype, to_huggingface
from kvjax.data.tokenizers import SubwordTokenizer
from kvjax.model import parameter_count


@dataclass(frozen=True)
class Arguments:
    """Writes a trained model as a folder of kvjax's own, or with --huggingface as one that transformers reads."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Folder of a run or of a converted model, a Hugging Face folder, or a .gguf file."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write: new or empty."""
    huggingface: bool = False
    """Write config.json and safetensors files of the Hugging Face architecture that the model fits."""
    dtype: str | None = None
    """With --huggingface: type of the weights, float32 (where it is not given) or bfloat16."""


def main(command_line: list[str]) -> None:
    """Loads the model, writes it with its tokenizer, and says what was written."""
    arguments = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.convert", description=__doc__)
    dtype = arguments.dtype or "float32"
    check_dtype(dtype)
    require(arguments.huggingface or arguments.dtype is None, f"--dtype {dtype} says nothing without --huggingface: "
            "folders of kvjax's own hold float32")
    model = load_model(arguments.source)
    if arguments.huggingface:
        form = _write_huggingface(arguments.out, model, dtype)
    else:
        save_model(arguments.out, *model)
        form = "a model of kvjax's own"
    config = model[0]
    print(f"written to {arguments.out}: {form}, {parameter_count(config):,} parameters in {dtype}, {config.attention}")


def _write_huggingface(folder: Path, model: Model, dtype: str) -> str:
    """Writes the folder; returns its model_type."""
    config, params, tokenizer = model
    to_huggingface(config, params, folder, dtype, tokenizer and tokenizer.eos_id)
    if isinstance(tokenizer, SubwordTokenizer):  # bytes are not a tokenizer that transformers knows
        tokenizer.save(folder)
    return write_config(config)[0]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
