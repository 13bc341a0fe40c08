"""What this book adds to Sphinx.

- Code cells: nbdev directive lines (``#| export`` and its kin) are taken out
  of the page, and an exported cell gets a badge that leads to its module.
- Figures: an image without alternative text gets its output's text form.
- Module pages: every module that a notebook exports has a source page, and
  that page leads back to the notebook's.
- No request leaves the page: what would load scripts from elsewhere is dropped.
- Status page: machines from benchmarks/, versions from the pins.
- API page: Triton kernels are documented like functions. A docstring leads to
  its page by a line ``Page: elementwise/mish`` or by the notebook's path.
- Repository: with NBX_REPOSITORY_URL set, and only then, pages get
  repository, edit, issue and launch buttons.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.ext.autodoc import FunctionDocumenter
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

PACKAGE = "nbxtensor"
NOTEBOOKS = "notebooks"
SOURCES = "_modules"

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(\S+)\s*(.*?)\s*$")
EXPORTS = {"export", "exports", "exporti"}
KERNELS = {"JITFunction", "InterpretedFunction", "GluonJITFunction"}
NOTEBOOK_PATH = re.compile(r"(?<![\w/`])notebooks/([\w/-]+)\.ipynb\b(?!`)")
PAGE_LINE = re.compile(r"^(\s*)Page:\s*`{0,2}([\w./-]+?)`{0,2}\.?\s*$")


# --------------------------------------------------------------- notebooks


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """Separate a cell's leading ``#|`` lines from its code.

    Returns:
        The directives as ``{name: argument}``, and the code without them.
    """
    lines, found = source.split("\n"), {}
    while lines:
        match = DIRECTIVE.match(lines[0])
        if match:
            found[match[1].rstrip(":")] = match[2]
        elif lines[0].strip():
            break
        lines.pop(0)
    if not found:
        return {}, source
    return found, "\n".join(lines)


def module_name(target: str) -> str:
    """Turn an export target (``ops.mish``, ``__init__``) into a module name."""
    parts = [part for part in target.split(".") if part != "__init__"]
    return ".".join([PACKAGE, *parts])


def default_export(notebook: Path) -> str | None:
    """The module that a notebook exports to, or None."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            found, _ = split_directives("".join(cell["source"]))
            if "default_exp" in found:
                return module_name(found["default_exp"])
    return None


def module_file(root: Path, module: str) -> Path | None:
    """The file of a module of this checkout, found without importing it."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def source_page(module: str) -> str:
    """The name of a module's source page."""
    return f"{SOURCES}/{module.replace('.', '/')}"


def exported_pages(app) -> dict[str, str]:
    """``{module: docname}`` over all notebooks in the book."""
    pages = {}
    for docname in sorted(app.env.found_docs):
        path = Path(app.env.doc2path(docname))
        if path.suffix == ".ipynb":
            module = default_export(path)
            if module:
                pages[module] = docname
    return pages


class nbx_badge(nodes.General, nodes.Element):
    """Stands for a badge until the builder knows its links."""


class CellDirectives(SphinxTransform):
    """Take directive lines off code cells; mark the exported ones."""

    default_priority = 400

    def apply(self, **kwargs):
        path = Path(self.env.doc2path(self.env.docname))
        if path.suffix != ".ipynb":
            return
        default = default_export(path)
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") == "cell_code":
                self.clean(cell, default)

    def clean(self, cell, default):
        for source in list(cell.children):
            if source.get("nb_element") != "cell_code_source":
                continue
            for block in list(source.findall(nodes.literal_block)):
                found, code = split_directives(block.astext())
                if not found:
                    continue
                if "hide" in found or not code.strip():
                    cell.parent.remove(cell)
                    return
                block.rawsource = code
                block.children = []
                block += nodes.Text(code)
                target = next((found[k] for k in EXPORTS if k in found), None)
                if target is not None:
                    module = module_name(target) if target else default
                    self.mark(cell, source, module)

    def mark(self, cell, source, module):
        root = Path(self.env.srcdir)
        if module is None or module_file(root, module) is None:
            what = module or "no module (there is no default_exp)"
            logger.warning(
                "a cell is exported to %s, which is not in this checkout",
                what,
                location=cell,
            )
            return
        cell["classes"].append("nbx-exported")
        source += nbx_badge(module=module, docname=self.env.docname)


class AltTexts(SphinxTransform):
    """Let a figure's text form be its image's alternative text.

    What the cell's metadata says comes first.
    """

    default_priority = 400

    def apply(self, **kwargs):
        for bundle in self.document.findall(nodes.container):
            if bundle.get("nb_element") != "mime_bundle":
                continue
            forms = {part["mime_type"]: part for part in bundle.children}
            if "text/plain" in forms:
                for image in bundle.findall(nodes.image):
                    image.setdefault("alt", forms["text/plain"].astext())


