"""`cleanba report RUN_DIR`: one self-contained HTML page about a run.

The page holds its style, its figures (SVG) and the newest film of the run.  It runs no script, and its security policy
forbids it to fetch anything.  Figures take their colours from the style, so they follow the reader's theme, light or
dark.
"""

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from cleanba.arguments import parse_command
from cleanba.config import read_config, read_experiment, require
from cleanba.environments.published import PublishedReturn, published_return
from cleanba.errors import Exit
from cleanba.files import METRICS, Json, optional_json, require_name, write_whole
from cleanba.recipes import Play
from cleanba.runs import log
from cleanba.runs.curves import column, is_number, read_rows
from cleanba.runs.directory import films_of, holds_runs, unwritable
from cleanba.runs.remote import find_run
from cleanba.runtime.metrics import duration
from cleanba.trust import source_of

if TYPE_CHECKING:  # drawing takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_FILM = 64 * 2**20  # bytes; browsers are slow with larger pages

Rows = Sequence[Json]

# Placeholders that no figure uses otherwise.  The page replaces them by the colours of its style.
INK, FAINT = "#010101", "#020202"
LINES = tuple(f"#0000f{i}" for i in range(6))
STYLED = {INK: "currentColor", FAINT: "var(--faint)"} | {c: f"var(--line{i})" for i, c in enumerate(LINES)}
DASHES = ("-", "--", ":", "-.")

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e21; --dim: #5c6268; --faint: #d9dce0; --card: #f5f6f8;
  --line0: #0a5fa8; --line1: #d0601a; --line2: #17936b; --line3: #b05a92; --line4: #7fb8e6; --line5: #c9ccd1; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #e6e8ea; --dim: #9aa1a8; --faint: #363b42;
  --card: #1d2025; --line0: #5aa9ee; --line1: #f08a45; --line2: #3fc296; --line3: #dc8bc0; --line4: #2f6aa0;
  --line5: #555b63; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 66rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, figcaption { color: var(--dim); margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
.facts, .figures { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
.two { grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); } .one { grid-template-columns: 1fr; }
.facts div, figure { background: var(--card); border-radius: 6px; padding: .6rem .8rem; margin: 0; }
.facts b { display: block; font-size: 1.2rem; overflow-wrap: anywhere; } .facts span { color: var(--dim); }
figcaption { margin: 0 0 .3rem; color: var(--ink); } figure svg, video { width: 100%; height: auto; display: block; }
.error { border-left: 4px solid var(--line1); padding-left: .8rem; color: var(--ink); white-space: pre-wrap; }
.tables { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
table { border-collapse: collapse; width: 100%; } td, th { padding: .12rem .5rem .12rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; }
th { font-weight: normal; color: var(--dim); } code { font-size: .85em; }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --dim: #444; --faint: #ccc; --card: #fff;
  --line0: #0a5fa8; --line1: #d0601a; --line2: #17936b; --line3: #b05a92; --line4: #7fb8e6; --line5: #c9ccd1; }
  body { font-size: 9pt; margin: 0; max-width: none; } h2 { break-after: avoid; } .film { display: none; }
  .two { grid-template-columns: 1fr 1fr; } .figures:not(.two):not(.one) { grid-template-columns: 1fr 1fr 1fr; }
  .facts { grid-template-columns: repeat(4, 1fr); } .facts b { font-size: 11pt; }
  figure, .facts div, tr { break-inside: avoid; } figure { border: 1px solid var(--faint); } }
"""
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Flags:
    """Write one HTML page about a run: configuration, curves, throughput, evaluation, film, packages and hardware."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run, which may still be training; an archive, or hf://USER/REPOSITORY"""
    out: Path | None = None
    """where to write (default: report.html in the run)"""


def report_command(argv: Sequence[str]) -> Exit:
    """`cleanba report`."""
    flags = parse_command(Flags, argv, "report")
    run_dir = find_run(flags.run_dir, model=False)
    out = flags.out or run_dir / "report.html"
    require_name(out, "report.html")
    require(
        not holds_runs(run_dir),
        f"{run_dir} is a folder of runs; name one of them, or draw all of them with `cleanba plot {run_dir}`",
    )
    text = page(run_dir)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as error:
        raise unwritable(out, error, "--out") from None
    print(f"wrote {out}")
    return Exit()


