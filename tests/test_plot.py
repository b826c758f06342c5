"""Curves, bands, aggregates and tables of `cleanba plot`, on made-up runs whose numbers are known."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from launch import command
from PIL import Image

from cleanba.environments.atari_scores import LONG, SHORT, human_normalised, publication, table
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.runs import plot
from cleanba.runs.aggregates import aggregates, bootstrap, by_games
from cleanba.runs.curves import GRID, Curve, band, find_runs, group, interval, load, read_rows, resample_means

EXPERIMENT = {
    "algorithm": "ppo",
    "env_id": "Breakout-v5",
    "seed": 1,
    "learning_rate": 2.5e-4,
    "hiddens": [256],
    "repeat_action_probability": 0.25,
    "full_action_space": True,
    "env_options": [],
}


def write_run(folder: Path, returns=(0.0, 5.0, 10.0), steps=None, speed=10.0, **experiment) -> Path:
    """A run with one log point per return; the first rows have none, as before the first episode's end."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"experiment": EXPERIMENT | experiment}))
    steps = range(1000, 1000 * len(returns) + 1, 1000) if steps is None else steps
    rows = [{"update": 0, "global_step": 500, "seconds": 1.0, "charts/SPS": 1.0}]
    for i, (step, value) in enumerate(zip(steps, returns, strict=True), 1):
        rows.append({"update": i, "global_step": step, "seconds": step / speed, "charts/episodic_return": value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def without_rows(run: Path) -> Path:
    """The run, as it is before its first row."""
    (run / "metrics.jsonl").write_text("")
    return run


def curve(steps, returns, seconds=None, **experiment) -> Curve:
    values = [np.asarray(x, float) for x in (steps, steps if seconds is None else seconds, returns)]
    return Curve(Path("run"), EXPERIMENT | experiment, *values)


def test_the_mean_of_runs_with_points_at_different_places():
    b = band([curve([0, 10], [0, 10]), curve([0, 4, 10], [4, 4, 4]), curve([0, 10], [2, 8])], "steps")
    x = np.linspace(0, 10, GRID)
    assert np.allclose(b.x, x) and np.allclose(b.mean, (x + 4 + (2 + 0.6 * x)) / 3)


def test_a_run_that_ended_early_counts_as_far_as_it_got():
    short, long = curve([0, 5], [0, 0]), curve([0, 10], [6, 6])
    b = band([short, long], "steps")
    assert b.x[-1] == 10
    assert np.allclose(b.mean[b.x <= 5], 3) and np.allclose(b.mean[b.x > 5], 6)
    assert np.isfinite(b.low[b.x <= 5]).all() and np.isnan(b.low[b.x > 5]).all()


def test_a_run_that_reached_its_target_counts_with_its_last_return():
    reached, long = curve([0, 5], [0, 2])._replace(finished=True), curve([0, 10], [6, 6])
    b = band([reached, long], "steps")
    assert b.x[-1] == 10 and np.allclose(b.mean[b.x >= 5], 4)


def test_wall_time_ends_with_the_fastest_of_the_complete_runs():
    fast, slow = curve([0, 100], [0, 1], [0, 20]), curve([0, 100], [0, 1], [0, 30])
    b = band([fast, slow], "seconds")
    assert b.x[-1] == 20 and np.isclose(b.mean[-1], (1 + 2 / 3) / 2)


def test_a_cross_is_drawn_only_where_its_line_is():
    fast, stopped = curve([0, 100], [0, 1], [0, 20]), curve([0, 50], [0, 1], [0, 50], seed=2)

    def crosses(axis):
        panel = plot.draw_curves({"Breakout-v5": {"ppo": [fast, stopped]}}, axis).axes[0]
        return [x for line in panel.lines if line.get_marker() == "x" for x in line.get_xdata()]

    assert crosses("steps") == [50]
    assert crosses("seconds") == [], "the line ends after 20 s"


def test_the_table_marks_what_ended_early():
    whole, failed = curve([0, 100], [0, 1]), curve([0, 50], [0, 1], seed=2)
    seeds = lambda **variants: [row[2] for row in plot.final_rows({"Breakout-v5": variants})]
    assert seeds(a=[whole], b=[failed]) == ["1", "1 (1 ended early)"]
    assert seeds(a=[whole], b=[failed._replace(finished=True)]) == ["1", "1"]
    assert seeds(a=[failed, failed]) == ["2"]


def test_the_interval_is_that_of_a_bootstrap_by_hand():
    values = np.random.default_rng(3).normal(size=(5, 2)) * [1, 100]
    low, high = interval(values)
    rng = np.random.default_rng(8)
    means = np.array([values[rng.integers(5, size=5)].mean(0) for _ in range(20_000)])
    expected = np.percentile(means, (2.5, 97.5), axis=0)
    spread = values.std(0)
    assert (abs(low - expected[0]) < 0.06 * spread).all() and (abs(high - expected[1]) < 0.06 * spread).all()


def test_one_seed_has_no_interval_and_two_have_their_range():
    assert np.isnan(interval(np.array([[3.0]]))).all()
    assert np.array_equal(interval(np.array([[3.0], [7.0]])), [[3.0], [7.0]])


def test_missing_values_are_left_out_of_resampled_means():
    means = resample_means(np.array([[3.0, 1.0], [np.nan, 5.0]]))
    assert set(means[np.isfinite(means[:, 0]), 0]) == {3.0}
    assert set(means[:, 1]) == {1.0, 3.0, 5.0}


def test_aggregates_are_their_definitions():
    matrix = np.random.default_rng(0).gamma(1.0, 1.5, size=(4, 10))
    per_game = matrix.mean(0)
    ordered = np.sort(matrix.ravel())
    gap = np.mean([1 - min(score, 1.0) for score in matrix.ravel()])
    assert np.allclose(by_games(list(matrix.T)), [np.median(per_game), ordered[10:30].mean(), per_game.mean(), gap])


def square(scores):
    """Games with different numbers of seeds as one matrix [seeds, games] in which every game weighs the same."""
    rows = np.lcm.reduce([len(s) for s in scores])
    return np.stack([np.tile(s, rows // len(s)) for s in scores], axis=1)


def test_games_with_fewer_seeds_weigh_the_same():
    scores = [np.array([1.0, 3.0]), np.array([10.0, 20.0, 30.0])]
    assert square(scores).shape == (6, 2)
    assert np.allclose(by_games(scores), by_games(list(square(scores).T)))
    rng = np.random.default_rng(2)
    uneven = [rng.gamma(1.0, 2.0, n) for n in (3, 4, 5, 6, 2)]
    ordered, gap = np.sort(square(uneven), axis=None), 1 - np.minimum(square(uneven), 1).mean()
    per_game = square(uneven).mean(0)
    wanted = [np.median(per_game), ordered[75:-75].mean(), per_game.mean(), gap]  # of 300, a quarter at either end
    assert np.allclose(by_games(uneven), wanted)
    median, _, mean, _ = by_games(list(square(scores).T))
    assert median == mean == (2 + 20) / 2


def test_the_stratified_bootstrap_draws_within_games():
    constant = [np.full(3, 1.0), np.full(3, 100.0)]  # runs of a game do not differ, so nothing varies
    e = bootstrap(constant, lambda by_game: square(by_game).mean(keepdims=True).ravel())
    assert e.value == e.low == e.high == 50.5
    rng = np.random.default_rng(1)
    scores = [rng.normal(size=5), rng.normal(10, 3, size=5)]
    e = bootstrap(scores, lambda by_game: square(by_game).mean(keepdims=True).ravel())
    means = [np.mean([s[rng.integers(5, size=5)].mean() for s in scores]) for _ in range(20_000)]
    assert np.allclose([e.low[0], e.high[0]], np.percentile(means, (2.5, 97.5)), atol=0.1)


def test_variants_are_what_differs_within_an_environment():
    runs = [curve([1], [1], env_id="A", seed=s, learning_rate=lr) for s in (1, 2) for lr in (1e-3, 2e-4)]
    runs += [curve([1], [1], env_id="B", seed=s, learning_rate=5e-4, hiddens=[64, 64]) for s in (1, 2)]
    groups = group(runs)
    assert {env_id: list(found) for env_id, found in groups.items()} == {
        "A": ["learning_rate=0.0002", "learning_rate=0.001"],
        "B": ["learning_rate=0.0005"],
    }
    assert [c.experiment["seed"] for c in groups["A"]["learning_rate=0.001"]] == [1, 2]
    both = [*runs[:1], curve([1], [1], env_id="A", algorithm="impala", learning_rate=9.0, own_field=3)]
    assert list(group(both)["A"]) == ["impala", "ppo"]  # what belongs to an algorithm is no variant
    apart = [*runs[:2], curve([1], [1], env_id="B", algorithm="dqn", learning_rate=2e-4)]
    assert list(group(apart)["B"]) == ["dqn, learning_rate=0.0002"]  # not one line with PPO on another game
    assert list(group(runs[4:])["B"]) == ["ppo"]


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, capsys):
    run = write_run(tmp_path / "run", returns=(1.0, 2.0, 3.0))
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes("\n".join([lines[0], lines[1], "\x00\x01{", "[1]", lines[3], lines[3][:20]]).encode() + b"\xff")
    assert [row["update"] for row in read_rows(run)] == [0, 1, 3]
    assert "damaged lines are left out: number 3, 4, 6" in capsys.readouterr().err


def test_an_evaluation_belongs_to_the_row_of_its_update(tmp_path):
    run = write_run(tmp_path / "run", returns=(1.0, 2.0))
    played = {"update": 1, "global_step": 1000, "seconds": 999.0, "eval/episodic_return": 7.0}
    with open(run / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps(played) + "\n")
    rows = read_rows(run)
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert rows[1]["eval/episodic_return"] == 7.0 and rows[1]["seconds"] == 100.0
    assert rows[1]["charts/episodic_return"] == 1.0


def test_runs_are_found_at_any_depth_and_once(tmp_path):
    deep = write_run(tmp_path / "a/b/c")
    other = write_run(tmp_path / "d", seed=2)
    (deep / "checkpoints").mkdir()
    (tmp_path / "a/up").symlink_to(tmp_path)  # a walk that follows it for ever would not end
    assert find_runs([tmp_path, deep]) == [deep, other]


def test_a_run_that_lost_a_file_is_told_what_it_lacks(tmp_path):
    unlogged, unknown = write_run(tmp_path / "unlogged"), write_run(tmp_path / "unknown")
    (unlogged / "metrics.jsonl").unlink()
    (unknown / "config.json").unlink()
    told = f"{unlogged} has no metrics.jsonl, so it cannot be drawn; `cleanba eval {unlogged}` still plays it"
    assert told in command("plot", unlogged).err
    for name in ("plot", "eval"):
        ended = command(name, unknown)
        assert ended.code == 2 and f"{unknown} has no config.json, so what it trained is unknown; " in ended.err, ended


def test_a_run_from_elsewhere_is_drawn_only_if_it_is_named(tmp_path, capsys):
    mine, theirs = write_run(tmp_path / "mine"), write_run(tmp_path / "hub/theirs", seed=7)
    (theirs / "downloaded.json").write_text('{"from": "hf://somebody/run"}')
    assert find_runs([tmp_path]) == [mine] and "hub/theirs comes from elsewhere" in capsys.readouterr().err
    assert find_runs([tmp_path, theirs]) == [mine, theirs]


def test_a_field_that_an_older_version_lacks_has_its_default(tmp_path):
    write_run(tmp_path / "old")
    write_run(tmp_path / "new", seed=2, layer_norm=True)
    assert len(group(load([tmp_path]))["Breakout-v5"]) == 2, "with layer normalisation it is another variant"
    write_run(tmp_path / "same", seed=3, layer_norm=False)
    assert sorted(map(len, group(load([tmp_path]))["Breakout-v5"].values())) == [1, 2]


def test_the_same_run_twice_is_one_sample_and_no_episode_is_none(tmp_path, capsys):
    write_run(tmp_path / "short", returns=(1.0,))
    write_run(tmp_path / "long", returns=(1.0, 2.0))
    write_run(tmp_path / "empty", returns=(), seed=3)
    curves = load([tmp_path])
    assert [c.run_dir.name for c in curves] == ["long"]
    err = capsys.readouterr().err
    assert "short is the same experiment and seed" in err and "empty has finished no episode" in err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", "is not a directory"),
        (lambda path: path, "holds no run"),
        (lambda path: write_run(path / "new", returns=()), "has finished an episode yet"),
        (lambda path: without_rows(write_run(path / "new")), "has logged anything yet"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path, make, message):
    ended = command("plot", make(tmp_path), "--out", tmp_path / "curves")
    assert ended.code == 2 and message in ended.err and "Traceback" not in ended.err
    assert not (tmp_path / "curves.png").exists()
    ended = command("plot")
    assert ended.code == 2 and "needs runs to draw" in ended.err


def cells(text: str, first: str) -> list[str]:
    """The row of a Markdown table that begins with this cell."""
    rows = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in text.splitlines()]
    return next(row for row in rows if row[0] == first)


def looks_drawn(path: Path) -> bool:
    pixels = np.asarray(Image.open(path).convert("L"))
    return bool(min(pixels.shape) > 300 and (pixels < 128).mean() > 0.002 and (pixels > 200).mean() > 0.5)


def test_figures_lie_beside_their_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b"):
        write_run(tmp_path / name, seed=ord(name[-1]))
    assert plot.beside([Path("runs")]) == Path("runs/plots/curves")
    assert plot.beside([Path("runs/a"), Path("runs/b")]) == Path("runs/plots/curves")
    assert plot.beside([Path("runs/a")]) == Path("runs/a/plots/curves")
    assert plot.beside([tmp_path / "runs", Path("/etc")]) == tmp_path / "runs/plots/curves"
    assert command("plot", "runs").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert Path("runs/plots/curves.png").exists()


def test_one_run(tmp_path):
    run = write_run(tmp_path / "run", env_id="CartPole-v1", returns=(20.0, 100.0, 475.0))
    ended = command("plot", run, "--out", tmp_path / "figures/curves.png")
    assert ended.code == 0 and not ended.err
    text = (tmp_path / "figures/curves.md").read_text()
    assert text in ended.out
    assert cells(text, "CartPole-v1") == ["CartPole-v1", "ppo", "1", "3,000", "5", "475", "–"]
    assert "published" not in text
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert written == {"curves.csv", "curves.md", "curves.png", "curves.svg", "curves_time.png", "curves_time.svg"}
    lines = (tmp_path / "figures/curves.csv").read_text().splitlines()
    assert lines[0] == "env_id,variant,seed,global_step,seconds,value" and len(lines) == 4
    assert lines[3] == "CartPole-v1,ppo,1,3000,300.0,475.0"
    assert looks_drawn(tmp_path / "figures/curves.png") and looks_drawn(tmp_path / "figures/curves_time.png")


def test_any_metric_is_drawn(tmp_path):
    run = write_run(tmp_path / "run", env_id="Breakout-v5")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["losses/entropy"] = 1.5 - i
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = command("plot", run, "--metric", "losses/entropy")
    assert ended.code == 0 and "last `losses/entropy`" in ended.out and "human" not in ended.out
    assert cells(ended.out, "Breakout-v5")[-1] == "-1.5"
    assert looks_drawn(run / "plots" / "losses-entropy.png")
    assert (run / "plots" / "losses-entropy.csv").read_text().splitlines()[1].endswith(",1.5")
    ended = command("plot", run, "--metric", "losses/entropi")
    assert ended.code == 2 and "did you mean losses/entropy?" in ended.err and "has logged losses/entropi" in ended.err


def test_one_log_point_and_strange_names_are_drawn(tmp_path):
    run = write_run(tmp_path / "run", env_id="Cart$Pole^{-v1", returns=(20.0,), env_options=["a=$_{", "b"])
    assert command("plot", run, "--out", tmp_path / "curves").code == 0
    assert looks_drawn(tmp_path / "curves.png")


def test_three_seeds_of_one_game(tmp_path):
    for seed, last in ((1, 100.0), (2, 200.0), (3, 300.0)):
        write_run(tmp_path / f"runs/{seed}", seed=seed, returns=(0.0, last), full_action_space=False)
    ended = command("plot", tmp_path / "runs", "--out", tmp_path / "curves")
    assert ended.code == 0
    text = (tmp_path / "curves.md").read_text()
    row = cells(text, "Breakout-v5")
    assert row[2] == "3" and row[5] == "200 [100, 300]"
    score = human_normalised("Breakout-v5", 200)
    assert float(row[6]) == pytest.approx(score, abs=0.05)
    beside = cells(text[text.index("## Beside") :], "Breakout-v5")
    published = table()["Breakout-v5"]["cleanrl_ppo_1xA100_10cpu_return_mean"]
    assert beside[1] == f"200 ({score:.2f})" and f"{published:.4g}" in beside[6]
    assert "played by other rules: full_action_space=False" in text
    assert not (tmp_path / "curves_aggregates.png").exists()


def test_sixty_runs_of_ten_games_and_two_algorithms(tmp_path):
    rng = np.random.default_rng(0)
    games = list(table())[:10]
    finals = rng.gamma(2.0, 500.0, size=(2, 3, 10))
    for a, algorithm in enumerate(("impala", "ppo")):
        for seed in range(3):
            for g, env_id in enumerate(games):
                returns = np.linspace(0, finals[a, seed, g], 5)
                name = f"runs/{algorithm}/{env_id}/{seed}"
                write_run(tmp_path / name, returns, algorithm=algorithm, env_id=env_id, seed=seed)
    ended = command("plot", tmp_path / "runs", "--out", tmp_path / "curves")
    assert ended.code == 0 and not ended.err
    text = (tmp_path / "curves.md").read_text()
    part = text[text.index("## Aggregates over 10 games") :]
    for a, algorithm in enumerate(("impala", "ppo")):
        normal = np.array([[human_normalised(e, finals[a, s, g]) for g, e in enumerate(games)] for s in range(3)])
        ordered, per_game = np.sort(normal.ravel()), normal.mean(0)
        direct = [np.median(per_game), ordered[7:23].mean(), per_game.mean(), 1 - np.minimum(normal, 1).mean()]
        shown = [cell.replace("[", "").replace("]", "").replace(",", "").split() for cell in cells(part, algorithm)[1:]]
        assert [float(numbers[0]) for numbers in shown] == pytest.approx(direct, abs=0.0051)
        assert all(float(low) <= float(value) <= float(high) for value, low, high in shown)
    assert all(len(cells(part, name)) == 5 for name in LONG.systems.values())
    assert looks_drawn(tmp_path / "curves.png") and looks_drawn(tmp_path / "curves_aggregates.png")


def test_profiles_are_shares_and_games_not_played_by_all_are_left_out(capsys):
    scores = {"Pong-v5": 21.0, "Breakout-v5": 30.5, "Alien-v5": 7127.7}
    curves = [curve([1], [v], env_id=e, algorithm=a) for e, v in scores.items() for a in ("ppo", "impala")]
    found = aggregates(group(curves[:-1]))
    assert found is not None and found.games == ["Breakout-v5", "Pong-v5"]
    assert "not every variant has played Alien-v5" in capsys.readouterr().err
    profile = found.variants["ppo"].profile.value  # Breakout at 1.0, Pong at 1.18
    assert np.array_equal(
        profile, [sum(human_normalised(e, scores[e]) > t for e in found.games) / 2 for t in found.taus]
    )
    assert {0.0, 0.5, 1.0} == set(profile)


def test_runs_with_fewer_steps_are_named_though_they_have_finished(capsys):
    long, short = ([curve([n], [1.0], env_id=e, algorithm=a) for e in ("Pong-v5", "Alien-v5")]
                   for n, a in ((100, "ppo"), (10, "dqn")))  # fmt: skip
    finished = lambda curves: [c._replace(finished=True) for c in curves]
    assert aggregates(group(finished(long))) is not None and capsys.readouterr().err == ""
    aggregates(group(finished(long + short)))
    assert "run and others have made fewer steps than others on the same game" in capsys.readouterr().err


def test_published_medians_over_all_games_are_those_of_the_paper():
    games = group([curve([1], [0.0], env_id=env_id) for env_id in table()])
    found = aggregates(games)
    assert found is not None
    medians = {name: round(float(values[0]), 2) for name, values in found.systems.items()}
    assert medians["Cleanba PPO, 8 A100, 46 CPU"] == 1.36 and medians["moolib IMPALA, 1 A100, 10 CPU"] == 1.24


CLEANRLS = {
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "episodic_life": True,
    "max_episode_steps": 27_000,
    "env_options": ["noop_max=30"],
}


def test_runs_by_cleanrls_rules_are_compared_with_returns_after_ten_million_steps(tmp_path):
    games = group([curve([1], [0.0], env_id=env_id, **CLEANRLS) for env_id in table()])
    found = aggregates(games)
    assert found is not None and found.publication is SHORT
    assert round(float(found.systems["CleanRL PPO"][0]), 2) == 1.02  # as CleanRL's documentation gives it
    assert set(found.systems) == {"CleanRL PPO", "Baselines PPO2"}  # PQN is not published for all of them
    for seed, (env_id, rules) in enumerate([("Pong-v5", CLEANRLS), ("Alien-v5", CLEANRLS)]):
        write_run(tmp_path / f"runs/{seed}", env_id=env_id, **rules)
    assert command("plot", tmp_path / "runs", "--out", tmp_path / "curves").code == 0
    text = (tmp_path / "curves.md").read_text()
    assert "10 million steps" in text and "other rules" not in text
    assert "20.49" in text and cells(text[text.index("## Beside") :], "Alien-v5")[-1] == "–"


@pytest.mark.parametrize(
    "other",
    [{"episodic_life": False}, {"max_episode_steps": 500}, {"env_options": ["mode=1"]}, {"stands": "for nothing"}],
)
def test_runs_by_other_rules_are_compared_with_returns_after_fifty_million_steps(other):
    assert publication([CLEANRLS | {"env_options": ["stack_num=1"]}, CLEANRLS | other]) is (
        SHORT if "stands" in other else LONG
    )
    assert publication([CLEANRLS, {}]) is LONG


def test_presets_follow_the_rules_of_the_returns_that_they_are_compared_with():
    for typed, wanted in (({}, LONG), ({"preset": "cleanrl-atari"}, SHORT)):
        e = resolve(RECIPES["ppo"], {"env_id": "Pong-v5", **typed}, "cpu").experiment
        found = json.loads(json.dumps(asdict(e)))
        assert publication([found]) is wanted and wanted.other_rules([found]) == []


def test_if_there_are_too_many_variants_the_best_are_named(tmp_path):
    few = group([curve([1], [i], learning_rate=float(i)) for i in range(1, 13)])
    assert plot.best_variants(few) == [f"learning_rate={i}" for i in range(1, 13)]
    ranked = [curve([1, 2], [0, i], env_id=e, learning_rate=float(i)) for i in range(1, 41) for e in ("A", "B")]
    groups = group(ranked)
    assert plot.best_variants(groups) == [f"learning_rate={i}" for i in range(29, 41)]
    figure = plot.draw_curves(groups, "steps")
    assert "the other 28 variants" in " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    assert len(figure.axes[0].get_lines()) == 28 + 2 * 12  # each of the named has its crosses, if any


def test_aggregates_name_the_best_on_their_own_games(tmp_path):
    for i in range(50):
        write_run(tmp_path / f"runs/c{i}", [0.0, 500.0 - i], env_id="CartPole-v1", learning_rate=1e-3 + i)
    for rate, (pong, alien) in ((50.0, (20.0, 1.0)), (60.0, (1.0, 500.0))):
        write_run(tmp_path / f"runs/p{rate}", [0.0, pong], env_id="Pong-v5", learning_rate=rate)
        write_run(tmp_path / f"runs/a{rate}", [0.0, alien], env_id="Alien-v5", learning_rate=rate)
    ended = command("plot", tmp_path / "runs", "--out", tmp_path / "curves")
    assert ended.code == 0 and (tmp_path / "curves_aggregates.png").exists(), ended.err


@pytest.mark.parametrize(
    ("environments", "variants", "long"), [(1, 1, ""), (1, 12, ""), (2, 3, "word " * 60), (12, 4, "")]
)
def test_the_legend_covers_no_panel_and_stays_in_the_figure(environments, variants, long):
    runs = [
        curve([1, 2], [0, i + 1], env_id=f"E{e}", learning_rate=float(i), env_options=[long, str(i)])
        for e in range(environments)
        for i in range(variants)
    ]
    figure = plot.draw_curves(group(runs), "steps")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    texts = [*legend.get_texts(), *figure.texts]
    boxes = [text.get_window_extent() for text in texts]
    whole = figure.bbox
    assert all(box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= 0 for box in boxes)
    assert not any(box.overlaps(panel.get_tightbbox()) for box in boxes for panel in figure.axes if panel.get_visible())
    assert not figure.texts[0].get_window_extent().overlaps(legend.get_window_extent())


def test_lines_differ_in_more_than_colour():
    looks = [tuple(plot.look(i).values()) for i in range(56)]
    assert len(set(looks)) == 56
    assert len({look[1:] for look in looks[:4]}) == 4


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (10, (2, 5)), (57, (7, 9))])
def test_panels_fill_a_grid(count, grid):
    assert plot.grid_of(count) == grid
