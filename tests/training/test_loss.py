import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.training.loss import cross_entropy, loss_sums


def test_cross_entropy_and_its_gradient_equal_autodiff():
    logits = 5 * jax.random.normal(jax.random.key(0), (3, 4, 11))
    targets = jax.random.randint(jax.random.key(1), (3, 4), 0, 11)
    weights = jax.random.normal(jax.random.key(2), (2, 3, 4))

    def ours(logits):
        nll, log_partition = cross_entropy(logits, targets)
        return jnp.sum(weights[0] * nll + weights[1] * log_partition**2)

    def plain(logits):
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(weights[0] * nll + weights[1] * jax.nn.logsumexp(logits, axis=-1) ** 2)

    chex.assert_trees_all_close(jax.value_and_grad(ours)(logits), jax.value_and_grad(plain)(logits), rtol=1e-5)


def test_cross_entropy_of_huge_logits_is_finite():
    nll, _ = cross_entropy(jnp.array([[1e30, -1e30]], jnp.float32), jnp.array([0]))
    np.testing.assert_array_equal(nll, [0])


def test_masked_tokens_do_not_count():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    batch = {"targets": jnp.zeros((2, 3), jnp.int32), "loss_mask": jnp.array([[1, 1, 0], [0, 0, 0]], jnp.float32)}
    sums = loss_sums(logits, batch)
    kept = loss_sums(logits[:1, :2], {"targets": batch["targets"][:1, :2]})
    chex.assert_trees_all_close(sums, kept, rtol=1e-6)
    assert sums["tokens"] == 2


def test_no_second_array_of_the_size_of_the_logits_is_kept_for_the_backward_pass():
    logits, targets = jnp.zeros((2, 3, 50)), jnp.zeros((2, 3), jnp.int32)
    _, backward = jax.vjp(lambda x: cross_entropy(x, targets)[0], logits)
    kept = [x for x in jax.tree.leaves(backward) if x.size >= logits.size]
    assert len(kept) == 1