class Badges(SphinxPostTransform):
    """Write the badges, with links where the builder has source pages."""

    default_priority = 50

    def run(self, **kwargs):
        builder = self.app.builder
        for badge in list(self.document.findall(nbx_badge)):
            name = nodes.literal("", badge["module"])
            if builder.format == "html":
                page = source_page(badge["module"])
                here = badge["docname"]
                name = make_refnode(builder, here, page, None, name)
            text = nodes.Text("exported to ")
            classes = ["nbx-badge"]
            badge.replace_self(nodes.paragraph("", "", text, name, classes=classes))


# ------------------------------------------------------------ source pages


def add_sources(app):
    """Give every exported module a source page (before viewcode writes)."""
    env = app.env
    known = getattr(env, "_viewcode_modules", {})
    env._viewcode_modules = known
    for module in exported_pages(app):
        code, tags = find_source(app, module) or ("", {})
        entry = known.get(module)
        used = entry[2] if entry else {}
        if code:
            used = {name: doc for name, doc in used.items() if name in tags}
            known[module] = (code, tags, used, module)
    return []


def find_source(app, module):
    """Read this checkout's file, whatever else may be installed."""
    if module.split(".")[0] != PACKAGE:
        return None
    path = module_file(Path(app.srcdir), module)
    if path is None:
        return None
    analyzer = ModuleAnalyzer.for_file(str(path), module)
    analyzer.find_tags()
    return analyzer.code, analyzer.tags


def follow_kernel(app, module, name):
    """Tell viewcode where a kernel comes from; it only knows functions."""
    owner = sys.modules.get(module)
    obj = getattr(owner, name, None) if owner else None
    return obj.fn.__module__ if is_kernel(obj) else None


def link_back(app, pagename, templatename, context, doctree):
    """Lead from a source page to its notebook, and to the documented names."""
    prefix = f"{SOURCES}/{PACKAGE}"
    if pagename != prefix and not pagename.startswith(prefix + "/"):
        return
    module = pagename.removeprefix(f"{SOURCES}/").replace("/", ".")
    body = documented_names(app, module, context["body"])
    docname = exported_pages(app).get(module)
    if docname:
        uri = app.builder.get_relative_uri(pagename, docname)
        title = html.escape(app.env.titles[docname].astext())
        note = f'<p class="nbx-page">Written on the page <a href="{uri}">'
        body = body.replace("</h1>", f"</h1>\n{note}{title}</a></p>", 1)
    context["body"] = body


def documented_names(app, module, body):
    """Aim ``[docs]`` links at the name under which the API page has it."""
    objects = app.env.get_domain("py").objects

    def aim(match):
        full = match[2]
        name = full.removeprefix(module + ".")
        if full not in objects and f"{PACKAGE}.{name}" in objects:
            full = f"{PACKAGE}.{name}"
        return f'{match[1]}#{full}"'

    return re.sub(r'(class="viewcode-back" href="[^"#]*)#([^"]*)"', aim, body)


def drop_thebe(app, config):
    """Silence Thebe: unused here, and it writes network addresses on pages."""
    for event, listeners in app.events.listeners.items():
        app.events.listeners[event] = [
            listener
            for listener in listeners
            if not listener.handler.__module__.startswith("sphinx_thebe")
        ]
    for files in (app.registry.css_files, app.registry.js_files):
        files[:] = [file for file in files if "thebe" not in str(file[0])]


# ------------------------------------------------------------------ status


def table(head: list[str], rows: list[list[str]]) -> nodes.table:
    """A table of plain cells."""
    made = nodes.table("", classes=["colwidths-auto"])
    group = nodes.tgroup(cols=len(head))
    made += group
    for _ in head:
        group += nodes.colspec(colwidth=1)
    for part, lines in ((nodes.thead(), [head]), (nodes.tbody(), rows)):
        group += part
        for line in lines:
            row = nodes.row()
            part += row
            for text in line:
                row += nodes.entry("", nodes.paragraph("", str(text)))
    return made


def wide(made: nodes.table) -> list[nodes.Node]:
    return [nodes.container("", made, classes=["pst-scrollable-table-container"])]


class Machines(SphinxDirective):
    """The machines in benchmarks/, one row a file."""

    def run(self):
        rows, keys = [], []
        for path in sorted(Path(self.env.srcdir).glob("benchmarks/*.json")):
            self.env.note_dependency(str(path))
            recorded = json.loads(path.read_text(encoding="utf-8"))
            machine = {**recorded.get("machine", {})}
            machine["rows"] = len(recorded.get("rows", []))
            keys += [key for key in machine if key not in keys]
            rows.append((f"benchmarks/{path.name}", machine))
        if not rows:
            return [nodes.paragraph("", "This checkout holds no recorded results.")]
        if len(rows) == 1:
            name, machine = rows[0]
            lines = [["file", name], *([key, machine[key]] for key in keys)]
            return wide(table(["", "recorded"], lines))
        lines = [[name, *(m.get(key, "") for key in keys)] for name, m in rows]
        return wide(table(["file", *keys], lines))


