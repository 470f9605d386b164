"""Text to batches: sources, tokenizers, token arrays, packing, the Grain pipeline, and the `prepare` command."""
