"""How Sphinx builds the site: `make docs`.  Every warning is an error: no broken link, no page that is forgotten."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed: tables and docstrings are read

from cleanba import __version__  # noqa: E402

project = "Cleanba"
author = "The Cleanba authors"
copyright = "The Cleanba authors, MIT licence"
release = version = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "from_code",
]
moved = [page.name for page in HERE.glob("*.md") if page.is_symlink()]  # links that stand where pages were
exclude_patterns = ["_build", *moved]

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a page that a directive continues may begin at a lower heading

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have types and shapes in words
smartquotes = False  # flags begin with two hyphens
default_role = "code"  # docstrings write `name`
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Cleanba"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"  # drawn by browsers themselves, so equations need no network
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
