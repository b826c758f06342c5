"""What two runs are compared by: SHA-256 over the bytes of arrays."""

import hashlib

import jax
import numpy as np

from cleanba.rollout import PyTree


def params_digest(params: PyTree) -> str:
    """SHA-256 over the bytes of all parameter arrays, in the order of their paths."""
    digest = hashlib.sha256()
    for _, leaf in sorted(_named(params), key=lambda named: named[0]):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return f"sha256:{digest.hexdigest()}"


def tree_digest(tree: PyTree) -> str:
    """SHA-256 over the names, types, shapes and bytes of all arrays of a tree, in its own order."""
    digest = hashlib.sha256()
    for name, leaf in _named(tree):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return f"sha256:{digest.hexdigest()}"


def _named(tree: PyTree) -> list[tuple[str, np.ndarray]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]
