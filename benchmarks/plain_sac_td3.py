"""SAC and TD3 as plain PyTorch loops, to compare ours with: CleanRL's settings, one environment, one step at a time.

Needs PyTorch, which Cleanba does not depend on:

    python benchmarks/plain_sac_td3.py sac HalfCheetah-v5 --steps 2000 --warmup 200 --threads 2

Prints a line of JSON with the steps per second of wall time and of processor time.  A step is one step of the
environment and one gradient step.
"""

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

GAMMA, TAU, BATCH, HIDDEN = 0.99, 0.005, 256, 256
POLICY_FREQUENCY = 2


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class Replay:
    """The newest steps, in arrays."""

    def __init__(self, capacity: int, obs: int, actions: int):
        shapes = {"obs": obs, "next_obs": obs, "action": actions, "reward": 1, "done": 1}
        self.arrays = {name: np.zeros((capacity, width), np.float32) for name, width in shapes.items()}
        self.capacity, self.added = capacity, 0

    def add(self, **step: Any) -> None:
        for name, value in step.items():
            self.arrays[name][self.added % self.capacity] = value
        self.added += 1

    def sample(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        rows = rng.integers(0, min(self.added, self.capacity), BATCH)
        return {name: torch.from_numpy(array[rows]) for name, array in self.arrays.items()}


class Learner:
    """Two critics with their targets, and a policy: what both algorithms have."""

    def __init__(self, obs: int, low: np.ndarray, high: np.ndarray, heads: int, policy_lr: float, q_lr: float):
        self.size = low.shape[0]
        self.centre, self.scale = (torch.from_numpy(x.astype(np.float32)) for x in ((high + low) / 2, (high - low) / 2))
        self.policy = mlp(obs, heads * self.size)
        self.critics = [mlp(obs + self.size, 1) for _ in range(2)]
        self.targets = [mlp(obs + self.size, 1) for _ in range(2)]
        for critic, target in zip(self.critics, self.targets, strict=True):
            target.load_state_dict(critic.state_dict())
        self.q_optimiser = torch.optim.Adam([p for c in self.critics for p in c.parameters()], lr=q_lr)
        self.policy_optimiser = torch.optim.Adam(self.policy.parameters(), lr=policy_lr)

    def q_step(self, batch: dict[str, torch.Tensor], y: torch.Tensor) -> None:
        seen = torch.cat([batch["obs"], batch["action"]], 1)
        loss = sum(functional.mse_loss(critic(seen), y) for critic in self.critics)
        self.q_optimiser.zero_grad()
        loss.backward()
        self.q_optimiser.step()

    def policy_step(self, loss: torch.Tensor) -> None:
        self.policy_optimiser.zero_grad()
        loss.backward()
        self.policy_optimiser.step()

    @staticmethod
    def follow(online: nn.Module, target: nn.Module) -> None:
        for p, q in zip(online.parameters(), target.parameters(), strict=True):
            q.data.copy_(TAU * p.data + (1 - TAU) * q.data)


class SAC(Learner):
    def __init__(self, obs: int, low: np.ndarray, high: np.ndarray):
        super().__init__(obs, low, high, 2, 3e-4, 1e-3)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha = 1.0
        self.alpha_optimiser = torch.optim.Adam([self.log_alpha], lr=1e-3)

    def draw(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, x = self.policy(obs).chunk(2, -1)
        log_std = -5 + 3.5 * (torch.tanh(x) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = normal.rsample()
        y = torch.tanh(u)
        log_prob = normal.log_prob(u) - torch.log(self.scale * (1 - y.pow(2)) + 1e-6)
        return y * self.scale + self.centre, log_prob.sum(1, keepdim=True)

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        return self.draw(obs)[0]

    def learn(self, step: int, batch: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            action, log_prob = self.draw(batch["next_obs"])
            seen = torch.cat([batch["next_obs"], action], 1)
            future = torch.min(self.targets[0](seen), self.targets[1](seen)) - self.alpha * log_prob
            y = batch["reward"] + (1 - batch["done"]) * GAMMA * future
        self.q_step(batch, y)
        if step % POLICY_FREQUENCY == 0:
            for _ in range(POLICY_FREQUENCY):
                action, log_prob = self.draw(batch["obs"])
                seen = torch.cat([batch["obs"], action], 1)
                self.policy_step((self.alpha * log_prob - torch.min(*(c(seen) for c in self.critics))).mean())
                with torch.no_grad():
                    _, log_prob = self.draw(batch["obs"])
                loss = (-self.log_alpha.exp() * (log_prob - self.size)).mean()
                self.alpha_optimiser.zero_grad()
                loss.backward()
                self.alpha_optimiser.step()
                self.alpha = self.log_alpha.exp().item()
        for critic, target in zip(self.critics, self.targets, strict=True):
            self.follow(critic, target)


class TD3(Learner):
    def __init__(self, obs: int, low: np.ndarray, high: np.ndarray):
        super().__init__(obs, low, high, 1, 3e-4, 3e-4)
        self.low, self.high = self.centre - self.scale, self.centre + self.scale
        self.policy_target = mlp(obs, self.size)
        self.policy_target.load_state_dict(self.policy.state_dict())

    def chosen(self, policy: nn.Module, obs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(policy(obs)) * self.scale + self.centre

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        action = self.chosen(self.policy, obs)
        return (action + torch.randn_like(action) * self.scale * 0.1).clamp(self.low, self.high)

    def learn(self, step: int, batch: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            noise = (torch.randn_like(batch["action"]) * 0.2).clamp(-0.5, 0.5) * self.scale
            action = (self.chosen(self.policy_target, batch["next_obs"]) + noise).clamp(self.low, self.high)
            seen = torch.cat([batch["next_obs"], action], 1)
            future = torch.min(self.targets[0](seen), self.targets[1](seen))
            y = batch["reward"] + (1 - batch["done"]) * GAMMA * future
        self.q_step(batch, y)
        if step % POLICY_FREQUENCY == 0:
            seen = torch.cat([batch["obs"], self.chosen(self.policy, batch["obs"])], 1)
            self.policy_step(-self.critics[0](seen).mean())
            for critic, target in zip(self.critics, self.targets, strict=True):
                self.follow(critic, target)
            self.follow(self.policy, self.policy_target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=("sac", "td3"))
    parser.add_argument("env_id")
    parser.add_argument("--steps", type=int, default=2000, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=300, help="steps before them; the first 256 are random")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch's threads")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)

    import envpool

    env = envpool.make(asked.env_id, env_type="gymnasium", num_envs=1, seed=1, num_threads=1)
    space: Any = env.action_space
    obs = env.reset()[0][0]
    rng = np.random.default_rng(1)
    learner = (SAC if asked.algorithm == "sac" else TD3)(obs.shape[0], space.low, space.high)
    memory = Replay(1_000_000, obs.shape[0], space.shape[0])
    for step in range(-asked.warmup, asked.steps):
        if step == 0:
            start, used = time.perf_counter(), processor_seconds()
        if memory.added < BATCH:
            action = rng.uniform(space.low, space.high)
        else:
            with torch.no_grad():
                action = learner.act(torch.from_numpy(obs.astype(np.float32))[None])[0].numpy()
        after, reward, terminated, truncated = (x[0] for x in env.step(action.astype(space.dtype)[None])[:4])
        memory.add(obs=obs, next_obs=after, action=action, reward=reward, done=terminated)
        obs = env.reset()[0][0] if terminated or truncated else after
        if memory.added > BATCH:
            learner.learn(step, memory.sample(rng))
    wall, cpu = time.perf_counter() - start, processor_seconds() - used
    print(json.dumps({"steps_per_second": asked.steps / wall, "steps_per_processor_second": asked.steps / cpu}))


def processor_seconds() -> float:
    """Processor time of all threads of this process."""
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


if __name__ == "__main__":
    main()
