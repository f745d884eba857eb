"""Discovery in buckets against emulated stores: trees with manifests, globs, lists, folders of images."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bucket_servers import BUCKET, Bucket, bucket_of
from eye_files import phantom, write_voxels
from faulty_proxy import Fault, FaultyProxy
from oct_dicom import make_dataset, retina, save
from octjepa import remote
from octjepa.convert.scans import convert_sources
from octjepa.errors import NothingReadError, UsageError
from octjepa.ingest import Discovery, build_store, discover, source_file
from octjepa.ingest.archive import expand
from octjepa.ingest.one_file import RefusedFile, ingest_one, refused
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.remote.bucket import connection
from octjepa.remote.retry import RetryPolicy
from octjepa.store import Store
from vendor_files import e2e_bytes, write_heyex_xml

TABLE = "person_id\tfilepath\tlaterality\n"
TREE = "retinal_oct/structural_oct/topcon_maestro2"


def put(bucket: Bucket, **objects: bytes | str) -> str:
    for name, content in objects.items():
        data = content.encode() if isinstance(content, str) else content
        remote.put_bytes(data, remote.join(bucket.url, name))
    return bucket.url


def names(found: Discovery) -> list[str]:
    return [file.name for file in found.files]


def reasons(found: Discovery) -> dict[str, str]:
    return {one.source.name: one.reason for one in found.refused}


def tree(bucket: Bucket) -> str:
    rows = "".join(f"1001\t/{TREE}/1001/{name}.dcm\tL\n" for name in ("a", "b", "absent"))
    return put(
        bucket,
        **{
            f"{TREE}/1001/a.dcm": "a",
            f"{TREE}/1001/b.dcm": "bb",
            f"{TREE}/1002/c.dcm": "c",
            f"{TREE}/all.zip": "PK",
            f"{TREE}/1001/._a.dcm": "mac",
            "notes.txt": "x",
            "truth/eyes.tsv": "x",
            "truth/1.npz": "x",
            "retinal_oct/manifest.tsv": TABLE + rows + "9\t../secret.dcm\tL\n",
            "participants.tsv": "person_id\trecommended_split\n1001\tval\n",
        },
    )


@pytest.mark.slow
def test_a_tree_with_its_manifest(bucket: Bucket) -> None:
    url = tree(bucket)
    for source in (url, f"{url}/", f"{url}/retinal_oct"):
        found = discover([source])
        assert names(found) == [f"{TREE}/1001/a.dcm", f"{TREE}/1001/b.dcm", f"{TREE}/1002/c.dcm"]
        assert [file.row.person_id if file.row else "" for file in found.files] == ["1001", "1001", ""]
        assert found.files_without_row == 1
        assert [person["recommended_split"] for person in found.participants] == ["val"]
        assert reasons(found) == {
            f"{TREE}/1001/absent.dcm": "manifest_row_without_file",
            f"{TREE}/all.zip": "archive_not_expanded",
            "../secret.dcm": "path_escapes",
        }
        assert found.ignored["hidden"] == 1
    below = discover([f"{url}/{TREE}/1001"])  # its manifest lies above
    assert [file.row is not None for file in below.files] == [True, True]
    listed = discover([f"{url}/retinal_oct/manifest.tsv"])
    assert names(listed) == [f"{TREE}/1001/a.dcm", f"{TREE}/1001/b.dcm"]
    assert len(listed.participants) == 1
    (single,) = discover([f"{url}/{TREE}/1001/a.dcm"]).files
    assert single == below.files[0]


@pytest.mark.slow
def test_a_tree_is_one_listing(bucket: Bucket) -> None:
    put(bucket, **{f"set/{number}.dcm": "x" for number in range(12)})
    bucket.proxy.requests.clear()
    assert len(discover([f"{bucket.url}/set"]).files) == 12
    assert len(bucket.proxy.requests) <= 8  # and not one an object


@pytest.mark.slow
def test_globs_mean_what_they_mean_on_a_disk(bucket: Bucket) -> None:
    url = tree(bucket)
    assert [file.dataset_path.name for file in discover([f"{url}/**/1001/*.dcm"]).files] == ["a.dcm", "b.dcm"]
    assert [file.dataset_path.name for file in discover([f"{url}/{TREE}/100[!1]"]).files] == ["c.dcm"]
    assert [file.dataset_path.name for file in discover([f"{url}/**/[ac].dcm"]).files] == ["a.dcm", "c.dcm"]
    with pytest.raises(UsageError, match="nothing matches"):
        discover([f"{url}/*.dcm"])
    with pytest.raises(UsageError, match="wildcard in the bucket's name"):
        discover([f"{bucket.scheme}://ey*/x.dcm"])


@pytest.mark.slow
def test_lists_of_both_kinds(bucket: Bucket, tmp_path: Path) -> None:
    url = tree(bucket)
    put(bucket, **{"chosen.lst": f"# mine\n{TREE}/1002/c.dcm\ngone.dcm\n"})
    found = discover([f"{url}/chosen.lst"])
    assert names(found) == [f"{TREE}/1002/c.dcm"]
    assert reasons(found) == {"gone.dcm": "manifest_row_without_file"}
    (tmp_path / "local.dcm").write_bytes(b"x")
    urls = "".join(f"{url}/{TREE}/{name}.dcm\n" for name in ("1001/a", "1001/b", "1001/x", "1001/y", "1002/c"))
    (tmp_path / "both.txt").write_text(f"local.dcm\n{urls}")
    found = discover([tmp_path / "both.txt"])
    assert sorted(file.dataset_path.name for file in found.files) == ["a.dcm", "b.dcm", "c.dcm", "local.dcm"]
    assert len(found.refused) == 2


@pytest.mark.slow
def test_what_is_not_there_is_reported(bucket: Bucket) -> None:
    with pytest.raises(UsageError, match=r"no file or folder at"):
        discover([f"{bucket.url}/nothing"])
    put(bucket, **{"set/a.xlsx": "x", "set/b.zip": "x"})
    with pytest.raises(UsageError, match=r"no OCT scan in .*left out: 1 \.xlsx(.|\n)*archive_not_expanded"):
        discover([f"{bucket.url}/set"])


def test_a_scan_is_read_from_a_verified_copy(bucket: Bucket, tmp_path: Path) -> None:
    name = "1234_maestro2_3d_macula_oct_l_1.2.3.dcm"
    save(make_dataset(retina(frames=6)), tmp_path / name)
    put(bucket, **{f"{TREE}/1234/{name}": (tmp_path / name).read_bytes()})
    (file,) = discover([bucket.url]).files
    with file.local() as path:
        volume = read_volume(path, file.row, dataset_path=file.dataset_path)
    assert volume.person_id == "1234"
    before = file.state()
    assert before is not None
    assert before[0] == (tmp_path / name).stat().st_size
    put(bucket, **{f"{TREE}/1234/{name}": "other"})
    (again,) = discover([bucket.url]).files
    assert again.key == file.key
    assert again.state() != before


@pytest.mark.slow
def test_a_refused_object_hides_the_person_of_its_header(bucket: Bucket, tmp_path: Path) -> None:
    scan = make_dataset(retina(frames=6))
    scan.PixelData = scan.PixelData[:100]
    put(bucket, **{"set/Doe_Jane/scan.dcm": save(scan, tmp_path / "scan.dcm").read_bytes()})
    for number in range(5):
        frame = make_dataset(retina(1, seed=number))
        frame.SeriesInstanceUID, frame.InstanceNumber = "1.2.3", number + 1
        frame.PixelData = frame.PixelData[: 100 if number == 0 else None]
        put(bucket, **{f"set/jane/{number}.dcm": save(frame, tmp_path / "frame.dcm").read_bytes()})
    converted = convert_sources([f"{bucket.url}/set"], tmp_path / "out", "nifti")
    assert converted.scans == []
    assert sorted(refusal.scan for refusal in converted.refused) == ["*** (file 2 of 2)", "***/scan.dcm (file 1 of 2)"]
    with pytest.raises(NothingReadError):
        build_store([f"{bucket.url}/set"], tmp_path / "store", Preprocessing(image_size=(16, 32, 32)))
    refused = Store.open(tmp_path / "store").quarantine
    assert sorted(refusal["file"] for refusal in refused) == ["***", "***/scan.dcm"]


@pytest.mark.slow
def test_an_object_whose_worker_died_hides_the_person_of_its_header(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_file, "_HEADER_BYTES", 2000)  # the scan is longer
    scan = save(make_dataset(retina(frames=6)), tmp_path / "scan.dcm").read_bytes()
    put(bucket, **{"set/Doe_Jane/scan.dcm": scan, "set/1.dcm": "x"})
    for number in range(5):
        frame = make_dataset(retina(1, seed=number))
        frame.SeriesInstanceUID, frame.InstanceNumber = "1.2.3", number + 1
        put(bucket, **{f"set/jane/{number}.dcm": save(frame, tmp_path / "frame.dcm").read_bytes()})
    found = discover([f"{bucket.url}/set"]).files
    died = [refused(file, "read", "worker_died", "the process ended with SIGSEGV, twice") for file in found]
    assert [refusal.entry["file"] for refusal in died] == ["1.dcm", "***/scan.dcm", "***"]


def test_a_folder_of_images_is_one_scan(bucket: Bucket) -> None:
    images = {f"set/1001_l/{number}.png": f"image {number}" for number in range(6)}
    put(bucket, **images, **{"set/1001_l/readme.html": "x", "set/b.dcm": "x"})
    found = discover([f"{bucket.url}/set"])
    assert names(found) == ["1001_l", "b.dcm"]
    with found.files[0].local() as folder:
        assert folder.name == "1001_l"
        assert {one.name: one.read_text() for one in folder.iterdir()} == {
            f"{number}.png": f"image {number}" for number in range(6)
        }
    assert not folder.exists()
    state = found.files[0].state()
    put(bucket, **{"set/1001_l/3.png": "another"})
    assert discover([f"{bucket.url}/set"]).files[0].state() != state


def test_archives_in_a_bucket_are_expanded_to_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("1001/a.dcm", bytes(128) + b"DICM")
    put(bucket, **{"in/topcon_triton/all.zip": made.getvalue(), "in/notes.txt": "x"})
    location = "retinal_oct/structural_oct/topcon_triton/1001/a.dcm"
    for number, source in enumerate((f"{bucket.url}/in", f"{bucket.url}/in/topcon_triton/all.zip")):
        summary = expand(source, tmp_path / str(number))
        assert summary.written == 1
        assert names(discover([tmp_path / str(number)])) == [location]
    with pytest.raises(UsageError, match="no file or folder at"):
        expand(f"{bucket.url}/nothing", tmp_path / "out")


def test_what_belongs_to_a_scan_comes_with_it(bucket: Bucket, tmp_path: Path) -> None:
    pixels, spacing = phantom()
    header = write_voxels(tmp_path / "scan.mhd", pixels, spacing)
    put(
        bucket,
        **{
            "scan.mhd": header.read_bytes(),
            "scan.raw": header.with_suffix(".raw").read_bytes(),
            "scan.json": '{"person_id": "P5"}',
            "other.json": "{}",
        },
    )
    (source,) = discover([bucket.url]).files
    assert source.name == "scan.mhd"
    before = source.state()
    with source.local() as path:
        volume = read_volume(path, dataset_path=source.dataset_path)
    assert (volume.person_id, volume.spacing_mm) == ("P5", pytest.approx(spacing))
    put(bucket, **{"scan.json": '{"person_id": "P66"}'})
    assert discover([bucket.url]).files[0].state() != before


def test_voxels_and_json_that_are_called_otherwise_come_with_a_scan(bucket: Bucket) -> None:
    put(
        bucket,
        **{
            "a.mhd": "ObjectType = Image\nElementDataFile = voxels.bin\n",
            "voxels.bin": b"voxels",
            "eye.json": "{}",
            **{f"eye/{number}.png": b"picture" for number in range(8)},
        },
    )
    found = {file.name: file for file in discover([bucket.url]).files}
    assert [one.url.rpartition("/")[2] for one in found["a.mhd"].objects] == ["a.mhd", "voxels.bin"]
    assert found["eye"].objects[-1].url.endswith("/eye.json")


@pytest.mark.slow
def test_what_belongs_to_a_scan_comes_with_it_however_it_is_named(bucket: Bucket, tmp_path: Path) -> None:
    """By its url, by a list, by a row of a table: the voxels of a header, the pictures of an export."""
    pixels, spacing = phantom()
    header = write_voxels(tmp_path / "scan.mhd", pixels, spacing)
    export = write_heyex_xml(tmp_path / "export", [retina(6, 64, 48)])
    here = {f"e/{path.name}": path.read_bytes() for path in export.parent.iterdir()}
    url = put(
        bucket,
        **{
            **here,
            "m/scan.mhd": header.read_bytes(),
            "m/scan.raw": header.with_suffix(".raw").read_bytes(),
            "m/scan.json": '{"person_id": "P5"}',
            "few.lst": f"e/{export.name}\nm/scan.mhd\n",
            "many.lst": f"e/{export.name}\nm/scan.mhd\nm/1.dcm\nm/2.dcm\nm/3.dcm\n",
            "retinal_oct/manifest.tsv": f"{TABLE}7\te/{export.name}\tL\n8\tm/scan.mhd\tL\n",
        },
    )
    put(bucket, **{f"retinal_oct/{name}": data for name, data in here.items()})
    put(bucket, **{"retinal_oct/m/scan.mhd": header.read_bytes()})
    put(bucket, **{"retinal_oct/m/scan.raw": header.with_suffix(".raw").read_bytes()})
    for sources in (
        [f"{url}/e/{export.name}", f"{url}/m/scan.mhd"],
        [f"{url}/few.lst"],
        [f"{url}/many.lst"],
        [f"{url}/retinal_oct/manifest.tsv"],
    ):
        found = discover(sources)
        assert [file.dataset_path.name for file in found.files] == [export.name, "scan.mhd"]
        for file in found.files:
            with file.local() as path:
                volume = read_volume(path, file.row, dataset_path=file.dataset_path)
            assert volume.pixels.shape in {(6, 64, 48), pixels.shape}


def test_each_scan_of_an_object_is_a_scan_and_the_object_is_fetched_once(bucket: Bucket) -> None:
    linear = np.maximum((retina(6, 64, 48).astype(np.float32) / 255) ** 4, 1e-12)
    put(bucket, **{"eyes.e2e": e2e_bytes([linear, linear[::-1]]), "one.e2e": e2e_bytes([linear]), "bad.e2e": "x"})
    bucket.proxy.requests.clear()
    found = discover([bucket.url]).files
    assert [(file.name, file.member) for file in found] == [
        ("bad.e2e", ""),
        ("eyes.e2e#1", "1"),
        ("eyes.e2e#2", "2"),
        ("one.e2e", ""),
    ]
    assert len({file.key for file in found}) == 4
    assert [one for one in bucket.proxy.requests if "eyes.e2e" in str(one)]
    eyes = []
    for file in found[1:3]:
        with file.local() as path:
            eyes.append(read_volume(path, None, (0.1, 0.003, 0.02), file.dataset_path, file.member))
    assert [eye.laterality for eye in eyes] == ["OD", "OS"]
    shutil.rmtree(bucket.cache / "objects")  # its copies may make room for others
    bucket.proxy.requests.clear()
    assert [file.name for file in discover([bucket.url]).files] == [file.name for file in found]
    assert not [one for one in bucket.proxy.requests if "eyes.e2e" in str(one)]
    put(bucket, **{"eyes.e2e": e2e_bytes([linear])})
    assert [file.name for file in discover([bucket.url]).files] == ["bad.e2e", "eyes.e2e", "one.e2e"]


def test_an_object_that_is_gone_or_changed_costs_this_file_alone(bucket: Bucket, tmp_path: Path) -> None:
    url = put(bucket, **{"a.dcm": "a", "b.dcm": "b"})
    gone, changed = discover([url]).files
    remote.remove(remote.join(url, "a.dcm"))
    put(bucket, **{"b.dcm": "another"})
    for source in (gone, changed):
        result = ingest_one(source, tmp_path, Preprocessing())
        assert isinstance(result, RefusedFile)
        assert result.entry["file"] == source.name
        assert (result.entry["reason"], result.entry["detail"]) == (
            "unreadable_file",
            "the file went away or changed while it was read: run ingest again",
        )


def test_denied_access_ends_the_ingest_and_blames_no_file(bucket: Bucket, tmp_path: Path) -> None:
    (source,) = discover([put(bucket, **{"a.dcm": "a"})]).files
    bucket.proxy.faults.append(Fault("403", "HEAD" if bucket.scheme == "s3" else "GET", times=99))
    with pytest.raises(UsageError, match="access is denied"):
        ingest_one(source, tmp_path, Preprocessing())


def test_a_key_with_an_empty_part_is_refused_by_name(proxies: dict[str, FaultyProxy], tmp_path: Path) -> None:
    with bucket_of("s3", proxies["s3"], tmp_path / "cache") as bucket:
        put(bucket, **{"d/a.dcm": "a"})
        files = connection("s3", RetryPolicy.from_environment())
        files.call_s3("put_object", Bucket=BUCKET, Key=f"{bucket.url.rpartition('/')[2]}/d//x.dcm", Body=b"x")
        found = discover([bucket.url]).files
        assert [file.name for file in found] == ["d/a.dcm", "d/x.dcm"]
        result = ingest_one(found[1], tmp_path, Preprocessing())
    assert isinstance(result, RefusedFile)
    assert (result.entry["file"], result.entry["reason"]) == ("d/x.dcm", "unreadable_file")
    assert "has an empty part (//)" in result.entry["detail"]


def test_numbered_images_beside_a_scan_are_reported(bucket: Bucket) -> None:
    url = put(bucket, **{"eyes/P1/a.dcm": "a"}, **{f"eyes/P1/{number}.png": "b" for number in range(6)})
    for source in (f"{url}/eyes", f"{url}/eyes/P1"):
        ((name, reason),) = reasons(discover([source])).items()
        assert (name.rpartition("/")[2], reason) == ("P1", "images_beside_scan")
