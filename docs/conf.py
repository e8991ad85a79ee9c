"""Settings of the documentation site: ``make docs`` builds it with Sphinx."""

from __future__ import annotations

from stoker.base.version import __version__

project = "Stoker"
author = "The Stoker authors"
copyright = "2026, the Stoker authors; Apache-2.0"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = []
html_theme = "furo"
html_title = "Stoker"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
