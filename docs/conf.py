"""Settings of the documentation site; `make docs` builds it without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from gossamer import __version__

project = "Gossamer"
author = "the Gossamer authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "gossamer_reference"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext"]
smartquotes = False  # dashes and quotes of options and settings are copied from pages
html_theme = "furo"
html_title = f"Gossamer {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
