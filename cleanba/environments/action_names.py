"""Names of the actions of well-known environments, for films.  The environments themselves do not provide them."""

import re

from cleanba.specs import EnvSpec

# The 18 actions of the Atari console in the order of the full action space.
ATARI_ACTIONS = (
    *("noop", "fire", "up", "right", "left", "down", "up right", "up left", "down right", "down left"),
    *("up fire", "right fire", "left fire", "down fire"),
    *("up right fire", "up left fire", "down right fire", "down left fire"),
)

# By the id without suite and version.  A name may occur twice; the number of actions then selects one.
NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Acrobot", ("torque -1", "no torque", "torque +1")),
    ("CartPole", ("left", "right")),
    ("MountainCar", ("left", "nothing", "right")),
    ("MountainCarContinuous", ("push",)),
    ("Pendulum", ("torque",)),
    ("Catch", ("left", "stay", "right")),
    ("Blackjack", ("stick", "hit")),
    ("CliffWalking", ("up", "right", "down", "left")),
    ("FrozenLake", ("left", "down", "right", "up")),
    ("Taxi", ("down", "up", "right", "left", "pick up", "drop off")),
    ("LunarLander", ("nothing", "left engine", "main engine", "right engine")),
    ("LunarLanderContinuous", ("main engine", "side engines")),
    ("BipedalWalker", ("hip 1", "knee 1", "hip 2", "knee 2")),
    ("BipedalWalkerHardcore", ("hip 1", "knee 1", "hip 2", "knee 2")),
    ("CarRacing", ("steering", "gas", "brake")),
    ("CarRacing", ("nothing", "right", "left", "gas", "brake")),
    ("MiniGrid", ("turn left", "turn right", "forward", "pick up", "drop", "toggle", "done")),
    ("Ant", ("hip back right", "ankle back right", "hip front left", "ankle front left", "hip front right",
             "ankle front right", "hip back left", "ankle back left")),
    ("HalfCheetah", ("back thigh", "back shin", "back foot", "front thigh", "front shin", "front foot")),
    ("Hopper", ("thigh", "leg", "foot")),
    ("Humanoid", ("abdomen y", "abdomen z", "abdomen x", "right hip x", "right hip z", "right hip y", "right knee",
                  "left hip x", "left hip z", "left hip y", "left knee", "right shoulder 1", "right shoulder 2",
                  "right elbow", "left shoulder 1", "left shoulder 2", "left elbow")),
    ("InvertedDoublePendulum", ("push",)),
    ("InvertedPendulum", ("push",)),
    ("Pusher", ("shoulder pan", "shoulder lift", "arm roll", "elbow", "forearm roll", "wrist flex", "wrist roll")),
    ("Reacher", ("joint 1", "joint 2")),
    ("Swimmer", ("joint 1", "joint 2")),
    ("Walker2d", ("thigh", "leg", "foot", "left thigh", "left leg", "left foot")),
    # Atari's minimal action sets, for the best-known games.
    ("BeamRider", ("noop", "fire", "up", "right", "left", "up right", "up left", "right fire", "left fire")),
    ("Breakout", ("noop", "fire", "right", "left")),
    ("Enduro", ("noop", "fire", "right", "left", "down", "down right", "down left", "right fire", "left fire")),
    ("Freeway", ("noop", "up", "down")),
    ("MsPacman", ("noop", "up", "right", "left", "down", "up right", "up left", "down right", "down left")),
    ("Pong", ("noop", "fire", "right", "left", "right fire", "left fire")),
    ("Qbert", ("noop", "fire", "up", "right", "left", "down")),
    ("SpaceInvaders", ("noop", "fire", "right", "left", "right fire", "left fire")),
)  # fmt: skip


def action_names(spec: EnvSpec) -> tuple[str, ...]:
    """A name for each discrete action, for each option of each part, or for each real number of an action.

    Actions without known names are called "action 0", "action[1] = 2" or "action[1]".
    """
    action = spec.action
    if action.kind == "choices":
        parts = zip(action.low, action.counts, strict=True)
        return tuple(f"action[{d}] = {int(low) + i}" for d, (low, count) in enumerate(parts) for i in range(count))
    count = action.counts[0] if action.kind == "choice" else action.size
    if spec.is_atari and count == len(ATARI_ACTIONS):
        return ATARI_ACTIONS
    base = re.sub(r"-v\d+$", "", re.split("[:/]", spec.env_id)[-1])
    base = "MiniGrid" if base.startswith("MiniGrid-") else base
    for name, names in NAMES:
        if name == base and len(names) == count:
            return names
    if action.kind == "choice":
        return tuple(f"action {int(action.low[0]) + i}" for i in range(count))
    return tuple(f"action[{i}]" for i in range(count))
