"""KVPath-Residual at 125M, deltas of half of a head (sizes are this project's choice)."""

from configs._sharing import kvpath_residual

config = kvpath_residual("125m", parts=2)
