"""`cleanba plot RUNS…`: learning curves over steps and over wall time; over several Atari games, aggregates as well.

docs/guides/plots.md, and a line below each figure, explain the lines, bands and scores.
"""

import csv
import io
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from cleanba.arguments import parse_command
from cleanba.config import require
from cleanba.environments.atari_scores import human_normalised, publication, reference
from cleanba.errors import Exit, printable
from cleanba.files import Json, require_name, write_whole
from cleanba.runs.aggregates import STATISTICS, Aggregates, aggregates, experiments
from cleanba.runs.curves import RETURN, Groups, Interval, band, group, load, mean_interval, stopped_early, variants_of
from cleanba.runs.directory import unwritable
from cleanba.runs.remote import find_run

if TYPE_CHECKING:  # drawing takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION = (
    "Line: mean over seeds. Band: 95% interval of that mean, from 2,000 bootstrap resamples of the seeds (none for one "
    "seed). "
)
RETURNS = "A point is the mean return of the last 100 training episodes; no other smoothing."
MOST_NAMED = 12  # variants with a colour and a name of their own; more could not be told apart
OTHERS = " Grey: the other {} variants, whose last values are lower; the table has them all."
GREY = {"color": "0.72", "linestyle": "-", "marker": ""}
EARLY = " ✕: a run ended early there, and the others continue without it."

# Okabe and Ito's palette, safe for colour-blind readers; styles and markers tell lines apart in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Flags:
    """Draw the learning curves of runs, and for several Atari games their aggregate scores beside published ones."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS ...")]
    """run directories, folders that hold runs at any depth, archives of runs, or hf://USER/REPOSITORY"""
    metric: str = RETURN
    """what to draw: any metric of the logs, such as eval/episodic_return or losses/entropy"""
    out: Path | None = None
    """where to write, without a suffix (default: plots/curves in the folder of the runs; plots/METRIC for another
    metric): NAME.png, NAME_time.png, NAME_aggregates.png, each as SVG too, NAME.md, and all points as NAME.csv"""


def plot_command(argv: Sequence[str]) -> Exit:
    """`cleanba plot`."""
    import matplotlib

    flags = parse_command(Flags, argv, "plot")
    require(bool(flags.runs), "plot needs runs to draw; name run directories, or a folder that holds some")
    if flags.out is not None:
        require_name(flags.out, "plots/curves")
    places = [find_run(run, model=False) for run in flags.runs]
    groups = group(load(places, flags.metric))
    returns = flags.metric == RETURN
    over_games = aggregates(groups) if returns else None
    text = tables(groups, over_games) if returns else final_values(groups, flags.metric)
    print(printable(text, keep="\n"))
    out = flags.out or beside(places, "curves" if returns else flags.metric.replace("/", "-"))
    out = out.with_suffix("") if out.suffix in (".png", ".svg", ".md", ".csv") else out
    named = lambda ending: out.with_name(out.name + ending)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(named(".md"), text)
        write_whole(named(".csv"), points(groups))
        written = [named(".md"), named(".csv")]
        with matplotlib.rc_context({"text.parse_math": False}):  # names may hold a $
            written += save(draw_curves(groups, "steps", flags.metric), out)
            written += save(draw_curves(groups, "seconds", flags.metric), named("_time"))
            if over_games is not None:
                names = best_variants({env_id: groups[env_id] for env_id in over_games.games})
                written += save(draw_aggregates(over_games, names), named("_aggregates"))
    except OSError as error:
        raise unwritable(out, error, "--out") from None
    print("\n".join(f"wrote {path}" for path in written))
    return Exit()


def beside(places: Sequence[Path], name: str = "curves") -> Path:
    """The default path of figures: in the folder that holds all these places, or else in the first place."""
    whole = [os.path.abspath(place) for place in places]
    common = Path(os.path.commonpath(whole))
    folder = places[0] if len(places) == 1 else Path(os.path.relpath(common)) if common != Path("/") else places[0]
    return folder / "plots" / name


