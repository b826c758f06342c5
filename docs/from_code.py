"""What pages of the site take from the code itself, so that it cannot go stale.

* ```` ```{settings} ppo ```` and its likes are lists of flags, presets and metrics.
* `algorithms/ppo.py: loss`, as code in a sentence, links to the line where that name is defined; so do links to files.
* Every module has a page with its source.
"""

import ast
import dataclasses
import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from cleanba.agents import evaluate
from cleanba.cli import COMMANDS
from cleanba.config import Experiment, Field, FromRollouts, Placement, PolicyGradient, Run, fields_of, flag
from cleanba.help import in_words, typed_form
from cleanba.recipes import RECIPES
from cleanba.runtime import training_log
from cleanba.train_flags import ESSENTIAL, HEADINGS

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("cleanba/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("docs/examples/*.py")])
PLACE = re.compile(r"([\w/]+\.py)(?:: ([\w.]+))?")

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------- links to the code


@cache
def lines_of(file: Path) -> Mapping[str, int]:
    """Where a file defines its functions and classes, at any depth, its globals, and what its classes hold."""
    lines: dict[str, int] = {}
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines.setdefault(node.name, node.lineno)
        if isinstance(node, ast.Module | ast.ClassDef):
            holder = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for child in node.body:
                for name in defined(child):
                    lines.setdefault(holder + name, child.lineno)
    return lines


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def module_of(written: str) -> Path | None:
    """The file that a page means by such a path: below cleanba/, or a folder of it, or the repository."""
    folders = [ROOT / "cleanba", ROOT, *sorted(ROOT.glob("cleanba/*/"))]
    return next((folder / written for folder in folders if (folder / written).is_file()), None)


def page_of(file: Path) -> str:
    """The name of the page that shows a file's source."""
    return f"source/{file.relative_to(ROOT).with_suffix('')}"


class CodeLinks(SphinxTransform):
    """`ops/returns.py: gae` in a sentence, and links to Python files, lead to the page of that source."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Replace the nodes of one page."""
        for literal in list(self.document.findall(nodes.literal)):
            place = PLACE.fullmatch(literal.astext())
            if place is None or isinstance(literal.parent, nodes.reference):
                continue
            file = module_of(place[1])
            if file is None or file not in SOURCES:
                continue
            line = lines_of(file).get(place[2]) if place[2] else None
            if place[2] and line is None:
                log.warning("%s defines no %s", place[1], place[2], location=literal)
            self.link(literal, file, line, [literal.deepcopy()])
        here = Path(self.env.doc2path(self.env.docname)).parent
        for download in list(self.document.findall(addnodes.download_reference)):
            file = (here / download["reftarget"]).resolve()
            if file in SOURCES:
                self.link(download, file, None, download.children)

    def link(self, node: nodes.Element, file: Path, line: int | None, inside: list[nodes.Node]) -> None:
        uri = self.app.builder.get_relative_uri(self.env.docname, page_of(file))
        anchor = f"#L-{line}" if line else ""
        reference = nodes.reference("", "", internal=True, refuri=uri + anchor, classes=["code-place"])
        reference += inside
        node.replace_self(reference)


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for every module."""
    formatter = HtmlFormatter(nowrap=True)
    for file in SOURCES:
        lines = highlight(file.read_text(), PythonLexer(stripnl=False), formatter).splitlines()
        numbered = "\n".join(
            f'<span class="line" id="L-{n}"><a class="line-number" href="#L-{n}">{n:4} </a>{line}</span>'
            for n, line in enumerate(lines, 1)
        )
        name = str(file.relative_to(ROOT))
        body = (
            f'<div class="source"><h1>{html.escape(name)}</h1><div class="highlight"><pre>{numbered}</pre></div></div>'
        )
        yield page_of(file), {"title": name, "body": body}, "page.html"


# ------------------------------------------------------------------------------------------------------- flags, presets


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    return [row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def flags_as_code(text: str) -> str:
    """`--flags` in a sentence as code, where they are not yet, and pages that it names as links."""
    text = re.sub(r"(?<![`\w-])--[a-z][\w-]*", lambda found: code(found[0]), text)
    return re.sub(r"docs/([\w/-]+/([\w-]+))\.md", r"[\2](/\1.md)", text)


def sentence(text: str) -> str:
    return f"{text[0].upper()}{flags_as_code(text[1:])}."


def option(head: str, about: str, f: Field, default: str) -> list[str]:
    """A flag as an entry that search finds and other pages can link to."""
    rule = f"; {f.rule.bounds}{' ' + f.rule.unit if f.rule.unit else ''}" if f.rule else ""
    return [f"````{{option}} {head}", sentence(about), "", f"*Default*: {default}{rule}.", "````", ""]


def experiment_defaults(name: str) -> str:
    """A field's default of every algorithm that has it, those that agree together."""
    by_value: dict[str, list[str]] = {}
    for recipe in RECIPES.values():
        f = fields_of(recipe.experiment).get(name)
        if f is not None and f.offered:
            default = next(x.default for x in dataclasses.fields(recipe.experiment) if x.name == name)
            by_value.setdefault(in_words(default), []).append(recipe.name.upper())
    if len(by_value) == 1:
        return code(next(iter(by_value)))
    return "; ".join(f"{code(value)} ({', '.join(names)})" for value, names in by_value.items())


def every_experiment_field() -> dict[str, Field]:
    """The fields of all algorithms, by name; shared ones first."""
    found = dict(fields_of(Experiment))
    for cls in (FromRollouts, PolicyGradient, *(recipe.experiment for recipe in RECIPES.values())):
        found |= {name: f for name, f in fields_of(cls).items() if name not in found}
    return found


def about_field(name: str) -> str:
    """What a field of an experiment is, and for which algorithms, where not all have it or mean the same by it."""
    have: dict[str, list[str]] = {}
    for recipe in RECIPES.values():
        if (f := fields_of(recipe.experiment).get(name)) and f.offered:
            have.setdefault(f.about, []).append(recipe.name.upper())
    everywhere = len(have) == 1 and len(next(iter(have.values()))) == len(RECIPES)
    return "; ".join(about if everywhere else f"{about} ({', '.join(names)})" for about, names in have.items())


def training_flags(only: str = "") -> list[str]:
    """Every flag of the training commands, below the headings of --help."""
    known = every_experiment_field()
    placed = {title: names.split() for title, names in HEADINGS.items()}
    taken = {*ESSENTIAL, *(name for names in placed.values() for name in names)}
    groups = {"essentials": [n for n in ESSENTIAL if n in known], "learning": [n for n in known if n not in taken]}
    groups |= {title: [name for name in names if name in known] for title, names in placed.items()}
    lines: list[str] = []
    for title, names in groups.items():
        lines += [f"### {sentence(title)[:-1]}", ""]
        for name in names:
            lines += option(typed_form(name, known[name]), about_field(name), known[name], experiment_defaults(name))
    return lines


def dataclass_flags(cls: type) -> list[str]:
    """The flags of a dataclass; what is positional stands by its own name."""
    lines = []
    for f in dataclasses.fields(cls):
        known = fields_of(cls)[f.name]
        head = typed_form(f.name, known)
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        default = "none: it must be given" if missing else code(in_words(None if missing else f.default))
        if tyro.conf.Positional in getattr(known.annotation, "__metadata__", ()):
            head = f.name.upper()
        lines += option(head, known.about, known, default)
    return lines


def of_placement(_: str) -> list[str]:
    return dataclass_flags(Placement)


def of_run(_: str) -> list[str]:
    return dataclass_flags(Run)


def of_commands(_: str) -> list[str]:
    """Every command that trains nothing, with its flags."""
    lines: list[str] = []
    for name, command in COMMANDS.items():
        lines += [f"## `cleanba {name}`", "", sentence(command.about), ""]
        module = import_module(command.where.split(":")[0])
        cls = getattr(module, command.flags, None) if command.flags else None
        if cls is not None:
            lines += ["````{program} cleanba " + name, "````", "", *dataclass_flags(cls)]
        else:
            lines += [f"`cleanba {name} --help` says what follows it.", ""]
    return lines


def list_of_commands(_: str) -> list[str]:
    rows = [(f"`cleanba {name}`", known.about) for name, known in (RECIPES | COMMANDS).items()]
    return table(("command", "what it does"), rows)


def shown(value: Any) -> str:
    """A value in a table."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if whole else in_words(value)


def settings(algorithm: str) -> list[str]:
    """An algorithm's settings: the default, and what its presets change."""
    recipe = RECIPES[algorithm]
    known, shared = fields_of(recipe.experiment), fields_of(Experiment)
    changed = {name for preset in recipe.presets.values() for name in preset}
    presets = {name: preset for name, preset in recipe.presets.items() if preset}
    rows = []
    for f in dataclasses.fields(recipe.experiment):
        if known[f.name].offered and (f.name not in shared or f.name in changed):
            about = flags_as_code(re.split(r"; | \(", known[f.name].about)[0])
            cells = [shown(preset[f.name]) if f.name in preset else "" for preset in presets.values()]
            rows.append((f"{code(flag(f.name))} {about}", shown(f.default), *cells))
    empty = (
        "An empty cell means the default, but for `--network`, `--share-torso` and `--env-epoch`: where no cell names "
        "a value, [the environment decides](/reference/presets.md)."
    )
    return [":::{div} settings", *table(("", "default", *map(code, presets)), rows), ":::", "", empty]


def presets(_: str) -> list[str]:
    rows = [
        (recipe.name, code(preset), ", ".join(code(f"{k}={in_words(v)}") for k, v in values.items()) or "in nothing")
        for recipe in RECIPES.values()
        for preset, values in recipe.named_presets().items()
    ]
    return table(("algorithm", "preset", "differs from the algorithm's defaults"), rows)


# -------------------------------------------------------------------------------------------------------------- others


def metrics(which: str) -> list[str]:
    """Names that a log has, and what they mean: an algorithm's, or those of every run, or of evaluations."""
    known = {"run": training_log.LOGGED, "evaluation": evaluate.LOGGED}.get(which) or RECIPES[which].logs
    return table(("name", "meaning"), [(code(name), meaning) for name, meaning in known.items()])


OUTSIDE = {
    "benchmarks/NOTEBOOK.md": "inside/notebook.md",
    "cleanba/environments/data/README.md": "reference/published.md",
}
"""Markdown of the repository that lies outside of docs/ -> the page that shows it."""

LINK = re.compile(r"\]\(([^)\s#]+)")


def outside(path: str) -> list[str]:
    """A file of OUTSIDE, its links as they must be on the page that shows it; without its title."""
    folder, page = (ROOT / path).parent, (ROOT / "docs" / OUTSIDE[path]).parent
    known = {str(ROOT / file): str(ROOT / "docs" / shown) for file, shown in OUTSIDE.items()}

    def there(link: re.Match[str]) -> str:
        if re.match(r"\w+:", link[1]):
            return link[0]
        target = os.path.normpath(folder / link[1])
        return f"]({os.path.relpath(known.get(target, target), page)}"

    return LINK.sub(there, (ROOT / path).read_text()).splitlines()[1:]


def links_to_outside(app: Sphinx, docname: str, content: list[str]) -> None:
    """On the site, links to files of OUTSIDE lead to the pages that show them."""
    folder = (ROOT / "docs" / docname).parent

    def there(link: re.Match[str]) -> str:
        target = os.path.relpath(os.path.normpath(folder / link[1]), ROOT)
        shown = OUTSIDE.get(target)
        return f"]({os.path.relpath(ROOT / 'docs' / shown, folder)}" if shown else link[0]

    content[0] = LINK.sub(there, content[0])


def notebook(path: str) -> list[str]:
    """A notebook's cells; what they print stands below them, where it was kept."""
    lines: list[str] = []
    for cell in json.loads((ROOT / "docs" / path).read_text())["cells"]:
        text = re.sub(r"\A# .*\n", "", "".join(cell["source"]))  # the page has a title
        lines += [text, ""] if cell["cell_type"] == "markdown" else ["```python", text, "```", ""]
    return lines


def planted(_: str) -> list[str]:
    """The faults that `cleanba bisect` was given to find, and what it said."""
    found = json.loads((ROOT / "benchmarks/results/planted.json").read_text())["faults"]
    code = lambda text: f"`{text}`".replace("|", "\\|")
    rows = [f"| {fault['name']} | {fault['run']} | {code(fault['said'])} | {fault['source']} |" for fault in found]
    return ["| what was planted | into | what was said | put down to |", "|---|---|---|---|", *rows]


PARTS: dict[str, Callable[[str], list[str]]] = {
    "training-flags": training_flags,
    "placement-flags": of_placement,
    "run-flags": of_run,
    "commands": list_of_commands,
    "command-flags": of_commands,
    "settings": settings,
    "presets": presets,
    "metrics": metrics,
    "notebook": notebook,
    "outside": outside,
    "planted": planted,
}


class FromCode(SphinxDirective):
    """```` ```{settings} ppo ````: Markdown that a function above makes."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The nodes of that Markdown."""
        for file in (Path(__file__), *ROOT.glob("cleanba/algorithms/*.py"), ROOT / "cleanba/config.py"):
            self.env.note_dependency(str(file))
        text = "\n".join(PARTS[self.name](self.arguments[0] if self.arguments else ""))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def visit_math(self: Any, node: nodes.Element) -> None:
    """An equation as MathML, which browsers draw without a script."""
    try:
        self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        log.warning("%s", error, location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    for name in PARTS:
        app.add_directive(name, FromCode)
    app.add_transform(CodeLinks)
    app.connect("source-read", links_to_outside)
    app.connect("html-collect-pages", source_pages)
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
