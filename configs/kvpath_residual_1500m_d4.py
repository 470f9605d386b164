"""KVPath-Residual at 1.5B, deltas of a quarter of a head (sizes are this project's choice)."""

from configs._sharing import kvpath_residual

config = kvpath_residual("1500m", parts=4)
