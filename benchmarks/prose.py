"""How plain the English is: counts phrases that make a reader parse a sentence twice.

    python benchmarks/prose.py [--list PATTERN] [--write]

Input are the docstrings, comments and messages of src/octjepa, benchmarks and scripts, the HTML templates, the texts of
the viewer, the pages of docs, README, CONTRIBUTING and SECURITY, and the part [Unreleased] of the changelog.
Output is a count per pattern and area: `package` (with its pages), and `programs` (benchmarks and scripts).
`--list PATTERN` prints every place, `--write` lowers the limits to today's counts.
`make check` compares the counts with benchmarks/prose_limits.json (tests/house/test_prose.py). A limit only falls.

A pattern is a sign of a hard sentence, not a proof. A place where the phrase is the right one goes to `EXCEPTIONS`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS_FILE = Path(__file__).with_name("prose_limits.json")
GENERATED = ("docs/exam/",)
PROGRAMS = ("benchmarks", "scripts")
AREAS = ("package", "programs")
# Tags of HTML that do not end a sentence; every other tag does.
INLINE_TAGS = re.compile(r"</?(?:a|abbr|b|code|em|i|kbd|small|span|strong|sub|sup)\b[^>]*>")
MARKED = re.compile(r"<!-- (?!end)[a-z ]+ -->.*?<!-- end", re.DOTALL)  # written by a script
LONGEST_SENTENCE = 40
LONG_SENTENCE, VAGUE_NAME = "sentence of more than 40 words", "variable without a noun"
VAGUE_NAMES = {"found", "one", "known", "given", "made", "own", "mine", "theirs", "some"}

# Name of a pattern -> regular expression. The comment says what to write.
PATTERNS = {
    "is no": r"(?<!there )\b(?:is|are|was|were) no (?!longer|more)",  # "is not a run"
    "alone": r"\balone\b",  # "only hashes"
    "nobody": r"\b(?:nobody|no one|somebody|everybody)\b",  # name the person: user, subject, grader
    "starts with What": r"^(?:What|Who|Which) (?!if\b)(?!.*\?)",  # name the thing
    "who must": r"\b(?:for|to|of|by) who\b|\bwho must\b|\bthat which\b",  # name the person
    "beside": r"\bbeside\b",  # "next to", "in addition to", "compared with"
    "where as if": r"\bwhere (?:there|that|it|they|one|none|this|no|nothing|both)\b",  # "if", "when"
    "for as because": r", for (?:it|they|he|she|there|this|that|these|those|what|who|such|nothing)\b",  # "because"
    "but for": r"\bbut for\b|\bsave for\b",  # "except"
    "of its own": r"\bof (?:its|their|your|one's|his|our) own\b",  # "separate", "your"
    "the one": r"\bthe ones?\b|\bones\b",  # repeat the noun
    "asked of": r"\basked (?:of|for)\b|\bis asked\b|\bare asked\b|\bwas asked\b",  # "required", "requested"
    "taken for": r"\btaken for\b|\bis believed\b|\bare believed\b",  # "is used", "is mistaken for"
    "mend": r"\bmend(?:s|ed|ing)?\b",  # "fix"
    "harm": r"\b(?:did|does|do) harm\b",  # "reduced performance"
    "twin": r"\btwins?\b",  # "randomly initialised encoder"
    "floor": r"(?<!noise )\bfloors?\b|\bceilings?\b",  # "baseline", "reference", "upper bound"
    "reading": r"\breadings?\b(?! (?:order|scans|files|a file))",  # "evaluation run"
    "figure as number": r"\bfigures?\b",  # "metric", "value"; a picture is an exception
    "comma too": r", too\b",  # "also", or nothing
    "goes on": r"\b(?:go|goes|going|went) on\b",  # "continue"
    "beforehand": r"\bbeforehand\b|\bin vain\b|\bat hand\b|\bthereof\b|\btherein\b|\bwhereof\b",  # plain words
    "cannot be had": r"\bcannot be had\b|\bcan be had\b|\bis had\b",  # "is not available"
    "semicolon chain": r";[^.;]*;",  # two sentences or a list
    "by which": r"\b(?:by|with|of|from|on|to|at) which\b",  # two sentences
}
# (file, words around the phrase): why the phrase is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/octjepa/canonical/plausibility.py", "the floor of a macular hole"): "anatomy",
}


@dataclass(frozen=True)
class Text:
    """A piece of prose: its file (relative to the root), its line and its words."""

    file: str
    line: int
    words: str


@dataclass(frozen=True)
class Hit:
    """A place where a pattern occurs."""

    pattern: str
    file: str
    line: int
    excerpt: str


def source_files() -> list[Path]:
    """The Python files of the package and of the programs next to it."""
    return sorted(file for folder in ("src/octjepa", *PROGRAMS) for file in (ROOT / folder).rglob("*.py"))


def page_files() -> list[Path]:
    """The Markdown pages written by hand."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in pages if not _name(page).startswith(GENERATED)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def source_texts(path: Path, source: str) -> Iterator[Text]:
    """Docstrings, comments, and the strings of at least two words: messages and help texts."""
    name = _name(path)
    tree = ast.parse(source)
    inside_f_string = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside_f_string:
            words = node.value
        else:
            continue
        if len(words.split()) >= 2:
            yield Text(name, node.lineno, " ".join(words.split()))
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#! ")
            # A comment of several lines is one text.
            if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == token.start[0]:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{words}")
            else:
                comments.append((token.start[0], words))
    yield from (Text(name, line, " ".join(words.split())) for line, words in comments)


