"""KVPath-Concat at 353M, deltas of half of a head (sizes are this project's choice)."""

from configs._sharing import kvpath_concat

config = kvpath_concat("353m", parts=2)
