"""Trained models in and out: Hugging Face folders, GGUF files, and folders of kvjax's own (`kvjax.convert.folder`)."""

from kvjax.convert.huggingface import from_huggingface, to_huggingface

__all__ = ["from_huggingface", "to_huggingface"]
