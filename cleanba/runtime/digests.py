"""Digests that runs are compared by: SHA-256 over the bytes of arrays."""

import hashlib
import json
from collections.abc import Iterable

import jax
import numpy as np

from cleanba.files import Json
from cleanba.rollout import PyTree


def params_digest(params: PyTree) -> str:
    """SHA-256 over the bytes of all parameter arrays, in the order of their paths."""
    by_path = sorted(_named(params), key=lambda named: named[0])
    return _sha256(leaf.tobytes() for _, leaf in by_path)


def tree_digest(tree: PyTree) -> str:
    """SHA-256 over the names, types, shapes and bytes of all arrays of a tree, in its own order."""
    words = lambda name, leaf: f"{name} {leaf.dtype} {leaf.shape}".encode()
    return _sha256(part for name, leaf in _named(tree) for part in (words(name, leaf), leaf.tobytes()))


def json_digest(values: Json) -> str:
    """SHA-256 over a JSON object, whatever the order of its names."""
    return _sha256([json.dumps(json.loads(json.dumps(values)), sort_keys=True).encode()])


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _named(tree: PyTree) -> list[tuple[str, np.ndarray]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]
