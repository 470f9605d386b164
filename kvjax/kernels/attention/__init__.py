"""Attention of tokens to themselves, in training and prefill: keys and values are made where they are read."""