def points(groups: Groups) -> str:
    """All points of the curves, as CSV."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["env_id", "variant", "seed", "global_step", "seconds", "value"])
    for env_id, variants in groups.items():
        for name, curves in variants.items():
            for c in curves:
                rows = zip(c.steps.tolist(), c.seconds.tolist(), c.returns.tolist(), strict=True)
                lines.writerows([env_id, name, c.experiment["seed"], int(step), *rest] for step, *rest in rows)
    return text.getvalue()


# Tables


def number(x: float) -> str:
    """A number with four significant digits; from 1,000 on, as a whole number."""
    if not math.isfinite(x):
        return "–"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def with_interval(i: Interval, shown: Callable[[float], str] = number) -> str:
    """A number, and its interval if there is one."""
    return shown(i.value) + (f" [{shown(i.low)}, {shown(i.high)}]" if math.isfinite(i.low) else "")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table with aligned columns.  The first `texts` columns hold text, the others numbers."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]
    lines.insert(1, ["-" * w if i < texts else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    pad = lambda i, cell: cell.ljust(widths[i]) if i < texts else cell.rjust(widths[i])
    return "".join(f"| {' | '.join(pad(i, cell) for i, cell in enumerate(line))} |\n" for line in lines)


def span(values: Iterable[float], scale: float = 1.0) -> str:
    """A range, such as "3 to 5"; a single number if all are equal."""
    low, high = min(shown := [v / scale for v in values]), max(shown)
    return number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"


def final_rows(groups: Groups) -> Iterator[list[str]]:
    """The final return of every environment and variant."""
    for env_id, variants in groups.items():
        for name, curves in variants.items():
            result = mean_interval([c.returns[-1] for c in curves])
            score = human_normalised(env_id, result.value)
            early = sum(stopped_early(c, [c for them in variants.values() for c in them]) for c in curves)
            yield [
                env_id,
                name,
                f"{len(curves)}" + (f" ({early} ended early)" if early else ""),
                span(c.steps[-1] for c in curves),
                span((c.seconds[-1] for c in curves), 60),
                with_interval(result),
                "–" if score is None else f"{score:.3g}",
            ]


def final_values(groups: Groups, metric: str) -> str:
    """The last values of a metric that is no return, as Markdown."""
    head = ("environment", "variant", "seeds", "steps", "minutes", metric)
    return "\n".join(
        [
            "## Final values\n",
            f"Mean over seeds of the last `{metric}`, with its 95% bootstrap interval.\n",
            markdown(head, (row[:-1] for row in final_rows(groups)), texts=2),
        ]
    )


def tables(groups: Groups, over_games: Aggregates | None) -> str:
    """The numbers behind the figures, as Markdown."""
    head = ("environment", "variant", "seeds", "steps", "minutes", "return", "human-normalised")
    parts = [
        "## Final returns\n",
        "Mean over seeds of the mean return of the last 100 training episodes, with its 95% bootstrap interval.\n",
        markdown(head, final_rows(groups), texts=2),
    ]
    games = [env_id for env_id in groups if reference(env_id) is not None]
    if games:
        names = variants_of({env_id: groups[env_id] for env_id in games})

        def cell(env_id: str, value: float | None) -> str:
            return "–" if value is None else f"{number(value)} ({human_normalised(env_id, value):.2f})"

        def ours(env_id: str, name: str) -> float | None:
            curves = groups[env_id].get(name)
            return float(np.mean([c.returns[-1] for c in curves])) if curves else None

        trained = experiments(groups, games)
        beside = publication(trained)
        rows = [
            [
                env_id,
                *(cell(env_id, ours(env_id, name)) for name in names),
                *(cell(env_id, beside.returned(env_id, prefix)) for prefix in beside.systems),
            ]
            for env_id in games
        ]
        others = beside.other_rules(trained)
        parts += [
            "## Beside published systems\n",
            "Return, with the human-normalised score in brackets (0: a random policy, 1: a human). The published "
            f"systems trained for {beside.steps / 1e6:g} million steps with three seeds ({beside.source}).\n",
            *([f"These runs, or some of them, played by other rules: {', '.join(others)}.\n"] if others else []),
            markdown(["game", *names, *beside.systems.values()], rows),
        ]
    if over_games is not None:
        rows = []
        for name, summary in over_games.variants.items():
            estimates = zip(*summary.aggregates, strict=True)
            rows.append([name, *(with_interval(Interval(*map(float, e)), "{:.2f}".format) for e in estimates)])
        rows += [[name, *(f"{v:.2f}" for v in values)] for name, values in over_games.systems.items()]
        parts += [
            f"## Aggregates over {len(over_games.games)} games\n",
            "Of human-normalised scores, with 95% stratified bootstrap intervals. IQM: mean of the middle half of all "
            "runs; of a published system, for which only means over seeds are known, of the middle half of the games. "
            "Optimality gap: how far below 1 the scores lie on average, those above counting as 1.\n",
            markdown(["", *STATISTICS], rows),
        ]
    return "\n".join(parts)


# Figures


def look(i: int) -> Json:
    """Colour, line style and marker of the i-th line; no two of the first 56 are alike."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": STYLES[i % len(STYLES)],
        "marker": MARKERS[i % len(MARKERS)],
    }


