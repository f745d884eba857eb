"""Objects in emulated S3 and GCS: what is written is read back, and what goes wrong is borne or told."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bucket_servers import BUCKET, Bucket, bucket_of
from faulty_proxy import Fault, FaultyProxy
from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.remote import info, is_remote, join, list_objects, put, put_bytes, read_bytes, remove
from octjepa.remote.address import parse
from octjepa.remote.bucket import connection
from octjepa.remote.retry import RetryPolicy, with_retries

TRANSIENT = ["429", "500", "503", "408", "delay", "truncate", "shorten", "reset", "corrupt"]
EYE = bytes(range(256)) * 40


def test_addresses_are_reported_from_paths() -> None:
    assert [is_remote(text) for text in ("s3://b/k", "gs://b", "eyes/s3", "/data", "C:\\eyes")] == [True] * 2 + [
        False
    ] * 3
    assert not is_remote(Path("/data/eyes"))
    assert join("s3://b/store/", "/chunks/", "aa") == "s3://b/store/chunks/aa"
    with pytest.raises(UsageError, match="lost a slash"):
        is_remote(Path("s3://b/store"))
    with pytest.raises(UsageError, match=r"azure:// is not read"):
        is_remote("azure://b/store")
    with pytest.raises(UsageError, match="names no bucket"):
        list_objects("s3://")
    with pytest.raises(UsageError, match="folder"):
        join("gs://b/store", "../other")


@pytest.mark.slow
def test_written_listed_read_and_removed(bucket: Bucket, tmp_path: Path) -> None:
    file = tmp_path / "a b#1?+é.dcm"
    file.write_bytes(EYE)
    put(file, join(bucket.url, "deep", file.name))
    put_bytes(b"top", join(bucket.url, "z.txt"))
    found = list_objects(bucket.url)
    assert [one.url for one in found] == [join(bucket.url, "deep", file.name), join(bucket.url, "z.txt")]
    assert [one.size for one in found] == [len(EYE), 3]
    assert [info(one.url) for one in found] == found  # listed and looked at, the version is the same
    assert [one.url for one in list_objects(bucket.url, recursive=False)] == [join(bucket.url, "z.txt")]
    assert list_objects(found[0].url) == found[:1]
    assert read_bytes(found[0].url) == EYE
    put_bytes(b"new", found[1].url)
    assert info(found[1].url) != found[1]
    assert read_bytes(found[1].url) == b"new"
    for one in found:
        remove(one.url)
        remove(one.url)  # a second time nothing happens
        assert info(one.url) is None
    assert list_objects(bucket.url) == []


# gcsfs hands aiohttp the bytes of an upload in one piece, and aiohttp warns of that.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_large_file_goes_up_in_parts_and_comes_back(bucket: Bucket, tmp_path: Path) -> None:
    file = tmp_path / "large.npy"
    file.write_bytes(EYE * 600)  # 6 MB: a resumable upload on GCS
    put(file, join(bucket.url, "large.npy"))
    assert read_bytes(join(bucket.url, "large.npy")) == EYE * 600


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_transient_failure_is_tried_again_and_the_body_is_right(bucket: Bucket, kind: str) -> None:
    url = join(bucket.url, "eye.dcm")
    put_bytes(EYE, url)
    media = "alt=media" if bucket.scheme == "gs" else "eye.dcm"
    bucket.proxy.faults.append(Fault(kind, "GET", media))
    assert read_bytes(url) == EYE
    assert bucket.proxy.bodies_sent("eye.dcm") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "reset", "lost", "delay"])
def test_a_failed_write_is_written_again(bucket: Bucket, kind: str, tmp_path: Path) -> None:
    method = "PUT" if bucket.scheme == "s3" else "POST"
    bucket.proxy.faults.append(Fault(kind, method, times=2))
    file = tmp_path / "eye"
    file.write_bytes(EYE)
    put(file, join(bucket.url, "eye"))
    assert read_bytes(join(bucket.url, "eye")) == EYE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "corrupt", "shorten", "delay"])
def test_what_does_not_pass_is_reported_after_a_bounded_number_of_tries(bucket: Bucket, kind: str) -> None:
    url = join(bucket.url, "eye.dcm")
    put_bytes(EYE, url)
    bucket.proxy.faults.append(Fault(kind, "GET", "alt=media" if bucket.scheme == "gs" else "eye.dcm", times=99))
    with pytest.raises(OctjepaError, match="3 times in") as error:
        read_bytes(url)
    assert not isinstance(error.value, UsageError)
    assert bucket.proxy.bodies_sent("eye.dcm") == 3
    assert not list(bucket.cache.glob("objects/*/*/*/*"))  # nothing damaged was kept


def test_a_permanent_failure_is_reported_at_once_and_without_secrets(bucket: Bucket) -> None:
    url = join(bucket.url, "eye.dcm")
    put_bytes(EYE, url)
    bucket.proxy.faults.append(Fault("403", "HEAD" if bucket.scheme == "s3" else "GET", times=99))
    bucket.proxy.requests.clear()
    with pytest.raises(UsageError, match="access is denied") as error:
        read_bytes(url)
    assert len(bucket.proxy.requests) == 1
    assert "AKIA" not in str(error.value)
    bucket.proxy.faults.clear()
    with pytest.raises(UsageError, match="no object"):
        read_bytes(join(bucket.url, "other.dcm"))
    with pytest.raises(UsageError, match="no bucket"):
        list_objects(bucket.url.replace(f"/{BUCKET}/", "/absent/"))
    with pytest.raises(UsageError, match="no bucket"):
        put_bytes(b"", bucket.url.replace(f"/{BUCKET}/", "/absent/"))


_NO_FILES = """
import os, resource, sys
from octjepa.errors import ResourceError, OctjepaError
from octjepa.remote import info

