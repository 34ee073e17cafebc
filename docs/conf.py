"""Sphinx configuration: MyST pages, docstrings by autodoc, and references from the code."""

import gc
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

# Of the millions of nodes of a build few are garbage, and looking for it takes a fifth of the time.
gc.set_threshold(100_000, 50, 100)

project = "fedlearn"
author = "The fedlearn authors"
copyright = author  # noqa: A001 (Sphinx's name)
version = release = version_of("fedlearn")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.graphviz",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_parser",
    "sphinx_design",
    "from_code",
    "quick_references",
]
exclude_patterns = ["_build", "extensions"]
html_theme = "furo"
html_title = f"fedlearn {release}"
html_static_path = ["_static"]
html_css_files = ["figures.css"]
graphviz_output_format = "svg"  # drawn while the pages are built; needs the program `dot`
graphviz_dot_args = [
    "-Gbgcolor=transparent",
    "-Gfontname=sans-serif",
    "-Nfontname=sans-serif",
    "-Efontname=sans-serif",
    "-Nfontsize=11",
    "-Efontsize=10",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_use_type_comments = False  # there are none, and all sources would be searched for them
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Guarantees", "notes_style")]
python_use_unqualified_type_names = True

nitpicky = True  # a reference to a full name of ours must lead somewhere
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fedlearn\.).*"),  # names of others, whose inventories are on the network
    (r"py:.*", r"fedlearn\.(.*\.)?([A-Z]|[A-Z][a-z]+T)(_co)?"),  # type variables
    (r"py:.*", r"fedlearn\.(.*\.)?_\w+"),  # private names in signatures
    (r"py:.*", r"fedlearn\.(.*\.)?Annotated"),  # typing's, in signatures
    (r"py:.*", r"fedlearn\.transport\.wire_pb2\..*"),  # generated: reference/wire-messages has them
    (
        r"py:.*",
        r"fedlearn\.gateway\.(connections|exchanges|loop|questions|served_runs)\..*",
    ),  # inside
    (r"py:.*", r"fedlearn\.(client\.tasks|training\.keyed_dropout)\..*"),  # inside
    (r"py:.*", r"fedlearn\.secagg\.(?!plan).*"),  # inside: a page of the protocol comes with it
    (
        r"py:.*",
        r"fedlearn\.(deployment\.live_status|identity\.(actors|audit|rosters))\..*",
    ),  # inside
    (r"py:.*", r"fedlearn\.(identity\.signing|store\.(releases|schema)\..*)"),  # inside
    (r"py:.*", r"fedlearn\.config\..*"),  # the tables: reference/configuration has them
]
