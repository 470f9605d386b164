"""Attention of new tokens to the past that a cache holds: one kernel, and a program for each way of keeping a past."""
