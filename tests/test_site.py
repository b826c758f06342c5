"""The documentation site builds without a warning, no link is broken, and its search finds pages in a browser."""

import functools
import http.server
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from launch import ROOT, finish, python

pytest.importorskip("sphinx", reason="needs the packages that build the site: make docs")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
NOWHERE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}


def build(source: Path, out: Path):
    """`make docs`, without a network."""
    words = ("--fail-on-warning", "--fresh-env", "-q", "-b", "html", source, out)
    return finish(python("-m", "sphinx", *words, **NOWHERE))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    ended = build(ROOT / "docs", out)
    assert ended.code == 0, ended.err
    return out


class Page(HTMLParser):
    """What a page links to, what it fetches, and the anchors that it has."""

    def __init__(self, file: Path):
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.words = 0
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.add(attributes["href"])
        elif tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.fetched.add(attributes["href"])
        elif tag in ("img", "script", "video", "source", "iframe") and "src" in attributes:
            self.fetched.add(attributes["src"])

    def handle_data(self, data):
        self.words += len(data.split())


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if "_static" not in file.parts}


def test_every_link_leads_to_a_page_and_a_place_on_it(site, pages):
    broken = []
    for file, page in pages.items():
        for link in page.links | page.fetched:
            address, anchor = urldefrag(link)
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target = (file.parent / unquote(urlsplit(address).path)).resolve() if address else file
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []
    assert len(pages) > 100 and sum(len(page.links) for page in pages.values()) > 5000


def test_nothing_is_fetched_from_elsewhere(pages):
    assert {x for page in pages.values() for x in page.fetched if urlsplit(x).scheme or x.startswith("//")} == set()


def test_code_that_is_named_leads_to_its_line(site, pages):
    links = {link for page in pages.values() for link in page.links if "source/cleanba/ops/returns.html#L-" in link}
    named = {int(re.search(r"#L-(\d+)$", link)[1]) for link in links}
    lines = (ROOT / "cleanba/ops/returns.py").read_text().splitlines()
    assert named
    assert [lines[line - 1] for line in named if not re.match(r"def |class |[A-Z]", lines[line - 1])] == []


def test_a_broken_link_a_forgotten_page_and_a_name_that_is_gone_fail_the_build(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    conf = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'docs')!r}]\n"
    (source / "conf.py").write_text(conf + "extensions = ['myst_parser', 'from_code']\nmyst_heading_anchors = 3\n")
    (source / "index.md").write_text("# Title\n\n[there](other.md#nowhere), `ops/returns.py: no_such_name`\n")
    (source / "other.md").write_text("# Other\n")
    ended = build(source, tmp_path / "out")
    assert ended.code != 0
    for said in ("nowhere", "included in any toctree", "defines no no_such_name"):
        assert said in ended.err


# ------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def served(site):
    """The site's address on a server of this process."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def browse(address: str, profile: Path) -> str:
    """A page as a browser shows it, after its scripts have run."""
    ended = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
            ),
            *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}"),
            *("--virtual-time-budget=20000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=500,  # on a machine that is busy with other tests
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@BROWSER
@pytest.mark.parametrize("words, found", [("num-envs", "reference/flags"), ("bootstrap truncated", "algorithms/")])
def test_the_search_finds_pages(served, tmp_path, words, found):
    shown = browse(f"{served}/search.html?q={words.replace(' ', '+')}", tmp_path)
    results = re.search(r'<ul[^>]*class="search".*?</ul>', shown, re.S)
    assert results and found in results[0]


@BROWSER
def test_no_page_scrolls_sideways_on_a_phone(site, served, tmp_path):
    names = sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if "_static" not in file.parts)
    names = [name for name in names if not name.startswith("source/")] + ["source/cleanba/algorithms/ppo.html"]
    script = """
        const wide = [];
        for (const name of NAMES) {
            const frame = document.createElement("iframe");
            frame.style = "width: 390px; height: 800px; border: 0";
            frame.src = name;
            document.body.append(frame);
            await new Promise(resolve => frame.onload = resolve);
            const width = frame.contentDocument.documentElement.scrollWidth;
            if (width > 390) wide.push(name + " " + width);
            frame.remove();
        }
        document.body.append("wide: [" + wide.join(", ") + "] of " + NAMES.length);
    """
    html = f"<!DOCTYPE html><body><script type=module>const NAMES = {names!r};{script}</script>"
    (site / "_static" / "phone.html").write_text(html.replace("frame.src = name", "frame.src = '../' + name"))
    shown = browse(f"{served}/_static/phone.html", tmp_path)
    assert f"wide: [] of {len(names)}" in shown, re.search(r"wide: .*", shown)
