"""Outside reference values."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from variants import model_config

import kvjax
from kvjax.attention import Kronecker

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["tpa_a", "tpa_b"])
def test_tensor_product_attention_equals_its_authors_layer(name):
    golden = np.load(DATA / f"{name}.npz")
    heads, rank, width = golden["q_a"].shape[2], golden["k_a"].shape[1], golden["q_b"].shape[2]
    variant = Kronecker(h1=heads, h2=1, d1=1, d2=width, q_rank=golden["q_a"].shape[1], k_rank=rank, v_rank=rank)
    config = model_config(variant, width=golden["x"].shape[2], rope_base=float(golden["rope_base"]))
    factors = {f"{n}_a": golden[f"{n}_a"][..., None] for n in "qkv"}
    factors |= {f"{n}_b": golden[f"{n}_b"][:, :, None] for n in "qkv"}
    layer = {"layer_0": factors | {"o_proj": golden["o_proj"]}}
    y = kvjax.build_attention(config).apply({"params": layer}, jnp.asarray(golden["x"]))
    assert golden["y"].std() > 0.02
    np.testing.assert_allclose(y, golden["y"], atol=1e-4)
