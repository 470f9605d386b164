"""Evaluation of a run from its folder alone: held-out loss, cache report and text."""
