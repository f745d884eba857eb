"""The command that a message names for a missing library fits the installation it is read in."""

import importlib.metadata
import json

import pytest

from octjepa.errors import install_command


class Installed:
    requires = (
        "torch>=2.9",
        "transformers>=4.53; extra == 'hf'",
        's3fs>=2024.10 ; extra == "s3"',
        "x>1; extra == 's3'",
    )

    def __init__(self, origin: dict[str, object] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ({"dir_info": {"editable": True}}, 'pip install -c constraints.txt -e ".[hf]", in the checkout'),
        ({"dir_info": {}}, 'pip install "transformers>=4.53"'),
        ({"archive_info": {}}, 'pip install "transformers>=4.53"'),
        (None, 'pip install "octjepa[hf]"'),
    ],
)
def test_a_checkout_installs_from_itself(monkeypatch, origin, message):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    assert install_command("hf") == message