def best_variants(groups: Groups) -> list[str]:
    """The variants that get a name: all, or if there are too many, those that rank best over the environments."""
    names = variants_of(groups)
    if len(names) <= MOST_NAMED:
        return names
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for variants in groups.values():
        final = {name: np.mean([c.returns[-1] for c in curves]) for name, curves in variants.items()}
        for i, name in enumerate(sorted(final, key=lambda name: -final[name])):
            ranks[name].append(i / len(final))
    best = sorted(names, key=lambda name: np.mean(ranks[name]))[:MOST_NAMED]
    return [name for name in names if name in best]


def grid_of(count: int) -> tuple[int, int]:
    """Rows and columns for that many panels: nearly square, with few empty places."""
    if count <= 3:
        return 1, count
    least = math.ceil(math.sqrt(count))
    columns = min((least, least + 1), key=lambda c: (-count % c, c))
    return math.ceil(count / columns), columns


def time_unit(seconds: float) -> tuple[float, str]:
    """A unit of time that suits a duration in seconds: the unit's length in seconds, and its name."""
    return next(
        (s, name) for s, name in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")) if seconds > 3 * s or s == 1
    )


def legend_below(figure: Any, handles: Sequence[Any], caption: str) -> None:
    """Draw the legend and the caption below all panels, in space that is added to the figure."""
    width, height = figure.get_size_inches()
    for handle in handles:
        handle.set_label(textwrap.fill(handle.get_label(), int(width * 13)))
    labels = [handle.get_label().splitlines() for handle in handles]
    longest = max(len(line) for lines in labels for line in lines)
    columns = max(1, min(len(handles), int(width / (0.5 + 0.066 * longest))))
    text = textwrap.fill(caption, int(width * 18))
    for_text = 0.08 + 0.13 * (text.count("\n") + 1)
    lines = math.ceil(len(handles) / columns) * max(map(len, labels))
    below = for_text + 0.1 + 0.17 * lines  # inches
    whole = height + below
    figure.set_size_inches(width, whole)
    figure.get_layout_engine().set(rect=(0, below / whole, 1, height / whole))
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, for_text / whole), "borderaxespad": 0.0}
    figure.legend(handles=handles, ncols=columns, frameon=False, fontsize=8, borderpad=0.0, **place)
    figure.text(0.5, 0.05 / whole, text, fontsize=7, color="0.35", ha="center", va="bottom")


