"""Encoders on the Hugging Face Hub, by `huggingface_hub` (extra `hf`): pushed with a card, loaded by name.

Only these functions use the network. Credentials are those of `huggingface_hub` (`hf auth login`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octjepa.encoders.export import Form, export
from octjepa.encoders.pretrained import PretrainedEncoder, load_encoder
from octjepa.errors import UsageError, install_command

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.safetensors", "*.json", "README.md", "SHA256SUMS")


def push_to_hub(
    source: str | Path,
    name: str,
    form: Form = "safetensors",
    private: bool = True,
    licence: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Exports the encoder of `source`, uploads it to the model repository `name` (owner/name) and returns its URL.

    form: as in `octjepa export --format`. private: of a repository that does not exist yet and is created. licence: an
    identifier of the Hub, such as "apache-2.0". metrics: metric name -> value, for the model card.
    Raises what `export` raises; UsageError for an invalid name, no network or no permission to write.
    """
    _check_name(name)
    with tempfile.TemporaryDirectory() as folder:
        export(source, form, Path(folder) / "export", licence, metrics)
        return upload_folder(Path(folder) / "export", name, private)


def upload_folder(folder: Path, name: str, private: bool = True) -> str:
    """Uploads an exported folder to the model repository `name`, creates it if needed, and returns its URL."""
    _check_name(name)
    with _one_line(name) as api:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=[".*"])
        return f"{api.endpoint}/{name}"


def from_pretrained(name: str | Path, revision: str | None = None) -> PretrainedEncoder:
    """Loads an encoder from a local folder or from a model repository of the Hugging Face Hub.

    name: a folder, or a repository (owner/name), which is downloaded to the Hub's cache. revision: a branch, tag or
    commit. Raises what `load_encoder` raises; UsageError if there is no such repository or no network.
    """
    if Path(name).exists():
        return load_encoder(name)
    _check_name(str(name))
    with _one_line(str(name)) as api:
        folder = api.snapshot_download(str(name), revision=revision, allow_patterns=list(_FILES))
    return load_encoder(folder)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise _not_a_name(name)


def _not_a_name(name: str) -> UsageError:
    return UsageError(f"{name} is neither a folder nor a name on the Hugging Face Hub: expected owner/name")


@contextmanager
def _one_line(name: str) -> Iterator[Any]:
    """The Hub's interface, whose errors become one line with the way out."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise UsageError(f"the Hugging Face Hub needs huggingface_hub: {install_command('hf')}") from None
    api = HfApi()
    try:
        yield api
    except HFValidationError:  # such as ../run, a folder that is not there
        raise _not_a_name(name) from None
    except RepositoryNotFoundError:
        raise UsageError(f"{api.endpoint} has no repository {name}, or it is private: hf auth login") from None
    except HfHubHTTPError as error:
        raise UsageError(f"{api.endpoint} refuses {name}: {str(error).splitlines()[0]}") from None
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise _unreachable(api.endpoint, name, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "requests"):  # the Hub's transport
            raise
        raise _unreachable(api.endpoint, name, error) from None


def _unreachable(endpoint: str, name: str, error: Exception) -> UsageError:
    return UsageError(
        f"{name} is not in the local cache, and {endpoint} is not reached ({type(error).__name__}): give a folder, or "
        "try again with a network"
    )
