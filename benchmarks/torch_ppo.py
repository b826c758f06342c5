"""PPO as a plain PyTorch loop with CleanRL's settings: act, step, store, then learn, in turns.

One Python thread does everything, one minibatch after another, as in single-file implementations; PyTorch's threads do
the arithmetic, and EnvPool's threads step the environments.  `benchmarks/peers.py` compares its speed with ours.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cleanba.environments.envpool import Envs, env_spec
from cleanba.recipes import RECIPES


@dataclass(frozen=True)
class Settings:
    """What is trained."""

    env_id: str
    num_envs: int
    num_steps: int
    epochs: int
    minibatches: int
    learning_rate: float
    clip: float
    entropy: float
    value: float = 0.5
    max_norm: float = 0.5
    gamma: float = 0.99
    lam: float = 0.95
    env_threads: int = 0
    channels_last: bool = False


BREAKOUT = Settings("Breakout-v5", 32, 64, 4, 4, 2.5e-4, 0.1, 0.01)
HALFCHEETAH = Settings("HalfCheetah-v5", 1, 2048, 10, 32, 3e-4, 0.2, 0.0, env_threads=1)


def layer(made: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Pixels(nn.Module):
    """The Nature CNN with two heads."""

    def __init__(self, actions: int):
        super().__init__()
        self.torso = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten(), layer(nn.Linear(3136, 512)), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        hidden = self.torso(x / 255.0)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden)[:, 0]


class Numbers(nn.Module):
    """Two networks of two tanh layers, and a standard deviation that depends on nothing."""

    def __init__(self, inputs: int, actions: int):
        super().__init__()
        deep = lambda outputs, gain: nn.Sequential(
            layer(nn.Linear(inputs, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh(),
            layer(nn.Linear(64, outputs), gain),
        )  # fmt: skip
        self.policy, self.value = deep(actions, 0.01), deep(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(1, actions))

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        normal = torch.distributions.Normal(self.policy(x), self.log_std.exp().expand(x.shape[0], -1))
        return torch.distributions.Independent(normal, 1), self.value(x)[:, 0]


class Moments:
    """Running mean and variance, batch by batch."""

    def __init__(self, shape: tuple[int, ...]):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def add(self, x: np.ndarray) -> None:
        n, total = len(x), self.count + len(x)
        delta = x.mean(0) - self.mean
        squares = self.var * self.count + x.var(0) * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, squares / total, total


class TorchPPO:
    """A training that can be continued, some updates at a time."""

    def __init__(self, s: Settings, seed: int = 1):
        torch.manual_seed(seed)
        recipe = RECIPES["ppo"]
        spec = env_spec(recipe.experiment(env_id=s.env_id))
        self.s, self.real = s, spec.action.kind == "quantities"
        self.envs = Envs(spec, [seed + i for i in range(s.num_envs)], s.env_threads)
        self.network: nn.Module = (
            Numbers(spec.obs.shape[0], spec.action.size) if self.real else Pixels(spec.num_actions)
        )
        if s.channels_last:
            self.network = self.network.to(memory_format=torch.channels_last)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=s.learning_rate, eps=1e-5)
        self.seen, self.returned = Moments(spec.obs.shape if self.real else ()), Moments(())
        self.discounted = np.zeros(s.num_envs)
        self.obs = self.observe(self.envs.reset())
        self.done = torch.zeros(s.num_envs)

    def observe(self, obs: np.ndarray) -> torch.Tensor:
        """An observation as the network sees it."""
        if not self.real:
            x = torch.from_numpy(obs)
            return x.contiguous(memory_format=torch.channels_last) if self.s.channels_last else x
        self.seen.add(obs)
        return torch.from_numpy(np.clip((obs - self.seen.mean) / np.sqrt(self.seen.var + 1e-8), -10, 10)).float()

    def reward(self, reward: np.ndarray, over: np.ndarray) -> torch.Tensor:
        """A reward as it is learnt from."""
        if self.real:
            self.discounted = self.discounted * self.s.gamma + reward
            self.returned.add(self.discounted)
            self.discounted[over] = 0
            reward = np.clip(reward / np.sqrt(self.returned.var + 1e-8), -10, 10)
        return torch.from_numpy(np.asarray(reward, np.float32))

    def rollout(self) -> dict[str, Any]:
        """Collect one rollout, step by step."""
        kept: dict[str, list[torch.Tensor]] = {k: [] for k in ("obs", "action", "log_prob", "value", "reward", "done")}
        for _ in range(self.s.num_steps):
            with torch.no_grad():
                policy, value = self.network(self.obs)
                action = policy.sample()
            values = {"obs": self.obs, "action": action, "log_prob": policy.log_prob(action)}
            step = self.envs.step(action.numpy())
            over = step.terminated | step.truncated
            values |= {"value": value, "reward": self.reward(step.reward, over), "done": self.done}
            for name, tensor in values.items():
                kept[name].append(tensor)
            self.obs, self.done = self.observe(step.obs), torch.from_numpy(over).float()
        return {name: torch.stack(tensors) for name, tensors in kept.items()}

    def advantages(self, r: dict[str, Any]) -> torch.Tensor:
        """GAE, backwards."""
        with torch.no_grad():
            following = self.network(self.obs)[1]
        advantage, last = torch.zeros_like(r["reward"]), 0.0
        for t in reversed(range(self.s.num_steps)):
            goes_on = 1.0 - (self.done if t == self.s.num_steps - 1 else r["done"][t + 1])
            after = following if t == self.s.num_steps - 1 else r["value"][t + 1]
            delta = r["reward"][t] + self.s.gamma * after * goes_on - r["value"][t]
            advantage[t] = last = delta + self.s.gamma * self.s.lam * goes_on * last
        return advantage

    def learn(self, r: dict[str, Any]) -> None:
        """All epochs over one rollout."""
        s = self.s
        r["advantage"] = self.advantages(r)
        r["target"] = r["advantage"] + r["value"]
        flat = {name: x.flatten(0, 1) for name, x in r.items()}
        size = s.num_envs * s.num_steps
        for _ in range(s.epochs):
            for index in torch.randperm(size).chunk(s.minibatches):
                mb = {name: x[index] for name, x in flat.items()}
                obs = mb["obs"].contiguous(memory_format=torch.channels_last) if s.channels_last else mb["obs"]
                policy, value = self.network(obs)
                ratio = (policy.log_prob(mb["action"]) - mb["log_prob"]).exp()
                advantage = (mb["advantage"] - mb["advantage"].mean()) / (mb["advantage"].std() + 1e-8)
                policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - s.clip, 1 + s.clip)).mean()
                clipped = mb["value"] + (value - mb["value"]).clamp(-s.clip, s.clip)
                errors = torch.max((value - mb["target"]) ** 2, (clipped - mb["target"]) ** 2)
                loss = policy_loss - s.entropy * policy.entropy().mean() + s.value * 0.5 * errors.mean()
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
