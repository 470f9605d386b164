"""KVPath-Residual at 773M, deltas of a quarter of a head (sizes are this project's choice)."""

from configs._sharing import kvpath_residual

config = kvpath_residual("773m", parts=4)