def page(run_dir: Path) -> str:
    """The whole page.

    Raises:
        UsageError: there is no such run.
    """
    experiment, config = read_experiment(run_dir), read_config(run_dir)
    rows = read_rows(run_dir) if (run_dir / METRICS).exists() else []
    result = log.read_result(run_dir)
    e = dict(experiment)
    title = f"{e.pop('algorithm')} on {e.get('env_id')}, seed {e.get('seed')}"
    machine = {k: v for k, v in config.items() if k not in ("experiment", "placement", "run", "packages")}
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(str(run_dir))}</p>",
        overview(result, rows, experiment),
        section("Learning", learning(rows, published_return(experiment))),
        section(
            "Evaluation", evaluation(run_dir, of_this_run(run_dir, optional_json(run_dir / "eval.json"), result, rows))
        ),
        section("Throughput", throughput(rows)),
        section("Losses", losses(rows)),
        section(
            "Configuration",
            tables(
                ("experiment: what is trained", experiment),
                ("placement: where it runs", config.get("placement", {})),
                ("run: what is kept of it", config.get("run", {})),
            ),
        ),
        section("Packages and hardware", tables(("packages", config.get("packages", {})), ("machine", machine))),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style></head>\n<body>\n{''.join(parts)}\n</body></html>\n"
    )


# Parts of the page


def section(title: str, content: str) -> str:
    """A part with its heading."""
    return f"\n<section><h2>{escape(title)}</h2>\n{content}</section>"


