"""Generation against the full forward pass, and what may and may not depend on the batch, its shapes and the mesh."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ModelConfig, build_model
from kvjax.attention.kronecker import Kronecker
from kvjax.config import ConfigError, MeshConfig
from kvjax.generate import generate, generate_stream
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import make_mesh

VOCAB = 38
generation = importlib.import_module("kvjax.generate")  # the package may carry the function under the module's name


@pytest.fixture(scope="module")
def model():
    return build_model(ModelConfig(Kronecker(h1=2, h2=2, d1=2, d2=4, q_rank=2), vocab_size=VOCAB, layers=2, width=32,
                                   feed_forward_width=48, context_length=64, tie_embeddings=False, dtype="float32",
                                   output_init=2.0))


@pytest.fixture(scope="module")
def params(model):
    """Random weights, scaled so that tokens attend to few others and logits spread: the text depends on its context."""
    scales = {"q_a": 4, "q_b": 4, "k_b": 4, "unembedding": 4}
    params = jax.jit(model.init)(jax.random.key(2), jnp.zeros((1, 8), jnp.int32))["params"]
    return jax.tree.map_with_path(lambda path, x: x * scales.get(path[-1].key, 1), params)


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


PROMPTS = prompts_of(5, 17, 1, 30, 600)
STEPS = 20


@pytest.fixture(scope="module")
def greedy(model, params):
    """What argmax of the full forward pass gives for PROMPTS, one token at a time."""
    @jax.jit
    def next_token(tokens, length):
        return jnp.argmax(model.apply({"params": params}, tokens[None])[0, length - 1])

    def continued(prompt):
        tokens, n = np.zeros(640, np.int32), len(prompt)
        tokens[:n] = prompt
        for i in range(n, n + STEPS):
            tokens[i] = next_token(tokens, i)
        return tokens[n : n + STEPS].tolist()
    return [continued(prompt) for prompt in PROMPTS]


def test_ragged_and_long_prompts_continue_as_the_full_forward_pass_says(model, params, greedy):
    assert generate(model, params, PROMPTS, max_new_tokens=STEPS, temperature=0.0) == greedy
    assert min(len(set(row)) for row in greedy) > 4, "the rows repeat themselves: the test could not see a lost context"


def test_rows_stop_at_the_end_token_on_their_own(model, params, greedy):
    def stopped(eos):
        return [row[: row.index(eos) + 1] if eos in row else row for row in greedy]
    # Which tokens come depends on the processor's rounding; some token ends the rows at different steps.
    eos = max(range(VOCAB), key=lambda token: len(set(map(len, stopped(token)))))
    expected = stopped(eos)
    assert len(set(map(len, expected))) > 2
    assert generate(model, params, PROMPTS, max_new_tokens=STEPS, temperature=0.0, eos_id=eos) == expected


def test_generation_ends_when_all_rows_are_done(model, params):
    (eos,), _ = generate(model, params, [[1], [1]], max_new_tokens=1, temperature=0.0)
    chunks = list(generate_stream(model, params, [[1], [1]], max_new_tokens=400, temperature=0.0, eos_id=eos, stride=2))
    assert chunks == [[[eos], [eos]]]


def test_stream_yields_what_generate_returns(model, params):
    settings = dict(max_new_tokens=10, temperature=1.3, top_p=0.9, seed=3)
    chunks = list(generate_stream(model, params, PROMPTS[:2], stride=4, **settings))
    assert [[len(row) for row in chunk] for chunk in chunks] == [[4, 4], [4, 4], [2, 2]]
    joined = [sum(rows, []) for rows in zip(*chunks, strict=True)]
    assert joined == generate(model, params, PROMPTS[:2], **settings)


@pytest.fixture(scope="module")
def drawn(model, params):
    """Continuations of PROMPTS with seed 1."""
    return generate(model, params, PROMPTS, max_new_tokens=STEPS, seed=1)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(model, params, drawn):
    settings = dict(max_new_tokens=STEPS, seed=1)
    assert generate(model, params, PROMPTS[:2], **settings) == drawn[:2]
    assert generate(model, params, [PROMPTS[0], *prompts_of(30, seed=9)], **settings)[0] == drawn[0]


def test_equal_prompts_and_other_seeds_draw_differently(model, params):
    first, second = generate(model, params, [[1, 2, 3]] * 2, max_new_tokens=12)
    assert first != second
    assert [first, second] != generate(model, params, [[1, 2, 3]] * 2, max_new_tokens=12, seed=1)
    assert [first, second] == generate(model, params, np.array([[1, 2, 3]] * 2), max_new_tokens=12, seed=0)


def test_first_tokens_follow_the_model(model, params):
    """The first token over 200 seeds and two rows against the softmax of the full pass."""
    prompts = [PROMPTS[0]] * 2
    tokens = np.concatenate([generate(model, params, prompts, max_new_tokens=1, temperature=3.0, seed=seed)
                             for seed in range(200)]).ravel()
    expected = 400 * np.asarray(jax.nn.softmax(model.apply({"params": params}, jnp.array(prompts))[0, -1] / 3.0))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert ((counts - expected) ** 2 / expected).sum() < 90  # 37 degrees of freedom, about one seed in a million


def test_new_lengths_and_settings_compile_nothing(model, params, monkeypatch):
    traced, decode = [], generation.decode

    def counting(model, params, tokens, *args, **settings):
        traced.append(tokens.shape)
        return decode(model, params, tokens, *args, **settings)

    monkeypatch.setattr(generation, "decode", counting)
    generate(model, params, prompts_of(4, 9, 2), max_new_tokens=3)
    assert traced == [(3, 32), (3, 1)]
    for lengths in [(5, 7, 1), (1, 2, 1), (33, 1, 4), (20, 30, 2)]:
        generate(model, params, prompts_of(*lengths), max_new_tokens=lengths[0], temperature=0, top_k=3, top_p=0.9,
                 min_p=0.1, seed=5, eos_id=7)
        list(generate_stream(model, params, prompts_of(*lengths), max_new_tokens=7, stride=3))
    generate(build_model(model.config), params, prompts_of(4, 9, 2), max_new_tokens=3)
    assert len(traced) == 2, f"compiled again for {traced[2:]}"


@pytest.mark.parametrize("rows, per_device", [(4, 1), (3, 3)])
def test_a_mesh_changes_nothing(model, params, drawn, rows, per_device):
    """Four rows are split four ways; three do not divide, and are computed whole on every device."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, parameter_shardings(model.config, mesh))
    with jax.set_mesh(mesh):
        assert generate(model, placed, PROMPTS[:rows], max_new_tokens=STEPS, seed=1) == drawn[:rows]
        cache = generation._start(model, placed, [np.array(prompt) for prompt in PROMPTS[:rows]], STEPS).cache
    factors = cache.components["k_a"]
    assert factors.sharding.shard_shape(factors.shape)[1] == per_device


