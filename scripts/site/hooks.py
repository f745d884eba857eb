"""MkDocs hooks: the pages of docs/ as they are in the repository, and what is outside of docs/ added to the site.

Added are the generated reference, the root's Markdown files, the lab log and the notebooks. Links between files of the
repository are rewritten to the pages of the site, so that one source serves both.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Path in the repository -> page of the site, for what stands outside of docs/.
OUTSIDE = {
    "README.md": "about.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "lab/README.md": "lab/index.md",
    "lab/2026-11.md": "lab/2026-11.md",
    "notebooks/01_read_a_volume.ipynb": "notebooks/01_read_a_volume.md",
    "notebooks/02_embeddings_and_a_probe.ipynb": "notebooks/02_embeddings_and_a_probe.md",
    "notebooks": "notebooks/01_read_a_volume.md",
    "LICENSE": "files/LICENSE.txt",
    "CITATION.cff": "files/CITATION.cff.txt",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
NESTED = re.compile(r"^ {2,3}(?=[-*] )", re.MULTILINE)  # Python-Markdown nests by four spaces, GitHub by two
LIST_AFTER_TEXT = re.compile(r"^(?P<text>(?![-*|>#\d ]|```)[^\n]*\S[^\n]*)\n(?=[-*] |1\. )", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds what stands outside of docs/, and the reference."""
    for origin, page in OUTSIDE.items():
        path = ROOT / origin
        if path.is_file():
            text = notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    worker = Path(__file__).with_name("iframe-worker.js")
    files.append(File.generated(config, f"javascripts/{worker.name}", abs_src_path=str(worker)))
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site needs them, and a blank line before a list, which Python-Markdown needs and GitHub does not."""
    at = page.file.src_uri
    origin = next((origin for origin, uri in OUTSIDE.items() if uri == at), f"docs/{at}")

    def rewritten(match: re.Match[str]) -> str:
        target, sign, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        uri = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if uri is None:
            raise ValueError(
                f"{origin} links to {match[2]}, which is no page of the site: add it to OUTSIDE in {__file__}"
            )
        return f"{match[1]}{posixpath.relpath(uri, posixpath.dirname(at) or '.')}{sign}{anchor}{match[3]}"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    prose = [
        part
        if part.startswith("```")
        else LIST_AFTER_TEXT.sub(r"\g<text>\n\n", NESTED.sub("    ", LINK.sub(rewritten, part)))
        for part in blocks
    ]
    return "".join(prose)


def notebook(path: Path) -> str:
    """A notebook as Markdown: text, code, and the outputs that it was saved with."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/plain") or []
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="output of the cell above" src="data:image/png;base64,{picture}">')
            elif text:
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