def shown(value: object) -> str:
    """A value as text: numbers with thousands separators, lists by their elements."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    return str(value)


def tables(*named: tuple[str, Json]) -> str:
    """Dictionaries as tables of two columns, side by side."""
    row = lambda k, v: f"<tr><th>{escape(k)}</th><td>{escape(shown(v))}</td></tr>"
    table = lambda name, values: (
        f"<div><p>{escape(name)}</p><table>{''.join(row(k, v) for k, v in values.items())}</table></div>"
    )
    return f'<div class="tables">{"".join(table(name, values) for name, values in named)}</div>'


def facts(values: Iterable[tuple[str, object]]) -> str:
    """A row of key figures."""
    cells = (f"<div><span>{escape(name)}</span><b>{escape(shown(value))}</b></div>" for name, value in values)
    return f'<div class="facts">{"".join(cells)}</div>'


def overview(result: Json, rows: Rows, experiment: Json) -> str:
    """The status and progress of the run, from result.json or, if there is none, from the last log point."""
    last = log.together(rows)
    known = lambda name, metric: result.get(name, last.get(metric))
    steps, planned = known("global_step", "global_step"), experiment.get("total_timesteps")
    words = facts(
        [
            ("status", result.get("status", "unfinished")),
            ("executed steps", steps),
            ("steps asked for, including those that only reset an environment", planned),
            ("return, last 100 episodes", known("episodic_return", "charts/episodic_return")),
            ("episodes", known("episodes", "charts/episodes")),
            ("steps per second", known("sps", "charts/SPS")),
            ("time", duration(seconds) if is_number(seconds := known("seconds", "seconds")) else None),
        ]
    )
    error = f'<p class="error">{escape(str(result["error"]))}</p>' if "error" in result else ""
    named = {"parameters": result.get("params_digest"), "state and memory": result.get("learner_digest")}
    digests = (f"<p>{what} <code>{escape(str(digest))}</code></p>" for what, digest in named.items() if digest)
    return words + error + "".join(digests)


def learning(rows: Rows, published: PublishedReturn | None) -> str:
    """Return and length over the steps, in training and in periodic evaluations; a line for the published return."""
    drawn = []
    for caption, name in (("return", "episodic_return"), ("episode length, steps", "episodic_length")):
        named = {
            "training, last 100 episodes": column(rows, f"charts/{name}"),
            "evaluation": column(rows, f"eval/{name}"),
        }
        levels = {}
        if published is not None and name == "episodic_return":
            if in_reach(published.value, list(named.values())):
                levels[published.in_words()] = published.value
            else:
                caption += f" ({published.in_words()}: {published.value:,.4g})"
        drawn.append(figure(caption, lines(column(rows, "global_step"), named, STEPS, levels=levels)))
    return figures(drawn, "No episode has ended yet.", "two")


def in_reach(level: float, curves: Sequence[np.ndarray]) -> bool:
    """Whether a panel that shows a line at this level leaves at least a third of its height to the curves [N]."""
    values = np.concatenate(curves) if curves else np.zeros(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return False
    low, high = values.min(), values.max()
    return low - (high - low) <= level <= high + 2 * (high - low)


def losses(rows: Rows) -> str:
    """Small figures of the losses, the schedules, and the distance between the policy that acted and the newest."""
    logged = {name for row in rows for name in row}
    names = sorted(name for name in logged if name.startswith("losses/"))
    names += sorted(logged & {"charts/learning_rate", "charts/epsilon", "charts/policy_lr", "charts/q_lr"})
    names += sorted(name for name in logged if name.startswith("stats/lag_") or name == "stats/policy_lag")
    steps = column(rows, "global_step")
    drawn = [figure(name.split("/", 1)[1], lines(steps, {"": column(rows, name)}, STEPS)) for name in names]
    return figures(drawn, "Nothing is logged yet.")


def throughput(rows: Rows) -> str:
    """Steps per second, how actors and learner spend their time, and the bottleneck, over wall time."""
    rows = [row for row in rows if "stats/rollout_time" in row]
    hours = column(rows, "seconds") / 3600
    scale, unit = (1.0, "hours") if len(rows) and hours[-1] > 2 else (60.0, "minutes")
    time, axis = hours * scale, f"wall time, {unit}"
    speeds = {"overall": column(rows, "charts/SPS"), "since the previous log point": column(rows, "charts/SPS_recent")}
    drawn = [figure("environment steps per second", lines(time, speeds, axis, from_zero=True))]

    rollout = column(rows, "stats/rollout_time")
    words = {
        "emulators": "emulators",
        "inference": "inference",
        "scan": "emulators and inference in one scan",
        "transfer": "transfer",
        "params_wait": "waiting for parameters",
    }
    shares = {word: column(rows, f"stats/{name}_time") / rollout for name, word in words.items()}
    drawn.append(figure("what the actors spend their time on", stack(time, shares, axis)))
    if len(rows) > 1:
        interval = np.diff(column(rows, "seconds"), prepend=0.0)
        interval[interval <= 0] = np.nan
        words = {"rollout_wait": "waiting for rollouts", "update": "update"}
        shares = {word: column(rows, f"stats/learner_{name}_time") / interval for name, word in words.items()}
        drawn.append(figure("what the learner spends its time on", stack(time, shares, axis)))
    drawn.append(figure("bottleneck: the part that limits the speed of the whole", bottlenecks(rows, time, axis)))
    return figures(drawn, "Nothing is logged yet.", "two")


def of_this_run(run_dir: Path, evaluated: Json, result: Json, rows: Rows) -> Json:
    """An evaluation, unless it is of another run that was unpacked or downloaded to the same folder before."""
    digests = [row.get("params_digest") for row in (result, *rows)]
    foreign = source_of(run_dir) is not None
    return {} if foreign and evaluated.get("params_digest") not in digests else evaluated


def evaluation(run_dir: Path, result: Json) -> str:
    """The results of `cleanba eval`, and the newest film."""
    parts = []
    if result:
        names = ["mean", "std", "median", "min", "max", "mean_length", "episodes", "human_normalised_score"]
        names += ["truncated"] * bool(result.get("truncated"))
        parts.append(facts((name.replace("_", " "), result[name]) for name in names if result.get(name) is not None))
        by = Play(bool(result.get("greedy")), result.get("epsilon") or 0.0).in_words()
        update = f"after update {shown(result['update'])}, " if result.get("update") is not None else ""
        parts.append(f"<p>{escape(update)}{by}, seed {escape(shown(result.get('seed')))}</p>")
    foreign = source_of(run_dir) is not None
    films = films_of(run_dir)
    if foreign:  # its folder may hold films of a run that was unpacked or downloaded there before
        films = [path for path in films if path.relative_to(run_dir).as_posix() == result.get("video")]
    if films:
        parts.append(film(films[-1]))
    here = " here" if foreign else ""
    return "".join(parts) or f"<p>Not evaluated{here} yet: <code>cleanba eval</code> does it; --video adds a film.</p>"


def film(path: Path) -> str:
    """A film, embedded."""
    size = path.stat().st_size
    if size > LARGEST_FILM:
        return f"<p>{escape(path.name)} is too large to be shown here ({size / 2**20:.0f} MiB).</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    source = f"data:video/mp4;base64,{data}"
    return (
        f'<div class="figures one film"><figure><figcaption>{escape(path.name)}</figcaption>'
        f'<video controls loop muted preload="metadata" src="{source}"></video></figure></div>'
    )


def figures(drawn: Sequence[str], otherwise: str, size: str = "") -> str:
    """Figures side by side, in a size that the style names; the sentence `otherwise` if there are none."""
    there = "".join(drawn)
    return f'<div class="figures {size}">{there}</div>' if there else f"<p>{escape(otherwise)}</p>"


def figure(caption: str, svg: str) -> str:
    """A figure with its caption, or nothing."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" if svg else ""