def test_capacities_are_few_and_never_too_small():
    capacities = {n: generation._capacity(n) for n in range(1, 40_000)}
    assert all(n <= c < n + max(512, n / 4 + 1) for n, c in capacities.items())
    assert len(set(capacities.values())) < 30


def test_the_cache_is_updated_in_place(model, params):
    state = generation._start(model, params, [np.array([1, 2, 3])] * 2, 4)
    greedy = np.float32(0), np.int32(0), np.float32(1), np.float32(0)
    settings = generation.Settings(jax.random.key(0), *greedy, np.int32(-1))
    generation._advance(model, params, state, settings, np.int32(1))
    assert all(x.is_deleted() for x in state.cache.components.values())


@pytest.mark.parametrize("prompts, words", [
    ([], "no prompts"), ([[1], []], "prompt 1 is empty"), ([1, 2], "list of lists"), ([[1.5]], "integers"),
    ([[0, VOCAB, 99]], r"prompt 0 holds token ids \[38, 99\]: the vocabulary has ids 0 to 37"), ([[-1]], r"ids \[-1\]"),
])
def test_bad_prompts_are_named(model, params, prompts, words):
    with pytest.raises(ConfigError, match=words):
        generate_stream(model, params, prompts, max_new_tokens=1)


@pytest.mark.parametrize("name, value", [("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("stride", 33)])
def test_bad_settings_are_named(model, params, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        generate_stream(model, params, [[1]], **dict(max_new_tokens=1) | {name: value})