def page_texts(path: Path, page: str) -> Iterator[Text]:
    """Paragraphs, list items and table cells of a page, without code."""
    page = MARKED.sub(lambda block: "\n" * block[0].count("\n"), page)
    page = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    start, lines = 1, []
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_code = line.startswith("    ") and not lines
        begins = re.match(r"\s*(?:[-*] |\d+\. |\||#)", line)
        if lines and (not line.strip() or begins):
            yield Text(_name(path), start, _plain(" ".join(lines)))
            lines = []
        if line.startswith("|"):
            yield from (Text(_name(path), number, _plain(cell)) for cell in line.split("|") if cell.strip(" -:"))
        elif line.strip() and not is_code:
            start = start if lines else number
            lines.append(line.strip().lstrip("#-* "))


def unreleased(changelog: str) -> str:
    """The changelog up to its first release."""
    return re.split(r"^## \[\d", changelog, maxsplit=1, flags=re.MULTILINE)[0]


def web_files() -> list[Path]:
    """The HTML templates of the package, and pages and scripts of the viewer."""
    package = ROOT / "src" / "octjepa"
    return sorted(path for ending in ("j2", "html", "js") for path in package.rglob(f"*.{ending}"))


def web_texts(path: Path, source: str) -> Iterator[Text]:
    """Pieces of at least two words: text between tags of HTML, strings and comments of JavaScript.

    A value that is filled in (`{{ }}` of Jinja, `${ }` of JavaScript) counts as the word X.
    """
    if path.suffix == ".js":
        source = re.sub(r"\$\{[^{}]*\}", "X", source)
        pieces = [(found.start(), found[0]) for found in re.finditer(r"//[^\n]*|`[^`]*`|\"[^\"\n]*\"", source)]
    else:
        blank = re.compile(r"<(style|script)\b.*?</\1>|<!--.*?-->|\{#.*?#\}|\{%-?.*?%\}", re.DOTALL)
        source = blank.sub(lambda block: "\n" * block[0].count("\n"), source)
        source = INLINE_TAGS.sub("", re.sub(r"\{\{.*?\}\}", "X", source, flags=re.DOTALL))
        pieces = [(found.start(), found[0]) for found in re.finditer(r"[^<>]+(?=<|$)", source)]
    for start, piece in pieces:
        words = piece.strip('/`" \n').split()
        if len(words) >= 2:
            yield Text(_name(path), source.count("\n", 0, start) + 1, " ".join(words))


