"""Compiling for devices that are not here, or without running: memory and FLOPs before the first step."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from kvjax.config import Config, ConfigError
from kvjax.flops import training_flops_per_token
from kvjax.model import build_model, parameter_count
from kvjax.model.placement import check
from kvjax.sharding import AXES, make_mesh, named

GIB = 2**30
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 4 }
device_description_str: "NVIDIA H200"
"""
"""What XLA needs to know of a GPU that is not here."""


def tpu_devices(topology: str) -> list[Any]:
    """Devices of a TPU topology such as "v5e:2x2", for compilation only.

    Raises ConfigError where libtpu is missing or does not know the topology.
    """
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
                        "TPU_ACCELERATOR_TYPE": "v5p-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:
        raise ConfigError(f"TPU topology {topology!r}: {error}; compiling for TPUs needs `pip install jax[tpu]`, "
                          "and names such as v5e:4x4 or v5p:2x2x2") from error


def gpu_devices(topology: str = "1x1x1") -> list[Any]:
    """H200s for compilation only, as hosts x processes of each x GPUs of each.

    Raises ConfigError where the CUDA plugin or its compiler is missing.
    """
    try:
        return list(topologies.get_topology_desc("", platform="cuda", target_config=H200, topology=topology).devices)
    except Exception as error:
        raise ConfigError(f"H200s {topology!r}: {error}; compiling for GPUs needs `pip install jax-cuda13-plugin "
                          "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt`") from error


def single_device_mesh(device: Any) -> Mesh:
    """A mesh of one device with all the axes that sharding rules name."""
    return Mesh(np.array([device]).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compile_train_step(config: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled training step of a configuration over a mesh. Raises ConfigError if sizes do not divide."""
    from kvjax.training.optimizer import make_optimizer
    from kvjax.training.state import abstract_state
    from kvjax.training.step import make_train_step
    check(config, mesh)
    model, optimizer = build_model(config.model), make_optimizer(config)
    state = abstract_state(model, optimizer, config, mesh)
    shape, place = (config.train.batch_size, config.model.context_length), named(mesh, "batch", "length")
    names = {"tokens": jnp.int32, "targets": jnp.int32}
    if config.data.pack:
        names |= {"segment_ids": jnp.int32, "positions": jnp.int32, "loss_mask": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in names.items()}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # its devices may not be here
        return make_train_step(model, optimizer, config, mesh).lower(state, batch).compile()


def report(config: Config, topology: str | None = None) -> str:
    """Compiles one training step and tells its size: parameters, memory per device and FLOPs.

    Args:
        config: the run.
        topology: a TPU topology to compile for, such as "v5e:4x4"; None: the devices that are here.
    """
    mesh = make_mesh(config.mesh, tpu_devices(topology) if topology else None)
    memory = compile_train_step(config, mesh).memory_analysis()
    tokens = config.train.batch_size * config.model.context_length
    flops = training_flops_per_token(config.model, config.model.context_length)
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return "\n".join([
        f"parameters: {parameter_count(config.model):,}",
        f"compiled for {mesh.size} x {mesh.devices.flat[0].device_kind}" + (
            ", whose programs take other memory than a TPU's: --topology compiles for those"
            if mesh.devices.flat[0].platform == "cpu" else ""),
        f"memory per device: {_size(state + temporary)} = state and batch {_size(state)} + temporaries "
        f"{_size(temporary)}; --train.accumulation in more parts, or more devices, take less",
        f"FLOPs per step: {flops * tokens:.3g} for {tokens:,} tokens ({flops:.3g} a token)",
    ])


def _size(bytes: int) -> str:
    return f"{bytes / GIB:.2f} GiB" if bytes >= GIB else f"{bytes / 2**20:.1f} MiB"