# Figures

STEPS = "environment steps"


def lines(
    x: np.ndarray,
    named: dict[str, np.ndarray],
    axis: str,
    from_zero: bool = False,
    levels: Mapping[str, float] | None = None,
) -> str:
    """Lines over x [N] as SVG, with horizontal lines at `levels`; "" if the lines hold no number."""
    named = {name: y for name, y in named.items() if np.isfinite(y).any()}
    if not named:
        return ""

    def draw(panel: "Axes") -> None:
        for i, (name, y) in enumerate(named.items()):
            there = np.isfinite(y)
            dot = "o" if there.sum() == 1 else ""
            panel.plot(
                x[there], y[there], DASHES[i], marker=dot, markersize=4, color=LINES[i], linewidth=1.3, label=name
            )
        for name, level in (levels or {}).items():
            panel.axhline(level, color=INK, linestyle=(0, (5, 3)), linewidth=0.9, label=name)
        if from_zero:
            panel.set_ylim(bottom=0)

    return svg(draw, axis, legend=list(named) != [""])


def stack(x: np.ndarray, named: dict[str, np.ndarray], axis: str) -> str:
    """Shares of a whole over x [N], stacked, as SVG; "" if there are fewer than two points."""
    named = {name: np.clip(y, 0, 1) for name, y in named.items() if np.nanmax(y, initial=0.0) > 0}
    there = np.isfinite(np.array([*named.values()])).all(0) if named else np.zeros(0, bool)
    if there.sum() < 2:
        return ""

    def draw(panel: "Axes") -> None:
        ys = [y[there] for y in named.values()]
        panel.stackplot(x[there], ys, labels=list(named), colors=LINES, edgecolor=INK, linewidth=0.25)
        panel.set_ylim(0, 1)
        panel.set_xlim(x[there][0], x[there][-1])
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")

    return svg(draw, axis, legend=True)


def bottlenecks(rows: Rows, time: np.ndarray, axis: str) -> str:
    """A bar for every interval between log points, in the row of its bottleneck, as SVG; time [N]."""
    said = [(i, str(row["stats/bottleneck"])) for i, row in enumerate(rows) if row.get("stats/bottleneck")]
    if not said:
        return ""
    names = sorted({name for _, name in said})

    def draw(panel: "Axes") -> None:
        for y, name in enumerate(names):
            bars = [(time[i - 1] if i else 0.0, time[i] - (time[i - 1] if i else 0.0)) for i, n in said if n == name]
            panel.broken_barh(bars, (y - 0.4, 0.8), color=LINES[y % len(LINES)], linewidth=0.6)
        panel.set_yticks(range(len(names)), [name.split(" (")[0][:24] for name in names])
        panel.set_ylim(-0.7, len(names) - 0.3)
        panel.set_xlim(0, time[-1])

    return svg(draw, axis, height=0.7 + 0.3 * len(names))


def add_legend(drawn: "Figure") -> None:
    """Add a legend above the panel, in as few rows as fit the width, with room for a reader's wider font."""
    for columns, size in ((3, 7.5), (2, 7.5), (1, 7.5), (1, 6.0), (1, 5.0)):
        legend = drawn.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize=size)
        if size == 5.0 or legend.get_window_extent().width <= 0.9 * drawn.bbox.width:
            return
        legend.remove()


def svg(draw: "Callable[[Axes], None]", axis: str, legend: bool = False, height: float = 2.3) -> str:
    """What `draw(panel)` draws, as an SVG element in the colours of the page."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "cleanba",
        "text.parse_math": False,
        "font.size": 8,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK),
        **{"grid.color": FAINT, "axes.grid": True, "grid.linewidth": 0.6, "axes.axisbelow": True},
        **{"axes.spines.top": False, "axes.spines.right": False},
    }
    out = io.StringIO()
    with matplotlib.rc_context(settings):
        drawn = Figure(figsize=(4.4, height), layout="constrained")
        drawn.patch.set_visible(False)
        panel = drawn.subplots()
        panel.patch.set_visible(False)
        draw(panel)
        panel.set_xlabel(axis)
        panel.locator_params(axis="x", nbins=6)
        if axis == STEPS:
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        if legend:
            add_legend(drawn)
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for colour, style in STYLED.items():
        text = text.replace(colour, style)
    return text
