"""Caches given to unmodified models of the transformers library, which go on as kvjax does; what is refused.

All but the refusals needs requirements-torch.txt.
"""

import dataclasses
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ConfigError, ModelConfig
from kvjax.attention import GroupedQuery, Latent, SkipV1
from kvjax.cache import Prefix, init_cache
from kvjax.compaction import references
from kvjax.compaction.compacting import compact
from kvjax.compaction.huggingface import to_huggingface_cache
from kvjax.convert import to_huggingface
from kvjax.decoding import decode as decode_eagerly
from kvjax.generate import generate

decode = jax.jit(decode_eagerly, static_argnums=0)
LENGTH, SLOTS, STEPS = 60, 12, 8
LLAMA = ModelConfig(GroupedQuery(4, 2, 8), vocab_size=48, layers=2, width=32, feed_forward_width=48,
                    context_length=128, dtype="float32", output_init=1.0)
GPT2 = dict(positions="learned", norm="layer", feed_forward="gelu", feed_forward_bias=True)
CONFIGS = {
    "llama": (LLAMA, "LlamaForCausalLM"),
    "llama_one_head": (dataclasses.replace(LLAMA, attention=GroupedQuery(4, 1, 8)), "LlamaForCausalLM"),
    "mistral": (dataclasses.replace(LLAMA, attention=GroupedQuery(3, 3, 8)), "MistralForCausalLM"),
    "mistral_window": (dataclasses.replace(LLAMA, window=10), "MistralForCausalLM"),
    "qwen2": (dataclasses.replace(LLAMA, attention=GroupedQuery(4, 2, 8, qkv_bias=True)), "Qwen2ForCausalLM"),
    "qwen3": (dataclasses.replace(LLAMA, attention=GroupedQuery(4, 2, 8, qk_norm=True)), "Qwen3ForCausalLM"),
    "gpt2": (dataclasses.replace(LLAMA, attention=GroupedQuery(4, 4, 8, qkv_bias=True, output_bias=True), **GPT2),
             "GPT2LMHeadModel"),
}


