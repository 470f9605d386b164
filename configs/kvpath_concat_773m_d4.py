"""KVPath-Concat at 773M, deltas of a quarter of a head (sizes are this project's choice)."""

from configs._sharing import kvpath_concat

config = kvpath_concat("773m", parts=4)