def _plain(text: str) -> str:
    """Markdown without inline code and link targets."""
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", text)).strip()


def hits_in(text: Text) -> Iterator[Hit]:
    """The places of all patterns in a text, without those of `EXCEPTIONS`."""
    for pattern, expression in PATTERNS.items():
        for match in re.finditer(expression, text.words, re.IGNORECASE if pattern != "starts with What" else 0):
            excerpt = text.words[max(0, match.start() - 50) : match.end() + 50]
            if not any(text.file == file and words in excerpt for file, words in EXCEPTIONS):
                yield Hit(pattern, text.file, text.line, excerpt)
    for sentence in re.split(r"(?<=[.!?:;])\s+", text.words):
        if len(sentence.split()) > LONGEST_SENTENCE:
            yield Hit(LONG_SENTENCE, text.file, text.line, sentence)


def vague_names(path: Path, source: str) -> Iterator[Hit]:
    """Variables and arguments whose name is not a noun."""
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name in VAGUE_NAMES:
            yield Hit(VAGUE_NAME, _name(path), getattr(node, "lineno", 0), name)


def all_hits() -> list[Hit]:
    """Every place in the package, the programs and the pages."""
    hits: list[Hit] = []
    for path in source_files():
        source = path.read_text(encoding="utf-8")
        hits += [hit for text in source_texts(path, source) for hit in hits_in(text)]
        hits += vague_names(path, source)
    for path in page_files():
        hits += [hit for text in page_texts(path, path.read_text(encoding="utf-8")) for hit in hits_in(text)]
    changelog = ROOT / "CHANGELOG.md"
    texts = [*page_texts(changelog, unreleased(changelog.read_text(encoding="utf-8")))]
    texts += [text for path in web_files() for text in web_texts(path, path.read_text(encoding="utf-8"))]
    hits += [hit for text in texts for hit in hits_in(text)]
    return hits


def area_of(hit: Hit) -> str:
    """The area whose limits a place counts towards."""
    return "programs" if hit.file.partition("/")[0] in PROGRAMS else "package"


def counts() -> dict[str, dict[str, int]]:
    """Area -> pattern -> number of places."""
    counted = Counter((area_of(hit), hit.pattern) for hit in all_hits())
    names = (*PATTERNS, LONG_SENTENCE, VAGUE_NAME)
    return {area: {name: counted[area, name] for name in names} for area in AREAS}


def limits() -> dict[str, dict[str, int]]:
    """Area -> pattern -> the most places that `make check` allows."""
    return dict(json.loads(LIMITS_FILE.read_text(encoding="utf-8")))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="PATTERN", help="print every place of this pattern, or of `all`")
    parser.add_argument("--in", dest="folder", default="", help="only files whose path begins with this")
    parser.add_argument("--write", action="store_true", help="lower the limits to today's counts")
    arguments = parser.parse_args()
    if arguments.list:
        for hit in all_hits():
            if arguments.list in ("all", hit.pattern) and hit.file.startswith(arguments.folder):
                print(f"{hit.file}:{hit.line}  [{hit.pattern}] {hit.excerpt}")
        return
    limit = limits() if LIMITS_FILE.is_file() else {}
    lowered: dict[str, dict[str, int]] = {}
    for area, counted in counts().items():
        allowed = limit.get(area, counted)
        print(area)
        for name, count in counted.items():
            print(f"{count:>6}  at most {allowed.get(name, count):>6}  {name}")
        print(f"{sum(counted.values()):>6}  at most {sum(allowed.values()):>6}  in all")
        lowered[area] = {name: min(count, allowed.get(name, count)) for name, count in counted.items()}
    if arguments.write:
        LIMITS_FILE.write_text(json.dumps(lowered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
