"""The layout explorer: layouts from the notebooks, and the page that shows them.

A notebook shows a layout as an output of type ``MIME`` beside its text: a name,
and the items of its bases and of its shape, as lists of pairs. While the pages
are read, the layouts are taken out of the outputs and kept with the place where
they stood. The directive ``nbx-explorer`` puts all of them on one page, in the
page itself, so that it also works from a file. A link under each output leads
there, and the explorer leads back.
"""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

MIME = "application/vnd.nbxtensor.layout+json"
PAIRS = ("bases", "shape")
EXPLORER = "book/explorer"


class nbx_explorer(nodes.General, nodes.Element):
    """Stands for the explorer until all layouts are known."""


class nbx_explore(nodes.General, nodes.Element):
    """Stands for a link to the explorer until the builder is known."""


class Explorer(SphinxDirective):
    """The explorer, with every layout of the book."""

    def run(self):
        return [nbx_explorer()]


# --------------------------------------------------------------- collecting


def take_layouts(app, docname, source):
    """Take the layouts out of a notebook; MyST-NB cannot render them."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    notebook, taken = json.loads(source[0]), {}
    for index, cell in enumerate(notebook["cells"]):
        bundles = [output["data"] for output in cell.get("outputs", []) if "data" in output]
        layouts = [data.pop(MIME, None) for data in bundles]
        if not any(layouts):
            continue
        taken[index] = cell["id"], layouts
        if any(isinstance(layout[key], dict) for layout in layouts if layout for key in PAIRS):
            # The order of the coordinates is lost, and the picture wrong.
            logger.warning(
                "cell %s: a notebook file sorts the keys of a mapping; "
                "a layout's bases and shape must be lists of pairs",
                cell["id"],
                location=docname,
            )
    if taken:
        app.env.temp_data["nbx_layouts"] = taken
        source[0] = json.dumps(notebook)


def known_layouts(env) -> dict[str, list[dict]]:
    """``{docname: layouts}`` of the pages read so far."""
    if not hasattr(env, "nbx_layouts"):
        env.nbx_layouts = {}
    return env.nbx_layouts


class Layouts(SphinxTransform):
    """Record the layouts that a page shows; leave a link under each."""

    default_priority = 410

    def apply(self, **kwargs):
        taken = self.env.temp_data.get("nbx_layouts", {})
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") == "cell_code" and cell["cell_index"] in taken:
                self.record(cell, *taken[cell["cell_index"]])

    def record(self, cell, cell_id, layouts):
        docname, heading = self.env.docname, section_title(cell)
        known = known_layouts(self.env).setdefault(docname, [])
        shown = (c for c in cell.findall(nodes.container) if c.get("nb_element") == "mime_bundle")
        pairs = [(output, layout) for output, layout in zip(list(shown), layouts) if layout]
        for count, (output, layout) in enumerate(pairs, start=1):
            part = f"{cell_id}/{count}" if count > 1 else cell_id
            entry = {
                "key": f"{docname.removeprefix('notebooks/')}/{part}",
                "name": layout.get("name") or heading,
                "heading": heading,
                "anchor": f"cell-{part}".replace("/", "-"),
                "bases": dict(layout["bases"]),
                "shape": dict(layout["shape"]),
            }
            known.append(entry)
            what = f"{layout['name']} " if layout.get("name") else ""
            link = nbx_explore(key=entry["key"], what=what, docname=docname)
            place = output.parent.index(output)
            output.parent.insert(place + 1, link)
            output.parent.insert(place, nodes.target("", "", ids=[entry["anchor"]]))


def section_title(node) -> str:
    """The heading under which a node stands."""
    while not isinstance(node, nodes.section):
        node = node.parent
    return node.next_node(nodes.title).astext()


def forget(app, env, docname):
    """A page is read again, or gone."""
    known_layouts(env).pop(docname, None)


def merge(app, env, docnames, other):
    """Take what a parallel reader found."""
    known_layouts(env).update(known_layouts(other))


def rewrite(app, env):
    """The explorer shows what other pages hold: write it each time."""
    return [EXPLORER] if EXPLORER in env.found_docs else []


# ------------------------------------------------------------------ writing


def catalogue(app, here: str) -> list[dict]:
    """All layouts in the order of the book, with links as seen from a page."""
    known, found = known_layouts(app.env), []
    for docname in app.env.collect_relations():
        for layout in known.get(docname, []):
            link = app.builder.get_relative_uri(here, docname)
            entry = {key: value for key, value in layout.items() if key != "anchor"}
            entry["page"] = app.env.titles[docname].astext()
            entry["href"] = f"{link}#{layout['anchor']}"
            found.append(entry)
    return found


class Write(SphinxPostTransform):
    """Write the explorer and the links that lead to it."""

    default_priority = 50

    def run(self, **kwargs):
        html = self.app.builder.format == "html"
        for node in list(self.document.findall(nbx_explorer)):
            node.replace_self(self.explorer() if html else [])
        html = html and EXPLORER in self.env.found_docs
        for node in list(self.document.findall(nbx_explore)):
            node.replace_self(self.link(node) if html else [])

    def explorer(self):
        found = json.dumps(catalogue(self.app, self.env.docname), ensure_ascii=False)
        text = (
            '<div id="nbx-explorer">\n'
            "<noscript><p>The explorer needs JavaScript.</p></noscript>\n"
            '<script type="application/json">'
            # No "</script>" in a name may end the element early.
            + found.replace("<", "\\u003c")
            + "</script>\n</div>"
        )
        return nodes.raw("", text, format="html")

    def link(self, node):
        text = nodes.Text(f"open {node['what']}in the explorer")
        reference = make_refnode(
            self.app.builder, node["docname"], EXPLORER, f"layout={node['key']}", text
        )
        return nodes.paragraph("", "", reference, classes=["nbx-badge", "nbx-explore"])


def add_files(app, pagename, templatename, context, doctree):
    """Load the script on the explorer's page only."""
    if pagename == EXPLORER:
        app.add_css_file("explorer.css")
        app.add_js_file("explorer.js", loading_method="defer")


def setup(app):
    app.add_node(nbx_explorer)
    app.add_node(nbx_explore)
    app.add_directive("nbx-explorer", Explorer)
    app.connect("source-read", take_layouts)
    app.add_transform(Layouts)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", rewrite)
    app.add_post_transform(Write)
    app.connect("html-page-context", add_files)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True}
