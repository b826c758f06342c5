"""The table of algorithms, each with its presets."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeAlias

from cleanba.algorithm import Algorithm, AnyAlgorithm
from cleanba.algorithms import dqn, impala, ppo, pqn, r2d2, sac, td3
from cleanba.config import E, Partition, Settings
from cleanba.environments.common import imported
from cleanba.errors import Failure, Interrupted, UsageError, place_of, raised
from cleanba.kernels import compiled_for
from cleanba.specs import EnvSpec, describe


class Play(NamedTuple):
    """How an agent acts when it is evaluated."""

    greedy: bool = False
    """whether it takes the best action it knows, without exploration"""
    epsilon: float = 0.0
    """probability of a uniformly random action instead"""

    def changed(self, greedy: bool | None, epsilon: float | None) -> "Play":
        """The same with the values that flags give; None keeps a value.  `greedy=True` alone sets `epsilon` to 0."""
        if epsilon is None:
            epsilon = 0.0 if greedy else self.epsilon
        return Play(self.greedy if greedy is None else greedy, epsilon)

    def in_words(self) -> str:
        """How actions are chosen, as evaluations and reports say it."""
        words = "greedy actions" if self.greedy else "actions drawn from the policy"
        return words + (f", random with probability {self.epsilon:.3g}" if self.epsilon else "")


class Recipe(NamedTuple, Generic[E]):
    """An algorithm, and what commands need to know of it."""

    name: str
    about: str
    experiment: type[E]
    check: Callable[[E, Partition], None]
    """experiment, partition; raises `UsageError` for hyperparameters that do not fit"""
    functions: Callable[[E, EnvSpec, str], AnyAlgorithm]
    """experiment, specification of the environment, platform -> the algorithm"""
    plays: Play = Play()
    """how it is evaluated unless flags say otherwise"""
    presets: Mapping[str, Settings] = {}
    """name of the preset, from `resolution.preset_name` -> settings that differ from the experiment's defaults"""
    logs: Mapping[str, str] = {}
    """metrics that its updates log: name -> meaning"""
    protocols: Mapping[str, Settings] = {}
    """other names for --preset -> settings, those of the environment included; most of them are published"""

    @property
    def modules(self) -> list[str]:
        """The module of the algorithm's functions, and for "my_ppo:RECIPE" `my_ppo`."""
        functions: Any = self.functions
        while isinstance(functions, partial):
            functions = functions.func
        module, colon, _ = self.name.partition(":")
        return [str(functions.__module__), *[module] * bool(colon)]

    def named_presets(self) -> dict[str, Settings]:
        """All that --preset may name."""
        return {**self.protocols, **self.presets}

    def make(self, e: E, spec: EnvSpec, platform: str) -> AnyAlgorithm:
        """The algorithm on environments that look like `spec`, on `platform` ("cpu", "gpu" …).

        On CPUs its functions call kernels if the experiment allows it.

        Raises:
            UsageError: the environment does not suit the algorithm, or its network.
        """
        functions = self.functions(e, spec, platform)
        algorithm: AnyAlgorithm = Algorithm._make(
            compiled_for(platform, e.cpu_kernels, function) for function in functions
        )
        if self.name not in RECIPES:
            self._try_network(algorithm, spec)
        return algorithm

    def _try_network(self, algorithm: AnyAlgorithm, spec: EnvSpec) -> None:
        """Raise `UsageError` if the user's code cannot make parameters for these observations."""
        try:
            algorithm.shapes()
        except (UsageError, Failure, Interrupted):
            raise
        except Exception as error:
            if not place_of(error):  # it lies here, not in the user's code
                raise
            raise UsageError(
                f"{self.name}: the network failed on this environment's observations ({describe(spec.obs)}): "
                f"{raised(error)}"
            ) from error


AnyRecipe: TypeAlias = Recipe[Any]
"""A recipe whose type of experiment is only known at run time, such as one looked up by name."""


DRAWN, BEST = Play(), Play(greedy=True)
AS_CLEANRL = Play(greedy=True, epsilon=0.05)  # a deterministic policy may run in circles


def _recipe(name: str, module: ModuleType, experiment: type[Any], about: str, plays: Play = DRAWN) -> AnyRecipe:
    """The recipe of an algorithm here, from what its module calls by the same names as all others."""
    presets, protocols = getattr(module, "PRESETS", {}), getattr(module, "PROTOCOLS", {})
    functions = module.check, module.make
    return Recipe(name, about, experiment, *functions, plays, presets, module.LOGGED, protocols)


RECIPES: dict[str, AnyRecipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("ppo", ppo, ppo.PPO, "train with proximal policy optimisation"),
        _recipe("impala", impala, impala.IMPALA, "train with IMPALA and V-trace"),
        _recipe("dqn", dqn, dqn.DQN, "train with deep Q-learning and replay", AS_CLEANRL),
        _recipe("pqn", pqn, pqn.PQN, "train with Q-learning from rollouts, without replay", AS_CLEANRL),
        _recipe(
            "r2d2",
            r2d2,
            r2d2.R2D2,
            "train with recurrent Q-learning and prioritised replay of sequences",
            Play(greedy=True, epsilon=0.01),
        ),
        _recipe("sac", sac, sac.SAC, "train with soft actor-critic and replay", BEST),
        _recipe(
            "td3",
            td3,
            td3.TD3,
            "train with twin delayed deep deterministic policy gradients and replay",
            BEST,
        ),
    )
}


def names_recipe(name: str) -> bool:
    """Whether a name is that of an algorithm here, or has the form of one of the user's own.  Nothing is imported."""
    return name in RECIPES or ":" in name


def find_recipe(name: str) -> AnyRecipe:
    """The algorithm of this name: one of `RECIPES`, or one of the user's own, "my_ppo:RECIPE", which is imported.

    Raises:
        UsageError: there is none of this name, or its module cannot be imported.
    """
    if not isinstance(name, str):
        raise UsageError(f"an algorithm is given by its name, such as 'ppo', not as {name!r}")
    if name in RECIPES:
        return RECIPES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(
            f"there is no algorithm {name!r}; there are {', '.join(RECIPES)}, and your own, as module:RECIPE"
        )
    if not (all(part.isidentifier() for part in module.split(".")) and attribute.isidentifier()):
        raise UsageError(f"the algorithm {name!r} must have the form module:RECIPE, such as my_ppo:RECIPE")
    found = imported(f"the algorithm {name}", "run the command in the module's directory", module, attribute)
    if not isinstance(found, Recipe):
        raise UsageError(f"{name} is not a recipe but {type(found).__name__}; docs/guides/own-loss.md shows one")
    return found._replace(name=name)