@pytest.fixture(autouse=True)
def packages(request):
    """Tests of a mark are skipped where what they need is not installed."""
    if request.node.get_closest_marker("torch"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")


def tokens(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, 48, (batch, length))


def made(config):
    """A model whose tokens attend to few others, and whose logits spread."""
    model = kvjax.build_model(config)
    params = jax.jit(model.init)(jax.random.key(0), tokens())["params"]
    scales = {"q_proj": 2.0, "k_proj": 2.0, "qk_norm_q": 4.0, "unembedding": 2.0}
    return model, jax.tree.map_with_path(lambda path, x: x * scales.get(path[-1].key, 1.0), params)


@pytest.fixture(scope="module")
def llama():
    return made(LLAMA)


def prefilled(model, params, dtype=None, length=LENGTH, counts=None):
    cache = init_cache(model.config, 2, LENGTH + 2 * STEPS, dtype)
    return decode(model, params, tokens(length=length), cache, counts)[1]


def compacted(model, params, slots=SLOTS, dtype=None, **options):
    context = references.of_context(model, params, tokens())
    return compact(model, params, prefilled(model, params, dtype), slots, context, **options)


def unequal_slots():
    slots = np.full((2, 2, 2), SLOTS)
    slots[1, 0, 1] = SLOTS - 5
    return slots


def refusal(config, cache):
    with pytest.raises(ConfigError) as error:
        to_huggingface_cache(config, cache)
    return str(error.value)


def test_biases_are_refused_and_folding_is_named(llama):
    assert "compact with fold=True" in refusal(LLAMA, compacted(*llama))


@pytest.mark.parametrize("method", ["am_highest", "recent"])
def test_heads_with_different_numbers_of_tokens_are_refused(llama, method):
    message = refusal(LLAMA, compacted(*llama, unequal_slots(), method=method, fold=method == "am_highest"))
    assert f"heads hold {SLOTS - 5} to {SLOTS} compacted tokens" in message


def test_rows_with_different_numbers_of_tokens_are_refused(llama):
    cache = prefilled(*llama, counts=jnp.array([LENGTH, LENGTH - 3]))
    assert f"rows hold [{LENGTH}, {LENGTH - 3}] tokens" in refusal(LLAMA, cache)
    cache = compacted(*llama, fold=True)
    shorter = cache.prefix.cache.replace(lengths=jnp.array([SLOTS, SLOTS - 1]))
    cache = cache.replace(prefix=Prefix(shorter, cache.prefix.entries))
    assert f"rows hold [{SLOTS}, {SLOTS - 1}] compacted tokens" in refusal(LLAMA, cache)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(attention=Latent(4, 16, 4, 8, 8)), "for GroupedQuery only"),
    (dict(sharing=SkipV1()), "no Hugging Face architecture shares components"),
    (dict(attention=GroupedQuery(4, 2, 8, output_bias=True)), "no Hugging Face architecture expresses this model"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_models_that_transformers_does_not_have_are_refused(changes, message):
    config = dataclasses.replace(LLAMA, **changes)
    assert message in refusal(config, init_cache(config, 1, 8))


def test_caches_that_are_wrong_are_refused(llama):
    cache = prefilled(*llama)
    assert "of another model" in refusal(dataclasses.replace(LLAMA, layers=3), cache)
    assert "some were dropped" in refusal(LLAMA, cache.replace(overflowed=jnp.array([False, True])))
    cache = compacted(*llama, fold=True)
    assert "all compacted" in refusal(LLAMA, cache.replace(prefix=Prefix(cache.prefix.cache, (0, None))))


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_missing_packages_are_named(llama, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install torch 'transformers>=5'" in refusal(LLAMA, prefilled(*llama))


def theirs(model, params, folder, kind, attention="eager"):
    """The exported model, as transformers reads it."""
    transformers = pytest.importorskip("transformers")
    to_huggingface(model.config, params, folder)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    assert type(found) is getattr(transformers, kind)
    return found.eval()


def their_step(model, past, new, positions):
    """Logits [B, T, V] of new tokens at `positions` [B, T]; None: where transformers thinks they are."""
    import torch
    positions = None if positions is None else torch.tensor(positions)
    with torch.no_grad():
        return model(torch.tensor(new), position_ids=positions, **{cache_argument(model): past}).logits.numpy()


def cache_argument(model):
    """Releases of transformers 5 before some have one name for it, and later ones another."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def continued(step, first, start):
    """Greedy continuation: tokens [B, STEPS], and the logits that they were taken from."""
    drawn, logits = [first], []
    for i in range(STEPS):
        logits.append(step(drawn[-1], start[:, None] + i)[:, -1])
        drawn.append(logits[-1].argmax(axis=-1)[:, None])
    return np.concatenate(drawn[1:], axis=1), np.stack(logits, axis=1)


def our_step(model, params, cache):
    """As `their_step`, which its cache is bound to."""
    def step(new, positions):
        nonlocal cache
        np.testing.assert_array_equal(positions[:, 0], cache.positions)
        logits, cache = decode(model, params, new, cache)
        return np.asarray(logits)
    return step


def agree(model, params, cache, other):
    """Tokens [B, STEPS] that both draw, from the same logits, which differ from step to step."""
    first, start = tokens(length=1, seed=1), np.asarray(cache.positions)
    wanted, logits = continued(our_step(model, params, cache), first, start)
    past = to_huggingface_cache(model.config, cache)
    found, other_logits = continued(lambda new, positions: their_step(other, past, new, positions), first, start)
    assert logits.std(axis=1).mean() > 0.1
    np.testing.assert_allclose(other_logits, logits, atol=1e-3)
    np.testing.assert_array_equal(found, wanted)
    return found


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_continues_a_cache_of_every_token(name, tmp_path):
    config, kind = CONFIGS[name]
    model, params = made(config)
    cache = prefilled(model, params)
    other = theirs(model, params, tmp_path / "model", kind)
    agree(model, params, cache, other)
    assert to_huggingface_cache(config, cache).get_seq_length() == LENGTH


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, (config, _) in CONFIGS.items() if config.window is None])
def test_transformers_continues_a_folded_cache(name, tmp_path):
    config, kind = CONFIGS[name]
    model, params = made(config)
    cache = compacted(model, params, fold=True)
    other = theirs(model, params, tmp_path / "model", kind)
    agree(model, params, cache, other)
    past = to_huggingface_cache(config, cache)
    assert past.get_seq_length() == SLOTS and len(past.layers) == config.layers
    assert past.layers[1].keys.shape == (2, config.attention.kv_heads, SLOTS, config.attention.head_dim)


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def their_llama(llama, request, tmp_path_factory):
    return theirs(*llama, tmp_path_factory.mktemp("model"), "LlamaForCausalLM", request.param)


@pytest.mark.torch
def test_tokens_behind_a_prefix_and_those_kept_follow_it(llama, their_llama):
    cache = decode(*llama, tokens(length=5, seed=2), compacted(*llama, fold=True, keep=4))[1]
    assert to_huggingface_cache(LLAMA, cache).get_seq_length() == SLOTS + 4 + 5
    found, first = agree(*llama, cache, their_llama), tokens(length=1, seed=1)
    drawn = generate(*llama, first, max_new_tokens=STEPS, temperature=0.0, cache=cache)
    np.testing.assert_array_equal(found, drawn)


@pytest.mark.torch
def test_masks_are_causal_for_many_tokens_at_once(llama, their_llama):
    cache, new = compacted(*llama, fold=True), tokens(length=5, seed=3)
    wanted = np.asarray(decode(*llama, new, cache)[0])
    positions = np.asarray(cache.positions)[:, None] + np.arange(5)
    past = to_huggingface_cache(LLAMA, cache)
    np.testing.assert_allclose(their_step(their_llama, past, new, positions), wanted, atol=1e-3)
    new[:, 2:] += 1
    found = their_step(their_llama, to_huggingface_cache(LLAMA, cache), new % 48, positions)
    np.testing.assert_allclose(found[:, :2], wanted[:, :2], atol=1e-3)
    assert np.abs(found[:, 2:] - wanted[:, 2:]).max() > 0.3


@pytest.mark.torch
def test_without_positions_transformers_goes_on_where_the_cache_ends(llama, their_llama):
    """Why the loop passes positions."""
    cache, new = compacted(*llama, fold=True), tokens(length=1, seed=1)
    wanted = np.asarray(decode(*llama, new, cache)[0])
    assert np.abs(their_step(their_llama, to_huggingface_cache(LLAMA, cache), new, None) - wanted).max() > 0.05


def without_biases(cache):
    held = cache.prefix.cache
    components = {name: x for name, x in held.components.items() if name != "bias"}
    table = tuple(c for c in held.table if c.name != "bias")
    return cache.replace(prefix=Prefix(held.replace(components=components, table=table), cache.prefix.entries))


@pytest.mark.torch
def test_a_biased_cache_cannot_do_without_its_biases(llama, their_llama):
    """Without, transformers draws what kvjax draws without them, which is not what it draws with them."""
    cache, new = compacted(*llama), tokens(length=1, seed=1)
    biased, dropped = (np.asarray(decode(*llama, new, x)[0]) for x in (cache, without_biases(cache)))
    positions = np.asarray(cache.positions)[:, None]
    found = their_step(their_llama, to_huggingface_cache(LLAMA, without_biases(cache)), new, positions)
    np.testing.assert_allclose(found, dropped, atol=1e-3)
    assert np.abs(found - biased).max() > 0.1


@pytest.mark.torch
def test_rows_may_be_at_different_positions(llama, their_llama):
    """What was compacted of rows of different lengths has equally many tokens."""
    counts = jnp.array([LENGTH, LENGTH - 7])
    context = references.of_context(*llama, tokens(), counts)
    cache = compact(*llama, prefilled(*llama, counts=counts), SLOTS, context, fold=True)
    assert cache.positions.tolist() == counts.tolist()
    agree(*llama, cache, their_llama)


@pytest.mark.torch
@pytest.mark.parametrize("length", [4, 10, 11])
def test_windows_are_filled_and_slide_on(length, tmp_path):
    model, params = made(CONFIGS["mistral_window"][0])
    cache = prefilled(model, params, length=length)
    past = to_huggingface_cache(model.config, cache)
    assert past.layers[0].keys.shape[2] == min(length, 9) and past.get_seq_length() == length
    agree(model, params, cache, theirs(model, params, tmp_path / "model", "MistralForCausalLM"))


@pytest.mark.torch
def test_an_empty_cache_is_an_empty_cache(llama, their_llama):
    past, new = to_huggingface_cache(LLAMA, init_cache(LLAMA, 2, 8)), tokens(length=6)
    assert past.get_seq_length() == 0
    wanted = np.asarray(llama[0].apply({"params": llama[1]}, new))
    np.testing.assert_allclose(their_step(their_llama, past, new, None), wanted, atol=1e-3)


@pytest.mark.torch
@pytest.mark.parametrize("compacting", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_types_are_kept_and_quantised_caches_read(llama, dtype, compacting):
    import torch
    cache = compacted(*llama, dtype=dtype, fold=True, keep=3) if compacting else prefilled(*llama, dtype=dtype)
    past = to_huggingface_cache(LLAMA, cache)
    kept = getattr(torch, dtype) if "float8" not in dtype and dtype != "int8" else torch.float32
    assert {x.dtype for layer in past.layers for x in (layer.keys, layer.values)} == {kept}
    exact = compacted(*llama, fold=True, keep=3) if compacting else prefilled(*llama)
    exact = to_huggingface_cache(LLAMA, exact).layers[1].values[:, :, -3:]
    found = past.layers[1].values[:, :, -3:].float()
    error = {"float32": 0, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2, "float8_e4m3fn": 8e-2}[dtype]
    np.testing.assert_allclose(found, exact, atol=error * float(exact.abs().max()))
    assert not np.array_equal(found, exact) or dtype == "float32"