def said(url):
    try:
        info(url)
    except OctjepaError as error:
        return error

first = said(sys.argv[1])  # the libraries are loaded, nothing listens there
assert type(first) is OctjepaError, first
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limit))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
then = said(sys.argv[1])
assert type(then) is ResourceError, repr(then)
print(then)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_no_free_file_for_a_socket_is_the_machines_fault_and_reported_at_once(scheme: str) -> None:
    nowhere = "http://127.0.0.1:9"
    around = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": nowhere,
        "STORAGE_EMULATOR_HOST": nowhere,
        "OCTJEPA_REMOTE_TRIES": "2",
        "OCTJEPA_REMOTE_WAIT": "0.01",
    }
    command = [sys.executable, "-c", _NO_FILES, f"{scheme}://bucket/eye.dcm"]
    made = subprocess.run(command, env=around, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert f"cannot look up {scheme}://bucket/eye.dcm: Too many open files: raise the limit" in made.stdout


@pytest.mark.slow
def test_an_etag_that_is_no_md5_is_not_taken_for_one(proxies: dict[str, FaultyProxy], tmp_path: Path) -> None:
    with bucket_of("s3", proxies["s3"], tmp_path / "cache") as bucket:
        url = join(bucket.url, "parts")
        files, where = connection("s3", RetryPolicy.from_environment()), {"Bucket": BUCKET, "Key": parse(url).key}
        upload = {**where, "UploadId": files.call_s3("create_multipart_upload", **where)["UploadId"]}
        parts = [
            {"PartNumber": n, "ETag": files.call_s3("upload_part", PartNumber=n, Body=body, **upload)["ETag"]}
            for n, body in ((1, bytes(5 << 20)), (2, EYE))
        ]
        files.call_s3("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload)
        found = info(url)
        assert found is not None
        assert "-" in found.version
        assert found.checksum == ""
        bucket.proxy.faults += [Fault("shorten", "GET", "parts"), Fault("truncate", "GET", "parts")]
        assert read_bytes(url) == bytes(5 << 20) + EYE
        files.call_s3(
            "put_object", Bucket=BUCKET, Key=f"{where['Key']}-sealed", Body=EYE, ServerSideEncryption="aws:kms"
        )
        sealed = info(f"{url}-sealed")
        assert sealed is not None
        assert sealed.checksum == ""
        assert read_bytes(sealed.url) == EYE


def test_each_try_again_is_one_calm_line(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    url = join(bucket.url, "eye.dcm")
    put_bytes(EYE, url)
    bucket.proxy.faults.append(Fault("503", "GET", "eye.dcm", times=2))
    with caplog.at_level(logging.INFO):
        read_bytes(url)
    message = [record for record in caplog.records if record.name.startswith(("octjepa", "gcsfs", "s3fs"))]
    assert [record.levelname for record in message] == ["INFO", "INFO"]
    assert "try 3 of 3" in message[1].getMessage()


def test_only_one_writes_where_there_is_none(bucket: Bucket) -> None:
    url = join(bucket.url, "lock")
    assert put_bytes(b"first", url, only_if_absent=True)
    assert not put_bytes(b"second", url, only_if_absent=True)
    assert read_bytes(url) == b"first"
    remove(url)
    method = "PUT" if bucket.scheme == "s3" else "POST"
    bucket.proxy.faults.append(Fault("lost", method))
    assert put_bytes(b"mine", url, only_if_absent=True)  # written by the try whose answer was lost


def test_no_credentials_are_reported_with_what_to_set(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(UsageError, match=r"no credentials were found\. Set (AWS_ACCESS|GOOGLE_APPL)"):
        list_objects(bucket.url)


def test_an_absent_extra_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"s3": "s3fs", "gs": "gcsfs"}[bucket.scheme], None)
    with pytest.raises(UsageError, match=re.escape(install_command({"s3": "s3", "gs": "gcs"}[bucket.scheme]))):
        list_objects(bucket.url)


def test_waiting_is_bounded_in_time_too() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        raise TimeoutError

    with pytest.raises(OctjepaError, match="cannot read s3://b/k: TimeoutError, 1 times"):
        with_retries(fails, "read", "s3://b/k", RetryPolicy(total_seconds=1e-9))
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        with_retries(lambda: 1 / 0, "read", "s3://b/k", RetryPolicy())


def test_settings_that_are_no_numbers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTJEPA_REMOTE_TRIES", "many")
    with pytest.raises(UsageError, match="OCTJEPA_REMOTE_TRIES is 'many'"):
        RetryPolicy.from_environment()