class Versions(SphinxDirective):
    """Pins of requirements.txt beside the ranges of pyproject.toml."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        pins, ranges = {}, {}
        root = Path(self.env.srcdir)
        for name, found in (("requirements.txt", pins), ("pyproject.toml", ranges)):
            path = root / name
            self.env.note_dependency(str(path))
            for line in path.read_text(encoding="utf-8").splitlines():
                match = re.match(r'\s*"?([\w-]+)((?:[<>=~!]=?[\w.+]+,?)+)', line)
                if match:
                    found.setdefault(match[1].lower(), match[2])
        rows = [
            [name, pins.get(name, "").lstrip("="), ranges.get(name, "")]
            for name in self.arguments[0].split()
        ]
        return wide(table(["", "the book and the tests", "the package"], rows))


# ---------------------------------------------------------------- API page


def is_kernel(obj) -> bool:
    """Is this a Triton kernel, compiled or interpreted?"""
    return type(obj).__name__ in KERNELS and callable(getattr(obj, "fn", None))


class KernelDocumenter(FunctionDocumenter):
    """Document a kernel as the function that it was written as."""

    objtype = "kernel"
    directivetype = "function"
    priority = FunctionDocumenter.priority + 10

    @classmethod
    def can_document_member(cls, member, membername, isattr, parent):
        return is_kernel(member)

    def import_object(self, raiseerror=False):
        found = super().import_object(raiseerror)
        if found and is_kernel(self.object):
            self.object = self.object.fn
        return found


def keep_kernels(app, what, name, obj, skip, options):
    """An interpreted kernel hides its docstring; look at the function's."""
    if not skip or not is_kernel(obj) or not obj.fn.__doc__:
        return None
    # Kernels that a module imports are documented where they are written.
    here = obj.fn.__module__ == app.env.temp_data.get("autodoc:module")
    return not here or obj.fn.__name__.startswith("_")


def link_pages(app, what, name, obj, options, lines):
    """Make links of ``Page: elementwise/mish`` and of notebooks' paths."""
    for i, line in enumerate(lines):
        match = PAGE_LINE.match(line)
        if match:
            page = match[2].removeprefix(NOTEBOOKS + "/").removesuffix(".ipynb")
            lines[i] = f"{match[1]}Page: :doc:`/{NOTEBOOKS}/{page}`"
        else:
            lines[i] = NOTEBOOK_PATH.sub(rf":doc:`/{NOTEBOOKS}/\1`", line)


# -------------------------------------------------------------- repository


def repository() -> tuple[str, str]:
    """The address and branch that the build was given."""
    url = os.environ.get("NBX_REPOSITORY_URL", "").strip().rstrip("/")
    branch = os.environ.get("NBX_REPOSITORY_BRANCH", "").strip() or "main"
    return url.removesuffix(".git"), branch


def fill_in(app, docname, source):
    """Put the address where a prose page names the variables."""
    if docname.startswith("book/") and app.tags.has("repository"):
        url, branch = repository()
        text = source[0].replace("NBX_REPOSITORY_URL", url)
        source[0] = text.replace("NBX_REPOSITORY_BRANCH", branch)


def set_repository(app, config):
    """Add the buttons that need an address, if one is given."""
    url, branch = repository()
    if not url:
        return
    if not re.match(r"https://[\w.-]+/.+", url):
        raise ExtensionError(f"NBX_REPOSITORY_URL is not an https address: {url!r}")
    app.tags.add("repository")
    options = config.html_theme_options
    options["repository_url"] = url
    options["repository_branch"] = branch
    for button in ("repository", "edit_page", "issues"):
        options[f"use_{button}_button"] = True
    launch = dict(options.get("launch_buttons") or {})
    launch["notebook_interface"] = "jupyterlab"
    launch["binderhub_url"] = "https://mybinder.org"
    if url.startswith("https://github.com/"):
        launch["colab_url"] = "https://colab.research.google.com"
    options["launch_buttons"] = launch


def use_checkout(app, config):
    """Document the modules beside this book, not an installed copy."""
    sys.path.insert(0, str(app.srcdir))


def setup(app):
    app.connect("config-inited", use_checkout, priority=100)
    app.connect("config-inited", drop_thebe, priority=100)
    app.connect("config-inited", set_repository, priority=100)
    app.connect("source-read", fill_in)
    app.add_node(nbx_badge)
    app.add_transform(CellDirectives)
    app.add_transform(AltTexts)
    app.add_post_transform(Badges)
    app.add_directive("nbx-machines", Machines)
    app.add_directive("nbx-versions", Versions)
    app.setup_extension("sphinx.ext.autodoc")
    app.add_autodocumenter(KernelDocumenter)
    app.connect("autodoc-skip-member", keep_kernels)
    app.connect("autodoc-process-docstring", link_pages)
    app.setup_extension("sphinx.ext.viewcode")
    app.connect("viewcode-find-source", find_source)
    app.connect("viewcode-follow-imported", follow_kernel)
    app.connect("html-collect-pages", add_sources, priority=400)
    app.connect("html-page-context", link_back)
    return {"version": "1", "parallel_read_safe": True}