def draw_curves(groups: Groups, axis: Literal["steps", "seconds"], metric: str = RETURN) -> "Figure":
    """One panel per environment, one line per variant."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    rows, columns = grid_of(len(groups))
    names = best_variants(groups)
    others = len(variants_of(groups)) - len(names)
    many = len(groups) > 6
    width, height = (2.3, 1.75) if many else (6.4, 3.4) if len(groups) == 1 else (3.6, 2.7)
    line, marker, text = (1.0, 2.5, 6.5) if many else (1.4, 4.5, 8.5)
    faint = 0.2 / max(1, len(names) / 4)  # many bands overlap
    figure = Figure(figsize=(max(5.0, width * columns), height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    early = False
    for panel, (env_id, variants) in zip(panels.flat, groups.items(), strict=False):
        longest = max(getattr(c, axis)[-1] for curves in variants.values() for c in curves)
        unit, unit_name = time_unit(longest) if axis == "seconds" else (1.0, "environment steps")
        for name, curves in sorted(variants.items(), key=lambda item: item[0] in names):  # grey lines lie below
            b = band(curves, axis)
            x = b.x / unit
            if name not in names:
                panel.plot(x, b.mean, linewidth=0.6 * line, **GREY)
                continue
            i = names.index(name)
            panel.plot(x, b.mean, linewidth=line, markersize=marker, markevery=(10 + 11 * i % 50, 61), **look(i))
            panel.fill_between(x, b.low, b.high, color=look(i)["color"], alpha=faint, linewidth=0)
            ends = np.array([getattr(c, axis)[-1] for c in curves if stopped_early(c, curves)])
            ends = ends[ends <= b.x[-1]]  # over wall time a slow run may end after the line does
            panel.plot(ends / unit, np.interp(ends, b.x, b.mean), "x", color=look(i)["color"], markersize=1.5 * marker)
            early |= ends.size > 0
        panel.set_title(env_id, fontsize=text + 0.5)
        dress(panel, text)
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=5)
        if axis == "steps":
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        if panel in panels[:, 0]:
            panel.set_ylabel("return" if metric == RETURN else metric, fontsize=text)
        if axis == "seconds" or panel in panels.flat[max(0, len(groups) - columns) : len(groups)]:
            panel.set_xlabel(f"wall time, {unit_name}" if axis == "seconds" else unit_name, fontsize=text)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)

    def label(name: str) -> str:
        counts = [len(variants[name]) for variants in groups.values() if name in variants]
        return f"{name} ({span(counts)} seed{'s' * (max(counts) > 1)})"

    handles = [Line2D([], [], label=label(name), markersize=4.5, **look(i)) for i, name in enumerate(names)]
    point = RETURNS if metric == RETURN else f"A point is a logged {metric}; no smoothing."
    legend_below(figure, handles, CAPTION + point + EARLY * early + OTHERS.format(others) * (others > 0))
    return figure


def dress(panel: "Axes", size: float) -> None:
    """Set a panel's frame, grid and tick labels."""
    panel.tick_params(labelsize=size - 0.5)
    panel.grid(alpha=0.25, linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def draw_aggregates(over_games: Aggregates, names: Sequence[str]) -> "Figure":
    """Draw the aggregates with their intervals, then the published systems, and the performance profiles below.

    Variants that are not in `names` are grey, and have no band.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shortened = lambda name: name if len(name) < 50 else name[:48] + " …"
    labels = [*map(shortened, over_games.variants), *over_games.systems]
    count = len(over_games.variants)
    heights = (0.5 + 0.2 * len(labels), 2.6)
    figure = Figure(figsize=(10.5, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    panels = figure.add_subfigure(grid[0]).subplots(1, len(STATISTICS), sharey=True)
    profiles = figure.add_subfigure(grid[1]).subplots()
    names = [name for name in names if name in over_games.variants]
    for i, (name, summary) in enumerate(over_games.variants.items()):
        style = look(names.index(name)) if name in names else GREY
        for panel, value, low, high in zip(panels, *summary.aggregates, strict=True):
            panel.plot([low, high], [i, i], color=style["color"], linewidth=5, alpha=0.35, solid_capstyle="butt")
            panel.plot(value, i, style["marker"] or "o", color=style["color"], markersize=6)
        value, low, high = summary.profile
        profiles.plot(over_games.taus, value, linewidth=1.4, markersize=4.5, markevery=(i * 3 % 12, 12), **style)
        if name in names:
            profiles.fill_between(over_games.taus, low, high, color=style["color"], alpha=0.2, linewidth=0)
    for i, values in enumerate(over_games.systems.values(), count):
        for panel, value in zip(panels, values, strict=True):
            panel.plot(value, i, "o", markerfacecolor="none", markeredgecolor="0.35", markersize=5)
    for panel, title in zip(panels, STATISTICS, strict=True):
        panel.set_title(title, fontsize=9)
        dress(panel, 8.5)
        panel.axhline(count - 0.5, color="0.7", linewidth=0.6)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    dress(profiles, 8.5)
    profiles.set(ylim=(0, 1.02), xlim=(0, over_games.taus[-1]))
    profiles.set_xlabel("human-normalised score τ", fontsize=8.5)
    profiles.set_ylabel("share of runs above τ", fontsize=8.5)
    seeds = span(n for summary in over_games.variants.values() for n in summary.seeds)
    caption = (
        f"Human-normalised scores over {len(over_games.games)} Atari games, seeds per game: {seeds}. Bars and bands: "
        "95% stratified bootstrap intervals (2,000 resamples of every game's seeds). Circles: published systems after "
        f"{over_games.publication.steps / 1e6:g}M steps, of whose runs only the means are known. A smaller optimality "
        "gap is better."
    ) + OTHERS.format(count - len(names)) * (count > len(names))
    handles = [Line2D([], [], label=name, markersize=4.5, **look(i)) for i, name in enumerate(names)]
    legend_below(figure, handles, caption)
    return figure


def save(figure: "Figure", path: Path) -> list[Path]:
    """Write a figure as PNG and SVG."""
    import matplotlib

    written = []
    with matplotlib.rc_context({"svg.hashsalt": "cleanba", "svg.fonttype": "path"}):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once for both
        for suffix in (".png", ".svg"):
            picture = io.BytesIO()
            metadata = {"Date": None} if suffix == ".svg" else None
            figure.savefig(picture, format=suffix[1:], dpi=150, metadata=metadata)
            written.append(path.with_name(path.name + suffix))
            write_whole(written[-1], picture.getvalue())
    return written
