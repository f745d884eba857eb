"""The English of code and pages gets plainer: no pattern of benchmarks/prose.py occurs more often than its limit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose import (
    AREAS,
    EXCEPTIONS,
    LONG_SENTENCE,
    PATTERNS,
    Text,
    all_hits,
    area_of,
    counts,
    hits_in,
    limits,
    page_texts,
    source_texts,
    unreleased,
    vague_names,
    web_files,
    web_texts,
)

ROOT = Path(__file__).resolve().parents[2]


def patterns_in(words: str) -> set[str]:
    return {hit.pattern for hit in hits_in(Text("page.md", 1, words))}


def test_no_phrase_occurs_more_often_than_its_limit() -> None:
    """`python benchmarks/prose.py --list PATTERN` shows the places; limits only fall."""
    allowed = limits()
    over = {
        (area, name): f"{count}, at most {allowed[area][name]}"
        for area, counted in counts().items()
        for name, count in counted.items()
        if count > allowed[area][name]
    }
    hits = [hit for hit in all_hits() if (area_of(hit), hit.pattern) in over] if over else []
    shown = [f"{hit.file}:{hit.line} {hit.excerpt}" for hit in hits][-40:]
    assert not over, "\n".join([str(over), *shown])


def test_hard_sentences_are_found_and_plain_ones_pass() -> None:
    assert patterns_in("What guards a run, of who must show something") == {"starts with What", "who must"}
    assert patterns_in("Training did harm: an interval is no proof") == {"harm", "is no"}
    assert patterns_in("There is no file. There are no longer any files.") == set()
    assert patterns_in("Hashes alone are kept beside the weights") == {"alone", "beside"}
    assert patterns_in("one; two; three") == {"semicolon chain"}
    assert patterns_in(" ".join(["word"] * 41)) == {LONG_SENTENCE}
    assert patterns_in("The loader skips unreadable volumes and logs their IDs.") == set()


def test_docstrings_messages_comments_and_pages_are_read_but_not_code() -> None:
    source = '"""A module docstring."""\nfound = 1  # a comment here\nprint(f"the value is {found} mm")\n'
    path = ROOT / "src" / "octjepa" / "sample.py"
    texts = [text.words for text in source_texts(path, source)]
    assert texts == ["A module docstring.", "the value is X mm", "a comment here"]
    assert [hit.excerpt for hit in vague_names(path, source)] == ["found"]
    page = "# Title\n\nA `beside` B\nand more.\n\n    beside\n\n```sh\nbeside\n```\n| one | [two](beside) |\n"
    paragraphs = [text.words for text in page_texts(ROOT / "docs" / "page.md", page)]
    assert paragraphs == ["Title", "A X B and more.", "one", "[two]"]


def test_templates_scripts_and_the_unreleased_changes_are_read() -> None:
    html = "<style>a b</style>\n{# a note #}<p>The <b>two</b> {{ words }}.</p><td>one</td>"
    texts = [(text.line, text.words) for text in web_texts(ROOT / "page.html.j2", html)]
    assert texts == [(2, "The two X.")]
    script = 'const a = 1; // a comment\nsay(`${count} of all`, "one");\n'
    texts = [(text.line, text.words) for text in web_texts(ROOT / "page.js", script)]
    assert texts == [(1, "a comment"), (2, "X of all")]
    assert unreleased("# C\n\n## [Unreleased]\n- new\n\n## [0.1.0]\n- old\n") == "# C\n\n## [Unreleased]\n- new\n\n"
    assert {"report.html.j2", "index.html", "viewer.js"} <= {path.name for path in web_files()}


def test_every_pattern_has_a_limit_and_every_exception_a_reason() -> None:
    for area in AREAS:
        assert set(PATTERNS) < set(limits()[area])
    for (file, words), reason in EXCEPTIONS.items():
        assert reason
        assert words in " ".join((ROOT / file).read_text(encoding="utf-8").split()), (file, words)
