"""kvjax: language models with small key-value caches, in JAX.

Importing this package needs jax and flax only; training and evaluation bring their own requirements.
"""

from kvjax import attention
from kvjax.cache import Cache, cache_bytes_per_token, init_cache
from kvjax.config import Config, ConfigError, ModelConfig, register
from kvjax.decoding import decode
from kvjax.generate import generate
from kvjax.model import build_attention, build_model, parameter_count

__version__ = "0.1.0"

__all__ = ["Cache", "Config", "ConfigError", "ModelConfig", "attention", "build_attention", "build_model",
           "cache_bytes_per_token", "decode", "generate", "init_cache", "parameter_count", "register"]
