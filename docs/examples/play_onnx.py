"""Play what `cleanba export` wrote, in its Gymnasium environment, with neither Cleanba nor JAX:

python play_onnx.py agent.onnx 10
"""

import importlib
import json
import os
import sys

import gymnasium
import numpy as np
import onnxruntime
from gymnasium.envs.registration import EnvSpec


def parts(obs, name="obs"):
    """The inputs of the network for an observation: a dictionary or a tuple has one for each of its parts."""
    if not isinstance(obs, dict | tuple):
        return {name: obs}
    below = obs if isinstance(obs, dict) else {f"{i:02}": part for i, part in enumerate(obs)}
    return {path: x for key, part in below.items() for path, x in parts(part, f"{name}.{key}").items()}


path, episodes = sys.argv[1], int(sys.argv[2])
session = onnxruntime.InferenceSession(path)
about = json.loads(session.get_modelmeta().custom_metadata_map["cleanba"])
if about["env_wrappers"] or episodes > len(about["eval_seeds"]):
    sys.exit("this script plays at most 30 episodes, in an environment without wrappers")
inputs, outputs = session.get_inputs(), [output.name for output in session.get_outputs()]
sys.path.append(os.getcwd())  # an environment of yours may lie here
module, _, name = about["env_id"].removeprefix("gymnasium:").rpartition(":")
own = getattr(importlib.import_module(module), name, None) if module else None  # a class that is not registered
made = EnvSpec("own-v0", entry_point=own) if own else about["env_id"].removeprefix("gymnasium:")
env = gymnasium.make(made, **about["env_options"])
for seed in about["eval_seeds"][:episodes]:
    obs, first, total, over = env.reset(seed=seed)[0], True, 0.0, False
    carry = {i.name: np.zeros((1, *i.shape[1:]), np.float32) for i in inputs if i.name.startswith("carry.")}
    while not over:
        seen = {name: np.asarray(x, about["observation_dtypes"][name])[None] for name, x in parts(obs).items()}
        memory = {**carry, "first": np.array([first])} if carry else {}
        out = dict(zip(outputs, session.run(None, {**seen, **memory}), strict=True))
        carry = {name: out[name.replace("carry.", "carry_out.")] for name in carry}
        obs, reward, terminated, truncated, _ = env.step(out["action"][0])
        first, total, over = False, total + float(reward), terminated or truncated
    print(total)
