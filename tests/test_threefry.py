"""Random numbers on CPUs: the hash against its definition and its authors' known answers; JAX's numbers unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from cleanba.kernels import install_random_numbers, threefry
from cleanba.kernels.llvm import registers

# Of 20 rounds, from the file of known answers of Random123, the authors' own code: counter, key, result.
KNOWN = [
    ("00000000 00000000", "00000000 00000000", "6b200159 99ba4efe"),
    ("ffffffff ffffffff", "ffffffff ffffffff", "1cb996fc bb002be7"),
    ("243f6a88 85a308d3", "13198a2e 03707344", "c4923a9c 483df7a0"),
]


def slowly(k1, k2, a, b):
    """One pair of words at a time, with Python's integers (Salmon et al. 2011, section 3.3)."""
    keys, mask = (k1, k2, k1 ^ k2 ^ 0x1BD11BDA), 2**32 - 1
    a, b = a + keys[0] & mask, b + keys[1] & mask
    for number in range(20):
        left = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        a = a + b & mask
        b = a ^ (b << left & mask | b >> 32 - left)
        if number % 4 == 3:
            done = number // 4 + 1
            a, b = a + keys[done % 3] & mask, b + keys[(done + 1) % 3] + done & mask
    return a, b


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
@pytest.mark.parametrize("times", [1, threefry.FEW + 1], ids=["one by one", "by the loop"])
def test_known_answers(counter, key, result, times):
    assert list(slowly(*words(key), *words(counter))) == words(result)
    given = [jnp.full(times, word, jnp.uint32) for word in (*words(key), *words(counter))]
    for found, word in zip(jax.jit(threefry.threefry)(*given), words(result), strict=True):
        assert (np.asarray(found) == word).all()


@pytest.mark.parametrize("size", [1, 2, threefry.FEW, threefry.FEW + 1, 31, 32, 33, 4 * registers()[0], 1003])
def test_every_size_is_what_the_definition_says(size):
    k1, k2, a, b = np.random.default_rng(size).integers(0, 2**32, (4, size), np.uint32)
    found = jax.jit(threefry.threefry)(k1, k2, a, b)
    expected = [slowly(*map(int, each)) for each in zip(k1, k2, a, b, strict=True)]
    np.testing.assert_array_equal(np.stack(found, 1), np.array(expected, np.uint32))


def test_shapes_broadcast_as_keys_of_many_and_counters_of_all_do():
    rng = np.random.default_rng(0)
    k1, k2 = rng.integers(0, 2**32, (2, 5, 1), np.uint32)
    a, b = rng.integers(0, 2**32, (2, 7), np.uint32)
    found = jax.jit(threefry.threefry)(k1, k2, a, b)
    for i in range(5):
        for j in range(7):
            expected = slowly(int(k1[i, 0]), int(k2[i, 0]), int(a[j]), int(b[j]))
            assert (int(found[0][i, j]), int(found[1][i, j])) == expected


def test_jax_draws_the_same_numbers_by_it():
    """Folded, split, drawn for many keys at once: each as JAX defines it from the hash of key and counter."""
    install_random_numbers()

    def draw(key):
        keys = jax.random.split(jax.random.fold_in(key, 9), 3)
        return jax.random.key_data(keys), jax.vmap(lambda key: jax.random.bits(key, (6, 7)))(keys)

    lowered = jax.jit(draw).lower(jax.random.key(5))
    assert "cleanba__threefry" in lowered.as_text()  # else nothing of this is tested
    keys, bits = lowered.compile()(jax.random.key(5))
    folded = slowly(0, 5, 0, 9)
    for i in range(3):
        key = slowly(*folded, 0, i)
        assert tuple(map(int, keys[i])) == key
        expected = [np.bitwise_xor(*slowly(*key, 0, n)) for n in range(42)]
        np.testing.assert_array_equal(bits[i].ravel(), np.array(expected, np.uint32))
