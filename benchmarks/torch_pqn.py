"""PQN as a plain PyTorch loop with CleanRL's settings for Atari: act, step, store, then learn, in turns.

One Python thread does everything, one minibatch after another, as in single-file implementations; PyTorch's threads do
the arithmetic, and EnvPool's threads step the environments.  `benchmarks/peers.py` compares its speed with ours.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch_ppo import layer

from cleanba.environments.envpool import Envs, env_spec
from cleanba.recipes import RECIPES


@dataclass(frozen=True)
class Settings:
    """What is trained."""

    env_id: str = "Breakout-v5"
    num_envs: int = 8
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2.5e-4
    max_norm: float = 10.0
    epsilon: float = 0.01
    gamma: float = 0.99
    lam: float = 0.65
    lstm: int = 0
    """units of the LSTM, which sees one frame at a time; 0: none, and four frames"""


BREAKOUT = Settings()
BREAKOUT_LSTM = Settings(max_norm=0.5, lstm=128)

State = tuple[torch.Tensor, torch.Tensor] | tuple[()]


class Network(nn.Module):
    """The Nature CNN with layer normalisation over each layer's whole output, an optional LSTM, and action values."""

    def __init__(self, frames: int, actions: int, lstm: int):
        super().__init__()
        block = lambda made, shape: [layer(made), nn.LayerNorm(shape), nn.ReLU()]
        self.torso = nn.Sequential(
            *block(nn.Conv2d(frames, 32, 8, 4), [32, 20, 20]), *block(nn.Conv2d(32, 64, 4, 2), [64, 9, 9]),
            *block(nn.Conv2d(64, 64, 3), [64, 7, 7]), nn.Flatten(), *block(nn.Linear(3136, 512), 512),
        )  # fmt: skip
        self.core = nn.LSTM(512, lstm) if lstm else None
        for name, weights in self.core.named_parameters() if self.core else ():
            nn.init.zeros_(weights) if "bias" in name else nn.init.orthogonal_(weights)
        self.head = layer(nn.Linear(lstm or 512, actions))

    def forward(self, x: torch.Tensor, done: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Images [T, B, ...], done [T, B] before each of them -> values [T, B, A], and the state after them."""
        hidden = self.torso(x.flatten(0, 1) / 255.0).unflatten(0, x.shape[:2])
        if self.core is not None:
            steps = []
            for features, over in zip(hidden, done, strict=True):
                h, c = (part * (1 - over)[None, :, None] for part in state)
                out, state = self.core(features[None], (h, c))
                steps.append(out)
            hidden = torch.cat(steps)
        return self.head(hidden), state


class TorchPQN:
    """A training that can be continued, some updates at a time."""

    def __init__(self, s: Settings, seed: int = 1):
        torch.manual_seed(seed)
        games = dict(full_action_space=False, repeat_action_probability=0.0, episodic_life=True, reward_clip=True)
        options = ("stack_num=1",) if s.lstm else ()
        spec = env_spec(RECIPES["pqn"].experiment(env_id=s.env_id, env_options=options, **games))
        self.s = s
        self.envs = Envs(spec._replace(clip_reward=True), [seed + i for i in range(s.num_envs)])
        self.network = Network(spec.obs.shape[0], spec.num_actions, s.lstm)
        self.optimiser = torch.optim.RAdam(self.network.parameters(), lr=s.learning_rate)
        self.obs, self.done = torch.from_numpy(self.envs.reset()), torch.zeros(s.num_envs)
        self.state: State = (torch.zeros(1, s.num_envs, s.lstm),) * 2 if s.lstm else ()

    def values(self) -> tuple[torch.Tensor, State]:
        """Action values [B, A] of the current observations."""
        with torch.no_grad():
            values, state = self.network(self.obs[None], self.done[None], self.state)
        return values[0], state

    def rollout(self) -> dict[str, Any]:
        """Collect one rollout, step by step."""
        kept: dict[str, list[torch.Tensor]] = {k: [] for k in ("obs", "done", "action", "value", "reward")}
        start = self.state
        for _ in range(self.s.num_steps):
            values, self.state = self.values()
            value, best = values.max(-1)
            random = torch.randint(values.shape[1], best.shape)
            action = torch.where(torch.rand(best.shape) < self.s.epsilon, random, best)
            step = self.envs.step(action.int().numpy())
            reward = torch.from_numpy(step.reward).float()
            for name, x in dict(obs=self.obs, done=self.done, action=action, value=value, reward=reward).items():
                kept[name].append(x)
            self.obs, self.done = torch.from_numpy(step.obs), torch.from_numpy(step.terminated | step.truncated).float()
        return {name: torch.stack(x) for name, x in kept.items()} | {"state": start}

    def targets(self, r: dict[str, Any]) -> torch.Tensor:
        """Lambda-returns, backwards."""
        following, done = self.values()[0].max(-1).values, self.done
        target, after = torch.zeros_like(r["reward"]), following
        for t in reversed(range(self.s.num_steps)):
            mixed = self.s.lam * after + (1 - self.s.lam) * following
            target[t] = after = r["reward"][t] + self.s.gamma * (1 - done) * mixed
            following, done = r["value"][t], r["done"][t]
        return target

    def learn(self, r: dict[str, Any]) -> None:
        """All epochs over one rollout: transitions, or all steps of some environments."""
        s, target = self.s, self.targets(r)
        for _ in range(s.epochs):
            for index in torch.randperm(s.num_envs if s.lstm else s.num_envs * s.num_steps).chunk(s.minibatches):
                part = lambda x: x[:, index] if s.lstm else x.flatten(0, 1)[index][None]  # noqa: B023
                state = tuple(x[:, index] for x in r["state"])
                values, _ = self.network(part(r["obs"]), part(r["done"]), state)
                chosen = values.gather(-1, part(r["action"])[..., None])[..., 0]
                loss = nn.functional.mse_loss(chosen, part(target))
                self.optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), s.max_norm)
                self.optimiser.step()

    def updates(self, count: int) -> float:
        """Train for `count` more updates -> seconds."""
        start = time.perf_counter()
        for _ in range(count):
            self.learn(self.rollout())
        return time.perf_counter() - start
