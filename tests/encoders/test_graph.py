"""The ONNX form: another runtime computes the same features, of any number of volumes and tokens."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from octjepa.encoders import export as exporting
from octjepa.encoders import graph
from octjepa.encoders.export import export
from octjepa.encoders.pretrained import PretrainedEncoder
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from synthetic import MemoryStore, small_recipe

# Not `importorskip`: the import takes a second, and every worker imports this file.
pytestmark = pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed")


def an_encoder(**model: str) -> PretrainedEncoder:
    recipe = small_recipe(model=model)
    torch.manual_seed(1)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "random")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{"positions": "rope", "position_unit": "mm"}, {"positions": "rope_tiled"}, {"positions": "sincos"}]
)
def test_onnxruntime_gives_the_same_features(
    model: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    encoder = an_encoder(**model)
    monkeypatch.setattr(exporting, "load_encoder", lambda source: encoder)
    files = export("any", "onnx", tmp_path / "out")
    assert files == ["model.onnx", "preprocessing.json", "README.md", "SHA256SUMS"]
    for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    contract = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert contract["preprocessing"] == encoder.recipe.preprocessing.model_dump(mode="json")
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    assert b".py" not in content  # nor where the exporter's files lie
    assert str(Path.home()).encode() not in content
    positions = np.asarray(contract["inputs"]["grid_positions"], np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["octjepa"])
    assert about["recipe"] == encoder.recipe.model_dump(mode="json")
    volumes = list(MemoryStore(encoder.recipe.preprocessing).volumes.values())[:3]
    for some in (volumes, volumes[:1]):
        chosen = [encoder.select_tokens(volume) for volume in some]
        assert all(np.array_equal(positions[one.grid_index], one.positions) for one in chosen)
        for tokens in (len(chosen[0].patches), 3):
            given = {
                "patches": np.stack([one.patches[:tokens] for one in chosen]),
                "positions": np.stack([one.positions[:tokens] for one in chosen]),
            }
            (found,) = session.run(["features"], given)
            ours = encoder.encoder(*map(torch.from_numpy, given.values())).numpy()
            np.testing.assert_allclose(found, ours, atol=1e-4, rtol=0)
            assert np.abs(ours).max() > 0.1


def test_an_absent_library_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"\[onnx\]"):
        graph.graph_of(an_encoder(), {})


def test_what_one_file_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LARGEST_BYTES", 1000)
    with pytest.raises(UsageError, match="do not fit into one ONNX file"):
        graph.graph_of(an_encoder(), {})


def test_an_encoder_that_has_no_graph_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise torch.onnx.OnnxExporterError("no such operator\nat great length")

    monkeypatch.setattr(torch.onnx, "export", refuses)
    with pytest.raises(UsageError, match=r"\(no such operator\): export with --format safetensors"):
        graph.graph_of(an_encoder(), {})
