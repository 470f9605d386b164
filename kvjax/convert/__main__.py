"""Converts trained models:  python -m kvjax.convert SOURCE OUT [--huggingface] [--dtype bfloat16]"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from kvjax.config import ConfigError
from kvjax.convert.folder import load_model, save_model
from kvjax.convert.huggingface import to_huggingface
from kvjax.data.tokenizers import SubwordTokenizer


@dataclass(frozen=True)
class Arguments:
    """Writes a trained model as a folder of kvjax's own, or with --huggingface as one that transformers reads."""

    source: tyro.conf.Positional[Path]
    """Folder of a run or of a converted model, a Hugging Face folder, or a .gguf file."""
    out: tyro.conf.Positional[Path]
    """Folder to write: new or empty."""
    huggingface: bool = False
    """Write config.json and safetensors files of the Hugging Face architecture that the model fits."""
    dtype: str = "float32"
    """With --huggingface: type of the weights, float32 or bfloat16."""


def main(command_line: list[str]) -> None:
    """Loads the model and writes it, with its tokenizer."""
    arguments = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.convert", description=__doc__)
    config, params, tokenizer = load_model(arguments.source)
    if arguments.huggingface:
        to_huggingface(config, params, arguments.out, arguments.dtype, tokenizer and tokenizer.eos_id)
        if isinstance(tokenizer, SubwordTokenizer):  # bytes are not a tokenizer that transformers knows
            tokenizer.save(arguments.out)
    else:
        save_model(arguments.out, config, params, tokenizer)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
