"""Devices by role: which act and which learn.  Nothing else in the project asks JAX for devices."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cleanba.config import Placement, require
from cleanba.errors import UsageError, said
from cleanba.runtime.processes import gather_over_processes

MESH_AXIS = "learner"
MOST_LEARNERS = 64  # learner devices of one process


class Devices(NamedTuple):
    """This process's devices, and the mesh of all processes' learner devices."""

    actors: tuple[jax.Device, ...]
    learners: tuple[jax.Device, ...]
    mesh: Mesh
    process: int
    num_processes: int

    @property
    def platform(self) -> str:
        """JAX's name for the platform of the learner devices: "cpu", "gpu" …"""
        return self.learners[0].platform

    @property
    def hardware(self) -> str:
        """The model of the learner devices, such as "NVIDIA H100"."""
        return self.learners[0].device_kind

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes logs and results."""
        return self.process == 0


def local_devices() -> list[jax.Device]:
    """This process's devices on the platform that JAX_PLATFORMS names, or that JAX prefers.

    Raises:
        UsageError: JAX finds none.
    """
    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the second where a plugin is installed for no such hardware
        asked = os.environ.get("JAX_PLATFORMS", "")
        if not asked:
            raise
        reason = f" ({said(error)})" if str(error) else ""
        raise UsageError(
            f"JAX_PLATFORMS={asked}: JAX finds no such device here{reason}; set JAX_PLATFORMS=cpu, or for a GPU "
            "see that `nvidia-smi` lists it and install Cleanba with its extra cuda12 or cuda13"
        ) from None


def default_platform() -> str:
    """JAX's name for the platform of this process's devices.  Raises `UsageError` if there are none."""
    return local_devices()[0].platform


def pick_devices(ids: Sequence[int], name: str) -> tuple[jax.Device, ...]:
    """This process's devices by local index; `name` is the flag that named them.

    Raises:
        UsageError: one does not exist or is named twice, or none is named.
    """
    local = local_devices()
    there = ", ".join(f"{i} ({d.device_kind})" for i, d in enumerate(local))
    hint = "; JAX_NUM_CPU_DEVICES=8 in the environment makes eight CPU devices" if local[0].platform == "cpu" else ""
    require(len(ids) > 0, f"{name} names no device; this process has {there}")
    for i in ids:
        require(0 <= i < len(local), f"{name}: there is no device {i}; this process has {there}{hint}")
    require(len(set(ids)) == len(ids), f"{name}={' '.join(map(str, ids))} names a device twice; name each once")
    return tuple(local[i] for i in ids)


def find_devices(p: Placement) -> Devices:
    """The devices that the placement names.

    Raises:
        UsageError: a device does not exist or is named twice, or the processes name different numbers of learners.
    """
    actors = pick_devices(p.actor_device_ids, "--actor-device-ids")
    learners = pick_devices(p.learner_device_ids, "--learner-device-ids")
    if jax.process_count() == 1:
        return Devices(actors, learners, Mesh(np.array(learners), (MESH_AXIS,)), 0, 1)

    require(
        len(learners) <= MOST_LEARNERS,
        f"learner_device_ids names {len(learners)} devices, but a run of several processes can use {MOST_LEARNERS} in "
        "each; start more processes",
    )
    row = np.full(MOST_LEARNERS, -1, np.int32)  # ids travel as a row of fixed size, padded by -1
    row[: len(learners)] = [d.id for d in learners]
    rows = gather_over_processes(row)
    counts = (rows >= 0).sum(1)
    require(
        bool((counts == counts[0]).all()),
        f"the processes name {', '.join(map(str, counts))} learner devices, but all must name the same number",
    )
    by_id = {d.id: d for d in jax.devices()}
    everyone = [by_id[i] for i in rows[rows >= 0].tolist()]  # process by process: shards lie in this order
    return Devices(actors, learners, Mesh(np.array(everyone), (MESH_AXIS,)), jax.process_index(), jax.process_count())
