"""Compaction of caches: a few keys and values, fitted to attend as all of a context's tokens did."""
