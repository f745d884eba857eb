"""Names of other people in Markdown stay words."""

from __future__ import annotations

from octjepa.report.markdown import escape_markdown


def test_names_are_read_neither_as_markdown_nor_as_html() -> None:
    assert escape_markdown("a|b\\|c") == "a\\|b\\\\\\|c"
    assert escape_markdown("<img src=x> &amp; ![x](y)") == "&lt;img src=x> &amp;amp; \\!\\[x\\](y)"
    assert escape_markdown("one\n\n# two") == "one \\# two"
    assert escape_markdown("zones_whitened, 0.81") == "zones_whitened, 0.81"
