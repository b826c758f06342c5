"""The page of `cleanba report`: complete, escaped, needing nothing but itself, and rendered by a browser."""

import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from launch import TINY, command
from matplotlib.figure import Figure
from PIL import Image

from cleanba.config import Experiment
from cleanba.environments.backends import env_spec
from cleanba.environments.published import published_return, table
from cleanba.runs import report
from cleanba.trust import mark_downloaded

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> & "quotes" $x^2_{$ </style></svg>'
VOID = {"meta", "br", "img", "link", "input"}


def write_run(folder: Path, rows: int = 40, **result) -> Path:
    folder.mkdir(parents=True)
    config = {
        "experiment": {
            "algorithm": "ppo",
            "env_id": "CartPole<i>-v1",
            "seed": 3,
            "total_timesteps": 123_456,
            "hiddens": [64, 32],
        },
        "placement": {"actor_device_ids": [0]},
        "run": {"exp_name": HOSTILE, "run_dir": None},
        "packages": {"jax": "0.10.2"},
        "device_kind": "NVIDIA something",
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {
            "update": i,
            "global_step": i * 1000,
            "seconds": 2.0 * i,
            "charts/SPS": 500.0,
            "charts/SPS_recent": 450.0 + i,
            "charts/episodic_return": float(i),
            "charts/episodic_length": 9.0,
            "charts/episodes": i,
            f"losses/value_loss{HOSTILE}": 1 / i,
            "losses/explained_variance": None,
            "charts/epsilon": 1 / i,
            "stats/lag_kl": 0.01,
            **({"eval/episodic_return": 2.0 * i, "eval/episodic_length": 5.0} if i % 10 == 0 else {}),
            "stats/rollout_time": 1.0,
            "stats/emulators_time": 0.5,
            "stats/inference_time": 0.25,
            "stats/params_wait_time": 0.25,
            "stats/learner_rollout_wait_time": 0.5,
            "stats/learner_update_time": 1.5,
            "stats/bottleneck": "learner" if i % 3 else HOSTILE,
        }
        for i in range(1, rows + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


class Page(HTMLParser):
    """What a page holds, if its tags are balanced."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = [], [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data):
        self.words.append(data)


def page_of(run: Path) -> tuple[str, Page]:
    ended = command("report", run)
    assert (ended.code, ended.err) == (0, "")
    text = (run / "report.html").read_text()
    return text, Page(text)


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.S)]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A run with everything: curves, an evaluation, a film, an error that says what it pleases."""
    run = write_run(tmp_path_factory.mktemp("runs") / "full", status="failed", global_step=40_000, error=HOSTILE)
    evaluation = {"mean": 321.5, "std": 2.0, "episodes": 30, "update": 40, "seed": 1, "human_normalised_score": None}
    evaluation |= {"greedy": True, "epsilon": 0.05}
    (run / "eval.json").write_text(json.dumps(evaluation))
    (run / "videos").mkdir()
    frames = np.random.default_rng(0).integers(0, 255, (8, 64, 64, 3), np.uint8)
    imageio.mimsave(run / "videos/film.mp4", list(frames), fps=10)
    return run


def test_the_page_has_every_part(full):
    text, page = page_of(full)
    words = " ".join(page.words)
    for expected in (
        *("ppo on CartPole<i>-v1, seed 3", "failed", "executed steps 40,000", "Learning", "Evaluation", "321.5"),
        *(
            "last 100 episodes",
            "greedy actions, random with probability 0.05",
            "evaluation",
            "Throughput",
            "Losses",
            "64, 32",
            "actor_device_ids",
            "jax",
            "0.10.2",
            "NVIDIA something",
            "0:01:20",
        ),
    ):
        assert expected in words
    assert page.tags.count("svg") == len(svgs(text)) == 9
    # Return, length, speed, actors, learner, bottleneck, a loss, and these two.
    assert "epsilon" in words and "lag_kl" in words
    (film,) = [value for tag, name, value in page.attributes if (tag, name) == ("video", "src")]
    assert film.startswith("data:video/mp4;base64,") and len(film) > 1000


def test_the_page_needs_nothing_but_itself(full):
    text, page = page_of(full)
    assert not {"script", "link", "iframe", "img", "object", "base", "foreignobject"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for _, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "poster"):
            assert value.startswith(("data:", "#"))
    assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?([^)'\"]*)", text))
    assert "@import" not in text
    policy = next(value for tag, name, value in page.attributes if name == "content")
    assert policy.startswith("default-src 'none'")


def test_everything_a_run_logs_is_escaped_text(full):
    text, page = page_of(full)
    assert HOSTILE not in text and "<script" not in text
    assert sum(HOSTILE.split("/")[-1] in words or "alert(1)" in words for words in page.words) >= 3  # as words only
    assert HOSTILE in "".join(page.words)


def test_figures_take_their_colours_from_the_style(full):
    text, _ = page_of(full)
    assert not re.search(r"#0[12]0[12]0[12]|#0000f\d", text)
    assert "var(--line0)" in text and "currentColor" in text
    assert text.count("--line0:") == 3  # light, dark and printed


def test_curves_are_drawn_where_the_numbers_are():
    heights = []
    for values in ([0.0, 1.0, 2.0], [2.0, 1.0, 0.0]):
        drawn = ET.fromstring(report.lines(np.arange(3.0), {"": np.array(values)}, "x"))
        (path,) = [e for e in drawn.iter() if e.tag.endswith("path") and "var(--line0)" in e.get("style", "")]
        points = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d"))]
        assert len(points) == 3 and points[0][0] < points[1][0] < points[2][0]
        heights.append([y for _, y in points])
    assert heights[0] == heights[1][::-1] and heights[0][0] > heights[0][2]  # SVG's y points down


@pytest.mark.parametrize(
    "names, rows",
    [
        (("overall", "since the previous log point"), 1),
        (("emulators and inference in one scan", "transfer", "waiting for parameters"), 2),
        (("a name that is nearly as long as the figure is wide, and then some", "another"), 2),
    ],
)
def test_legends_are_whole(names, rows):
    drawn = Figure(figsize=(4.4, 2.3), layout="constrained")
    panel = drawn.subplots()
    for name in names:
        panel.plot([0, 1], [0, 1], label=name)
    report.add_legend(drawn)
    drawn.savefig(io.BytesIO())  # which lays it out
    (legend,) = drawn.legends
    where = legend.get_window_extent()
    assert where.x0 >= 0 and where.x1 <= drawn.bbox.width
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == rows


def test_numbers_that_are_missing_leave_a_gap_and_nothing_draws_nothing():
    nan = float("nan")
    assert report.lines(np.arange(2.0), {"": np.array([nan, nan])}, "x") == ""
    assert "path" in report.lines(np.arange(3.0), {"": np.array([nan, 1.0, nan])}, "x")
    assert report.stack(np.arange(1.0), {"a": np.ones(1)}, "x") == ""


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_run_that_has_hardly_begun(tmp_path, rows):
    text, page = page_of(write_run(tmp_path / "run", rows=rows))
    words = " ".join(page.words)
    assert "unfinished" in words and "Not evaluated yet" in words
    assert ("No episode has ended yet" in words) == (rows == 0)
    assert bool(svgs(text)) == (rows > 0)


def test_a_run_without_metrics_and_with_damaged_ones(tmp_path):
    run = write_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + '{"update": 41, "glo')
    (run / "result.json").write_text('{"status": "fini')
    ended = command("report", run, "--out", tmp_path / "deep/er/page.html")
    assert ended.code == 0 and "damaged line is left out: number 41" in ended.err
    assert "unfinished" in (tmp_path / "deep/er/page.html").read_text()
    path.unlink()
    assert "Nothing is logged yet" in page_of(run)[0]


def test_an_evaluation_of_another_run_and_numbers_of_any_kind_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", params_digest="sha256:a", seconds="x")
    path = run / "metrics.jsonl"
    text = path.read_text()
    for number, huge in (("2.0", "1e308"), ("3.0", "-1e308")):
        text = text.replace(f'"charts/episodic_return": {number}', f'"charts/episodic_return": {huge}')
    path.write_text(text)
    shown = lambda: "Not evaluated" not in " ".join(page_of(run)[1].words)
    for digest in ("sha256:a", "sha256:b"):
        (run / "eval.json").write_text(json.dumps({"mean": 434.0, "params_digest": digest}))
        assert shown()
    mark_downloaded(run, "x.tar.gz")
    assert not shown() and "Not evaluated here yet" in " ".join(page_of(run)[1].words)
    (run / "eval.json").write_text(json.dumps({"mean": 434.0, "params_digest": "sha256:a"}))
    assert shown()


def test_a_film_of_another_run_is_left_out(tmp_path):
    """An archive or a repository whose model has changed leaves the films of the model before in its folder."""
    run = write_run(tmp_path / "run", params_digest="sha256:a")
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos/model-seed-1.mp4").write_bytes(b"film")
    films = lambda: page_of(run)[0].count("<video ")
    assert films() == 1
    mark_downloaded(run, "x.tar.gz")
    result = {"mean": 434.0, "params_digest": "sha256:a"}
    for video, shown in ((None, 0), ("videos/model-seed-2.mp4", 0), ("videos/model-seed-1.mp4", 1)):
        (run / "eval.json").write_text(json.dumps(result | {"video": video}))
        assert films() == shown


def test_no_run_is_one_sentence(tmp_path):
    ended = command("report", tmp_path)
    assert ended.code == 2 and "name the directory of an earlier run" in ended.err and "Traceback" not in ended.err


def test_a_run_of_this_version_fills_the_page(tmp_path):
    assert command("ppo", *TINY, "--run-dir", tmp_path / "run").code == 0
    text, page = page_of(tmp_path / "run")
    words = " ".join(page.words)
    for expected in ("finished", "sha256:", "entropy", "value_loss", "learning_rate", "emulators", "update", "jaxlib"):
        assert expected in words
    assert len(svgs(text)) >= 12


@pytest.mark.parametrize("words", [["training, last 100 episodes", "evaluation", "x" * 30], ["y" * 90], ["z" * 40] * 5])
def test_legends_are_never_cut_off(words):
    drawn = Figure(figsize=(4.4, 2.3), layout="constrained")
    panel = drawn.subplots()
    for word in words:
        panel.plot([0, 1], label=word)
    report.add_legend(drawn)
    drawn.draw_without_rendering()
    box, whole = drawn.legends[0].get_window_extent(), drawn.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1 + 1


def test_published_returns_have_the_time_limits_of_the_environments():
    prefix = lambda name: "gymnax:" if name.endswith("MinAtar") else ""
    version = lambda name: {"CartPole": "-v1", "Acrobot": "-v1", "MountainCar": "-v0"}.get(name, "-v5")
    for (_, name), found in table().items():
        if found.time_limit:
            env_id = f"{prefix(name)}{name}{'' if prefix(name) else version(name)}"
            assert env_spec(Experiment(env_id=env_id)).time_limit == found.time_limit, name


def test_a_published_return_is_a_line_where_it_does_not_flatten_the_curve(tmp_path):
    run_dir = write_run(tmp_path / "run", rows=40)
    config = json.loads((run_dir / "config.json").read_text())
    rows = (run_dir / "metrics.jsonl").read_text()

    def shown(algorithm: str, env_id: str, scale: float = 1.0) -> str:
        config["experiment"] |= {"algorithm": algorithm, "env_id": env_id}
        (run_dir / "config.json").write_text(json.dumps(config))
        grown = [json.loads(row) for row in rows.splitlines()]
        for row in grown:
            row["charts/episodic_return"] *= scale
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in grown))
        return page_of(run_dir)[0]

    published = {"algorithm": "dqn", "env_id": "Breakout-v5", "episodic_life": True, "repeat_action_probability": 0.0}
    assert published_return({"algorithm": "ppo", "env_id": "HalfCheetah-v5"}) is not None
    for other in ({"env_id": "my_package:HalfCheetah-v5"}, {"env_wrappers": ["a:b"]}, {"env_options": ["a=1"]}):
        assert published_return({"algorithm": "ppo", "env_id": "HalfCheetah-v5"} | other) is None
    assert (
        published_return(published).system == "CleanRL"
        and published_return(published | {"repeat_action_probability": 0.25}) is None
    )
    assert published_return(published | {"env_options": ["noop_max=30"]}) == published_return(published)
    pole = {"algorithm": "pqn", "env_id": "CartPole-v1"}
    assert published_return(pole).value == published_return(pole | {"max_episode_steps": 500}).value == 495.13
    changes = ({"max_episode_steps": 100}, {"env_id": "CartPole-v0", "max_episode_steps": 200}, {"core": "lstm"})
    assert [published_return(pole | change) for change in changes] == [None] * 3
    assert ">CleanRL, 1M steps</text>" in shown("sac", "Hopper-v5", 50)  # from 50 to 2,000; published are 2,310
    assert "return (CleanRL, 1M steps: 2,310)" in shown("sac", "Hopper-v5", 5)  # up to 200
    assert ">gymnax, 10M steps</text>" in shown("ppo", "gymnax:Breakout-MinAtar")
    assert "50M steps" in shown("ppo", "Breakout-v5") and "10M steps" in shown("dqn", "Breakout-v5")
    assert "M steps" not in shown("ppo", "my_package:Breakout2-v5")
    config["experiment"] |= {"full_action_space": False}  # a rule that no published PPO played by
    assert "M steps" not in shown("ppo", "Breakout-v5") and "M steps" in shown("sac", "Hopper-v5")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(page: Path, out: Path, *flags: str) -> tuple[np.ndarray, str]:
    """A picture [H, W, 3] of a page in a browser without a network, and what the browser's console says."""
    ended = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--window-size=1000,3200",
            ),
            *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"),
            *(f"--user-data-dir={out.parent / 'profile'}", f"--screenshot={out}", *flags, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    console = "\n".join(line for line in ended.stderr.splitlines() if "CONSOLE" in line)
    return np.asarray(Image.open(out).convert("RGB")).astype(int), console


def share(picture: np.ndarray, colour: str) -> float:
    """The share of a picture that has about this colour."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((abs(picture - rgb).max(-1) < 12).mean())


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_renders_the_page_in_light_and_dark(full, tmp_path):
    page_of(full)
    light, console = browse(full / "report.html", tmp_path / "light.png")
    assert console == ""
    assert share(light, "#ffffff") > 0.3 and share(light, "#0a5fa8") > 0.0005  # paper, lines of the first colour
    dark, console = browse(full / "report.html", tmp_path / "dark.png", "--blink-settings=preferredColorScheme=0")
    assert console == ""
    assert share(dark, "#14161a") > 0.3 and share(dark, "#5aa9ee") > 0.0005
    rows = (light < 240).any((1, 2))
    assert rows.nonzero()[0][-1] > 1200  # the page goes on that far down


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_the_browser_would_complain(tmp_path):
    page = tmp_path / "page.html"
    text = "<!DOCTYPE html><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    page.write_text(text + "<img src='https://example.com/x.png'>")
    assert "Content Security Policy" in browse(page, tmp_path / "page.png")[1]


def test_a_folder_of_runs_is_referred_to_plot(tmp_path):
    write_run(tmp_path / "sweep" / "a")
    ended = command("report", tmp_path / "sweep")
    assert (
        ended.code == 2 and "is a folder of runs; name one of them, or draw all of them with `cleanba plot" in ended.err
    )
