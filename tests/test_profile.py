"""--profile records as many updates as asked for."""

from launch import TINY, command

from cleanba.runtime.profile import WARM, Profile


def recorded(monkeypatch, tmp_path, wanted: int, updates: int) -> tuple[list, str | None]:
    """In a run of this many updates: after which ones JAX was asked to begin and to end, and what was printed."""
    asked, said, now = [], None, 0
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder, **options: asked.append(("begin", now)))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: asked.append(("end", now)))
    profile = Profile(tmp_path, wanted)
    for now in range(1, updates + 1):  # noqa: B007  the two lambdas look at it
        said = profile.after_update() or said
    profile.close()
    profile.close()
    return asked, said


def test_as_many_updates_are_recorded_as_asked_for(monkeypatch, tmp_path):
    asked, said = recorded(monkeypatch, tmp_path, 3, 9)
    assert asked == [("begin", WARM), ("end", WARM + 3)] and str(tmp_path) in said


def test_a_short_run_is_recorded_to_its_end(monkeypatch, tmp_path):
    assert recorded(monkeypatch, tmp_path, 30, 9) == ([("begin", WARM), ("end", 9)], None)


def test_nothing_is_recorded_unless_asked_for(monkeypatch, tmp_path):
    assert recorded(monkeypatch, tmp_path, 0, 9) == ([], None)


def test_the_flag(tmp_path):
    ended = command("ppo", *TINY, "--profile", "1", "--run-dir", tmp_path)
    assert ended.code == 0 and "profile of 1 updates" in ended.out, ended.err
    assert len(list((tmp_path / "profile").rglob("*.trace.json.gz"))) > 0
    assert command("ppo", *TINY, "--profile", "-1").code == 2
