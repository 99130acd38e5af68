"""Sphinx configuration. The build is strict (`-W -n`): a broken reference or a page outside the tree is an error."""

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402  (found through the line above)
import plots  # noqa: E402  (as above)
from sphinx.application import Sphinx  # noqa: E402  (stands after the line above)

import specdec  # noqa: E402  (as above)

generate.write_all(HERE, plots.draw if find_spec("matplotlib") else None)

project = "specdec"
author = "the specdec authors"
project_copyright = "2026, the specdec authors"
release = version = specdec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]  # generated tables are included by pages, not pages themselves
html_theme = "furo"
html_title = "specdec"

default_role = "code"  # a single backtick in a docstring marks code, as in Markdown
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# pytest runs the examples of docstrings; the doctest builder runs those of the pages (`{doctest}` blocks).
doctest_test_doctest_blocks = ""

# Nothing is fetched at build time, so names of other projects have no page to point to.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|jaxtyping|collections|contextlib|typing|types|pathlib)\..*"),
    (r"py:class", r"Tensor|'[\w ]*'"),  # parts of a jaxtyping annotation: the array class and its axes
]


def _whole_sentence(_app: Sphinx, what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Keeps napoleon from reading the text before a colon in a property's docstring as its type."""
    if what == "property":
        lines[:0] = ["..", ""]  # an empty comment: napoleon looks at the first line only


def setup(app: Sphinx) -> None:
    """Sphinx calls this once; a priority below 500 comes before napoleon."""
    app.connect("autodoc-process-docstring", _whole_sentence, priority=400)
