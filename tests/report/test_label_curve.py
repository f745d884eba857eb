"""The table of figures by number of labelled people, and where it stands on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octjepa.evaluate.results import ProbePaired, Row, WithFewerLabels
from octjepa.report import write_report
from octjepa.report.label_curve import label_curve

READING = {"target": "macro", "metric": "auroc", "probe": "linear", "pool": "mean_std_max"}


def test_the_reading_that_paired_named_stands_at_every_number_and_at_all() -> None:
    few = WithFewerLabels((Row("ours", **READING, value=0.6), Row("ours", **{**READING, "metric": "auprc"}, value=0.1)))
    none, paired = WithFewerLabels(), ProbePaired(**READING)
    rows = [Row("ours", **READING, value=0.8), Row("histogram", **{**READING, "pool": "none"}, value=0.5)]
    curve = label_curve({"10": few, "999": none}, rows, paired)
    assert curve is not None
    assert curve.columns == ["10 people", "999 people", "all"]
    assert [[one and one.value for one in row.results] for row in curve.rows] == [
        [0.6, None, 0.8],
        [None, None, 0.5],
    ]
    assert label_curve({}, rows, paired) is None
    assert label_curve({"10": few}, rows, None) is None
    assert label_curve({"10": none}, rows, paired) is None


@pytest.mark.slow
def test_the_page_shows_it_below_the_probe(demo: Path) -> None:
    probe = json.loads((demo / "probe.json").read_text(encoding="utf-8"))
    few = [{**row, "value": 0.61} for row in probe["rows"] if row["target"] == "macro"]
    probe["labelled"] = {"10": {"rows": few, "comparisons": [], "left_out": []}}
    (demo / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    section = text[text.index('id="probe"') :]
    table = section[section.index("With fewer labels") :].split("</table>")[0]
    words = " ".join(re.sub(r"<[^>]+>", " ", table).split())
    assert "10 people all" in words
    assert words.count("0.610") == 5


@pytest.mark.slow
def test_subgroups_stand_beside_each_other_and_small_ones_with_their_reason(demo: Path) -> None:
    probe = json.loads((demo / "probe.json").read_text(encoding="utf-8"))
    figure = {"value": 0.731, "low": 0.61, "high": 0.81, "n": 40, "n_people": 23, "people_by_class": {"0": 12, "1": 11}}
    scored = {
        "target": "glaucoma",
        "probe": "linear",
        "pool": "mean",
        "column": "sex",
        "equity_scaled": None,
        "left_out": {"m": "4 test people, at least 6 are needed"},
    }
    probe["subgroups"] = [
        {**scored, "name": name, "metric": metric, "groups": {"f": figure}}
        for name in ("ours", "untrained")
        for metric in ("auroc", "ece")
    ]
    (demo / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    table = text[text.index("By subgroup") :].split("</table>")[0]
    words = " ".join(re.sub(r"<[^>]+>", " ", table).split())
    assert "glaucoma, auroc by sex; intervals are over people." in words
    assert "sex People ours untrained f 23 0.731" in words
    assert words.count("0.731") == 2
    assert "m not measured: 4 test people, at least 6 are needed" in words
