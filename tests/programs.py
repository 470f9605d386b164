"""How programs are compiled in tests, and in the processes that tests start."""

QUICKLY = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
           "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
"""Tests compile far more than they compute: without the expensive passes and with the older, simpler code for fused
operations, programs are compiled in a fifth of the time."""


def xla_flags(devices: int) -> str:
    """XLA_FLAGS for so many pretended CPU devices."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *QUICKLY])
