"""KVPath-Concat over latents at 353M (sizes are this project's choice)."""

from configs._sharing import kvpath_mla

config = kvpath_mla("353m")
