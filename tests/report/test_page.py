"""The page: whole, self-contained, honest about what is missing and about intervals that hold zero."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from octjepa.config import load_recipe
from octjepa.encoders import load_encoder
from octjepa.errors import OctjepaError, UsageError
from octjepa.report import sections, write_report
from octjepa.report.contents import read_contents
from octjepa.report.figures.eyes import MAX_SLICES
from octjepa.views.masks import FAMILIES
from page_outline import Outline


@pytest.mark.slow
def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    references = re.findall(r"(?:src|href|action|data|poster|srcset)\s*=\s*[\"']?([^\"'\s>]+)", page)
    references += re.findall(r"url\(\s*[\"']?([^\"')]+)", page) + re.findall(r"@import\s+(\S+)", page)
    assert references
    assert [one[:60] for one in references if not one.startswith(("#", "data:image/png;base64,"))] == []
    assert Outline(page).scripts == 0
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.slow
def test_it_is_whole_html_with_every_section_named_once(page: str) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.targets) <= set(outline.ids)
    for section in ("cohort", "eyes", "masks", "training", "tokens", "probe", "occlusion", "files", "reproduce"):
        assert section in outline.ids
    assert outline.unlabelled == []
    assert len(page.encode()) < 5e6


@pytest.mark.slow
def test_every_part_is_drawn(page: str) -> None:
    assert page.count('<article class="eye">') == 3
    assert page.count('class="slabs"') == len(FAMILIES)
    strips, extremes = 3 * MAX_SLICES, 2 * 3  # three volumes of lowest quality and three of highest
    assert len(re.findall(r'<svg class="scan"', page)) == 3 * 2 + 4 * len(FAMILIES) + 3 * 2 + 3 * 2 + strips + extremes
    assert page.count('<svg class="chart"') == 6 + 1
    assert "How often each position is hidden" in page
    assert page.count('class="tok-colour"') > 20
    assert "Missing:" not in page
    recipe = load_recipe("tiny_cpu")
    (seen, predicted), left = recipe.mask_counts, recipe.grid_tokens - recipe.token_count
    hidden = recipe.token_count - seen - predicted  # of the hidden tokens only a share are targets
    counts = f"{seen} seen, {predicted} predicted, {hidden} hidden, {left} left out of {recipe.grid_tokens} tokens"
    assert counts in page


@pytest.mark.slow
def test_every_refused_file_stands_in_the_table_with_its_reason(page: str) -> None:
    table = page[page.index('id="quarantine"') : page.index("<summary>Accepted: ")]
    assert table.count('<tr><td class="file">') == 3
    for word in (
        "truncated",
        "the file ends before its pixel data do",
        "not_dicom",
        "duplicate_content",
        "an HTML page",
    ):
        assert word in table
    assert table.count("not a loss") == 1
    assert "12 of 15" in page
    flow = page[page.index('<ol class="flow">') : page.index("</ol>")]
    assert "<b>2</b> refused<ul><li>1 not dicom</li><li>1 truncated</li>" in flow
    assert "<b>1</b> rightly left out<ul><li>1 duplicate content</li>" in flow


@pytest.mark.slow
def test_every_accepted_file_stands_in_the_table_with_doubts_marked(page: str) -> None:
    for number in range(1, 12):
        assert f"eyes/{number:02d}.dcm" in page
    assert "protocol, uncertain" in page
    assert "frames reversed" in page


@pytest.mark.slow
def test_file_names_are_escaped(page: str) -> None:
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;eye&#39;)&lt;/script&gt;.dcm" in page
    assert "&lt;b&gt;bold&lt;/b&gt;.dcm" in page


@pytest.mark.slow
def test_no_path_of_the_machine_is_shown(page: str, made: Path) -> None:
    assert str(made) not in page
    assert "/private/" not in page
    assert "sub/page.dcm" in page
    assert "…/bold.dcm ends after 17 bytes" in page


@pytest.mark.slow
def test_no_unrendered_value(page: str) -> None:
    for sign in ("None", "nan", "object at 0x", "built-in", "{{", "Undefined"):
        assert re.search(rf"(?<![\w-]){re.escape(sign)}(?![\w-])", page) is None, sign


@pytest.mark.slow
@pytest.mark.parametrize(
    ("low", "high", "message", "badge"),
    [
        (0.02, 0.08, "The interval excludes zero: training helped on these people.", "✓ holds"),
        (-0.02, 0.06, "this run does not show that training helped", "? not shown"),
        (-0.09, -0.01, "training reduced performance on these people", "✕ fails"),
    ],
)
def test_the_sentence_follows_the_interval(
    demo: Path, rewrite_probe: Callable[[Path, float, float], None], low: float, high: float, message: str, badge: str
) -> None:
    shutil.rmtree(demo / "run")
    shutil.rmtree(demo / "store")
    rewrite_probe(demo, low, high)
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.count(message) == 2  # in the head and next to the drawing
    card = text[text.index("<h2>Trained minus untrained") :]
    assert badge in card[:200]


@pytest.mark.slow
def test_missing_parts_are_named_with_what_supplies_them(demo: Path) -> None:
    shutil.rmtree(demo / "run" / "checkpoints")
    (demo / "probe.json").unlink()
    (demo / "embeddings.parquet").write_bytes(b"no parquet")
    text = write_report(demo).read_text(encoding="utf-8")
    for part in ("the token maps", "the occlusion maps", "the probe", "the embeddings"):
        assert f"Missing: {part}." in text
    assert "it is not known whether training helped" in text
    assert str(demo) not in text
    assert 'class="tok-colour"' not in text


def test_a_probe_of_other_weights_than_those_of_the_run_is_named(demo: Path) -> None:
    """A table of an earlier checkpoint: the probe does not describe the encoder that the page is about."""
    import pyarrow.parquet as pq

    path = demo / "embeddings.parquet"
    missing: list[list[str]] = []
    for weights in (load_encoder(demo / "run").weights_hash(), "0" * 64):
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata(table.schema.metadata | {b"octjepa.weights": weights}), path)
        _, parts = sections._probe(read_contents(demo))
        missing.append([part.part for part in parts])
    assert missing == [[], ["a probe of the run's weights"]]


@pytest.mark.slow
def test_a_store_made_otherwise_gives_no_masks_and_no_maps(demo: Path) -> None:
    recipe = demo / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("orientation: OD", "orientation: native"))
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.count("orientation: store OD, recipe native") == 3
    assert 'class="slabs"' not in text


@pytest.mark.slow
def test_a_run_and_a_store_have_pages_of_their_own(demo: Path, tmp_path: Path) -> None:
    of_run = write_report(demo / "run", tmp_path / "deep" / "run.html").read_text(encoding="utf-8")
    assert "training run report" in of_run
    assert of_run.count('<svg class="chart"') == 6 + 1
    assert "Missing: the probe." in of_run
    of_store = write_report(demo / "store").read_text(encoding="utf-8")
    assert (demo / "store" / "report.html").is_file()
    assert 'id="probe"' not in of_store
    assert of_store.count('<article class="eye">') == 12, "every eye of a small store"


def test_what_cannot_be_reported_on_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"expected a run or fine-tuning \(run\.json\), a segmentation \(head\)"):
        write_report(tmp_path)
    segmented = tmp_path / "segmented"
    segmented.mkdir()
    for name in ("index.html", "classes.json", "eye_boundaries.npz"):
        (segmented / name).touch()
    with pytest.raises(UsageError, match=r"results of `octjepa segment`, .*: open .*segmented/index\.html"):
        write_report(segmented)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(OctjepaError, match=r"run\.json is damaged"):
        write_report(tmp_path)


@pytest.mark.slow
def test_the_file_appears_whole_or_not_at_all(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = demo / "report.html"
    out.write_text("before", encoding="utf-8")
    with pytest.raises(UsageError, match="is a folder"):
        write_report(demo, demo / "store")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OctjepaError, match="the disk is full while writing"):
        write_report(demo)
    assert out.read_text(encoding="utf-8") == "before"
    assert list(demo.glob(".report*")) == []


@pytest.mark.slow
def test_people_in_two_splits_are_an_alarm(demo: Path) -> None:
    import pandas as pd

    index = demo / "store" / "volumes.parquet"
    table = pd.read_parquet(index)
    table.loc[table["source"] == "eyes/01.dcm", "split"] = "test"
    table.to_parquet(index)
    shutil.rmtree(demo / "run")
    text = write_report(demo).read_text(encoding="utf-8")
    assert "1 person is in more than one split" in text
    assert json.loads((demo / "probe.json").read_text())["rows"]


def fill_tuning(path: Path, store: str) -> None:
    """The folder of a finished fine-tuning to two labels, as `octjepa finetune` leaves it."""
    path.mkdir()
    counts = {"train": [5, 7], "val": [3, 3], "test": [4, 6]}
    targets = [{"target": name, "task": "binary", "classes": ["no", "yes"]} for name in ("drusen", "fluid")]
    rows = [
        {
            "name": name,
            "target": one["target"],
            "probe": probe,
            "pool": "none",
            "metric": metric,
            "value": value,
            "low": value - 0.1,
            "high": value + 0.1,
            "n": 10,
            "n_people": 10,
        }
        for one in targets
        for metric in ("auroc", "accuracy")
        for name, probe, value in (("small", "tuned", 0.83), ("small", "linear", 0.7), ("histogram", "linear", 0.6))
    ]
    paired = [
        {
            "name": "small",
            "target": one["target"],
            "metric": "auroc",
            "against": against,
            "reference": reference,
            "reference_probe": "linear",
            "difference": 0.13,
            "low": 0.04,
            "high": 0.22,
            "n_people": 24,
            "p": 0.01,
        }
        for one in targets
        for against, reference in (("frozen", "small"), ("best_baseline", "histogram"))
    ]
    lines = [{"update": u, "loss": 1 / u, "grad_norm": 2.0, "blocks": u - 1, "lr": 1e-3} for u in (1, 2, 3)]
    files = {
        "run.json": {
            "kind": "fine-tuning",
            "name": "two signs",
            "encoder": "small",
            "targets": targets,
            "level": "eye",
            "volumes": {"train": 12, "val": 6, "test": 10},
            "store": store,
            "data_hash": "d" * 64,
        },
        "results.json": {
            "rows": rows,
            "paired": paired,
            "checkpoint": "/srv/someone/tuned/step-00000002",
            "choices": [{"name": "small", "probe": "tuned", "pool": "tokens", "update": 2, "of": 3, "by": "val"}],
            "targets": [{**one, "label_hash": "h", "counts": counts} for one in targets],
            "faults": [{"kind": "test_used_before", "what": "drusen: its test set is used for the 2nd time"}],
            "notes": ["<b>fluid</b>: 1 volume has no label"],
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"update": 3, "val_loss": 0.5}])
    (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    (path / "recipe.yaml").write_text("name: two signs\n", encoding="utf-8")


@pytest.mark.slow
def test_a_fine_tuning_stands_beside_its_baselines_with_the_faults_on_top(
    made: Path, tmp_path: Path, as_tuned: Callable[[Path], None]
) -> None:
    fill_tuning(tmp_path / "tuning", os.path.relpath(made / "store", tmp_path / "tuning"))
    as_tuned(tmp_path / "tuning")
    page = write_report(tmp_path / "tuning").read_text(encoding="utf-8").replace("<wbr>", "")
    outline = Outline(page)
    assert (outline.open, outline.scripts, outline.unlabelled) == ([], 0, [])
    assert set(outline.targets) <= set(outline.ids)
    assert {"cohort", "eyes", "training", "probe", "occlusion", "files", "reproduce"} <= set(outline.ids)
    assert not {"masks", "tokens"} & set(outline.ids)
    assert page.index("test set is used for the 2nd time") < page.index('id="cohort"')
    assert "Missing" not in page
    assert "tuned to drusen (binary), fluid (binary) on 12 OCT volumes for 3 updates" in page
    assert "The tuned encoder scores higher than a linear probe on the same encoder frozen by 0.130" in page
    assert page.count("+0.130 (+0.040 to +0.220). ") == 4
    assert "minus histogram, the best baseline on these very people" in page
    ours = re.findall(r'<tr class="ours">.*?</tr>', page, re.DOTALL)
    assert [("tuned" in row, "0.830" in row) for row in ours] == [(True, True)] * 2
    assert "labelled eyes of each class" in page
    assert "All 12 rows" in page
    assert "&lt;b&gt;fluid" in page
    assert "/srv/someone" not in page
    maps = page[page.index('<section id="occlusion">') :]
    assert maps.index("drusen: predicted yes with 0.75: wrong, it is no.") < maps.index(
        "drusen: predicted yes with 0.75: correct."
    )
    assert maps.count('<svg class="scan"') == 2 * 2
    assert "What this does not show:" in maps
    (tmp_path / "tuning" / "predictions.parquet").unlink()
    unfinished = write_report(tmp_path / "tuning").read_text(encoding="utf-8")
    assert "Missing: the occlusion maps.</strong> there is no predictions.parquet here" in unfinished


def test_a_folder_of_a_head_that_holds_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "layers" / "head").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"head holds no segmentation head: give the folder that octjepa segment"):
        write_report(tmp_path / "layers")
