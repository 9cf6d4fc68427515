"""Executed notebook -> one HTML file that needs no network: no scripts from elsewhere, formulas as MathML."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any

import latex2mathml.converter
import nbformat
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

# JupyterLab's page without what it would fetch (RequireJS, MathJax, Mermaid, the widget manager) and with the
# alternative text of pictures, which nbconvert's own templates leave out.
_TEMPLATE = """
{%- extends "lab/index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block data_png scoped -%}
{%- set alt = output | get_metadata("alt", "image/png") or "" -%}
{{ super() | replace("<img ", '<img alt="' ~ (alt | escape_html) ~ '" ', 1) }}
{%- endblock -%}
"""
_LOADS = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=\s*["']?(?:https?:)?//[^"'\s>]*""", re.I
)
_LINK = re.compile(r'href="([\w-]+)\.ipynb')
_IMAGE = re.compile(r"<img\b[^>]*>", re.I)
_ALT = re.compile(r"""\balt\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.I)
_PLACEHOLDER = "No description has been provided for this image"  # nbconvert's, where a picture has no text


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return latex2mathml.converter.convert(body.strip())

    def block_math(self, body: str) -> str:
        return latex2mathml.converter.convert(body.strip(), display="block")

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(rf"\begin{{{name}}}{body}\end{{{name}}}")


class _Exporter(HTMLExporter):
    def default_filters(self) -> Any:
        yield from super().default_filters()
        yield "markdown2html", _markdown


def _markdown(source: str) -> str:
    return MarkdownWithMath(renderer=_Renderer(escape=False, anchor_link_text="¶")).render(source)


def render_html(
    notebook: str | os.PathLike[str], html: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Write an executed notebook as one HTML page and return its path.

    Pictures are embedded. Their alternative text is kept: matplotlib's through
    `display(figure, metadata={"image/png": {"alt": "..."}})`.

    Raises:
        ValueError: if the page would fetch something from a network, or a picture has no alternative text.
    """
    node = nbformat.read(os.fspath(notebook), as_version=4)
    if title:
        node.metadata["title"] = title
    exporter = _Exporter(raw_template=_TEMPLATE)
    page, _ = exporter.from_notebook_node(node, {"metadata": {"name": Path(notebook).stem}})
    page = _LINK.sub(r'href="\1.html', page)  # notebooks link to each other, pages to pages
    body = page[page.index("<body") :]
    if fetched := _LOADS.search(page):
        raise ValueError(f"{notebook}: the page would fetch from a network: {fetched.group(0)}")
    if silent := [tag for tag in _IMAGE.findall(body) if not _has_alt(tag)]:
        raise ValueError(
            f"{notebook}: {len(silent)} picture(s) without alternative text, the first {silent[0][:60]}...; "
            'show figures with display(figure, metadata={"image/png": {"alt": "..."}})'
        )
    path = Path(html)
    path.write_text(page, encoding="utf-8")
    return path


def _has_alt(tag: str) -> bool:
    match = _ALT.search(tag)
    return match is not None and (match[1] or match[2] or "").strip() not in ("", _PLACEHOLDER)


def heading(notebook: str | os.PathLike[str]) -> str:
    """The notebook's title: its first Markdown heading, or the file's name."""
    node = nbformat.read(os.fspath(notebook), as_version=4)
    for cell in node.cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            if line.startswith("# "):
                return line[2:].strip()
    return Path(notebook).stem


def index_page(title: str, entries: list[tuple[str, str, str]]) -> str:
    """The book's first page. Each entry is (file name, title, a note such as how long the notebook ran)."""
    rows = "\n".join(
        f'  <li><a href="{escape(name)}">{escape(text)}</a> <span>{escape(note)}</span></li>'
        for name, text, note in entries
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 18px/1.6 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1rem; }}
  li {{ margin: 0.3rem 0; }}
  span {{ opacity: 0.7; font-size: 0.85em; }}
</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<ul>
{rows}
</ul>
</main>
</body>
</html>
"""
