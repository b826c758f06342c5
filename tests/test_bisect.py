"""`cleanba bisect`: planted faults are found and named; recording changes no bit; the command and what it refuses."""

import pytest
from planted import FAULTS, look_for, sound, train, verdict


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(algorithm) -> the directory of a run and its sound computation, watched; made once."""
    made = {}

    def get(name: str):
        if name not in made:
            run_dir = train(name, tmp_path_factory.mktemp("runs"))
            made[name] = run_dir, sound(name, run_dir)
        return made[name]

    return get


# One of each sort; benchmarks/planted.py plants them all.
FEW = (
    "one bit of an observation",
    "a wrong key for one actor",
    "a stale policy version",
    "a permuted minibatch",
    "one bit of a shard's gradient",
    "a result that does not repeat itself",
    "a key that depends on the device",
    "a target network one step late",
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in FEW], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(runs, fault):
    finding = look_for(fault, *runs(fault.run))
    print("\n".join(finding.lines()) if finding else "nothing")
    assert not verdict(fault, finding)
