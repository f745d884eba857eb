"""The closed list of reasons why a file is not in the store, and what a person can do about each.

`docs/ingest.md` prints this table; a test holds the two together. `lost=False` marks files that were rightly left
out (a second copy, a fundus photograph): they are in the quarantine but do not count towards `--max-lost`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from octjepa.errors import VolumeRejected

# A detail that says what to do has a verb in the imperative at its start, or after a colon, a full stop or "and".
_HOLDS_ADVICE: Final = re.compile(
    r"(?:^|[:.] |\band )(?:add|copy|install|name|pip install|run|unpack|write)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Reason:
    """Why a file is refused, what the user can do, and whether the refusal counts as a lost scan.

    `keeps_volume`: the refusal says nothing about the file's content. A volume made from it earlier stays in the store.
    """

    meaning: str
    action: str
    lost: bool = True
    keeps_volume: bool = False


REASONS: dict[str, Reason] = {
    "unreadable_file": Reason("the file cannot be opened", "check permissions and the disk", keeps_volume=True),
    "empty_file": Reason("zero bytes", "copy or download it again"),
    "unknown_format": Reason(
        "neither DICOM nor another format that octjepa reads", "see docs/formats.md; export it as one of those"
    ),
    "not_dicom": Reason("named as DICOM, but the content is something else", "download it again: often an HTML page"),
    "broken_header": Reason("a header, or the JSON next to a scan, that cannot be parsed", "copy or export it again"),
    "not_structural_oct": Reason(
        "an image of another kind (photograph, en face, flow, height map, segmentation)", "nothing to do", lost=False
    ),
    "not_retina": Reason(
        "header, shape or layers are not those of a human retina",
        "none; correct the header if it is a human retina",
        lost=False,
    ),
    "no_pixel_data": Reason("a header without pixel data", "export the images together with the header"),
    "truncated": Reason("the file ends before its pixel data do", "copy or download it again"),
    "frames_missing": Reason(
        "the data have fewer frames than the header or the numbers in the image names state",
        "copy or export it again",
    ),
    "frames_broken": Reason("too many or neighbouring frames do not decode", "export it again; try another syntax"),
    "wrong_transfer_syntax": Reason("the data are not in the transfer syntax that the header names", "export it again"),
    "scrambled_pixels": Reason(
        "compressed frames in the maker's own scrambled form (Zeiss)",
        "export it again as plain DICOM, or ask the maker",
    ),
    "header_contradicts_pixels": Reason(
        "rows, columns, depth or number of frames in the header are not those of the pixel data", "export it again"
    ),
    "no_decoder": Reason(
        "no installed library reads this transfer syntax or format",
        "install octjepa with the extra that is named",
        keeps_volume=True,
    ),
    "unsupported_pixels": Reason(
        "values that are not the intensities of one scan", "export the scan itself, as intensities"
    ),
    "axes_ambiguous": Reason(
        "neither spacing nor content tells which axis is slice, depth and column",
        'state the order in a JSON file next to it ("axes": "slice,depth,column"), or give its spacing',
    ),
    "too_few_frames": Reason(
        "fewer than four B-scans: no volume",
        "none for a line scan; of a scan stored as a file per B-scan, name the folder that holds all of them",
    ),
    "single_frame_series": Reason(
        "one B-scan of a scan that is stored as a file per B-scan, or a series of such files that cannot be put "
        "together",
        "name the folder that holds all its files, four at least, or export the scan as one multi-frame file",
    ),
    "images_beside_scan": Reason(
        "numbered images next to a scan of another format; they are not read",
        "none if they are pictures of that scan; put another scan into a separate folder",
        lost=False,
    ),
    "not_b_scans": Reason("its frames are en face slices, not B-scans", "export the B-scans"),
    "spacing_unknown": Reason(
        "no source gives a plausible spacing on some axis", "give --spacing, or add a manifest.tsv with it"
    ),
    "size_implausible": Reason(  # the limit depends on the memory of the machine and on the number of workers
        "its size in memory is beyond the limit", "check the spacing and the frame count", keeps_volume=True
    ),
    "blank": Reason("most B-scans are empty or constant", "none: the scan failed"),
    "burned_in_text": Reason(
        "painted text or lines cover the retina or fill the B-scans", "export the scan without its overlays"
    ),
    "frames_unrelated": Reason(
        "neighbouring B-scans are of several eyes, or their order is lost", "export each scan by itself, in its order"
    ),
    "one_position": Reason(
        "all B-scans show one position: a film, or repeats to be averaged", "export the volume scan"
    ),
    "no_tissue": Reason("no retina could be found in the scan", "look at it with `octjepa inspect`"),
    "duplicate_content": Reason("the same pixels are in the store under another file", "nothing to do", lost=False),
    "duplicate_sop_uid": Reason(
        "the SOP instance UID is in the store with other pixels", "find which copy is right", lost=False
    ),
    "manifest_row_without_file": Reason(
        "a manifest or list of files names a file that is not there",
        "finish the download, or correct the list",
        lost=False,
        keeps_volume=True,
    ),
    "manifest_disagrees": Reason("rows of the manifest for this file contradict each other", "correct the manifest"),
    "path_escapes": Reason(
        "a path or link that leads out of the data set; it is not followed",
        "correct the manifest, or name the file itself as a source or in a list (.txt)",
        keeps_volume=True,
    ),
    "archive_not_expanded": Reason(
        "an archive: the scans in it are not read", "run `octjepa expand` and ingest its result", keeps_volume=True
    ),
    "unreadable_folder": Reason(
        "a folder whose files cannot be listed", "check permissions and the disk", keeps_volume=True
    ),
    "reader_failed": Reason("the reader failed on unexpected content", "report it with the detail"),
    "worker_died": Reason(
        "the process that read it crashed or was killed, twice",
        "ingest it by itself, with more memory; if it fails again, report it",
        keeps_volume=True,
    ),
    "timed_out": Reason(
        "it was not read within the time for one file",
        "raise --seconds-per-file of ingest, or copy the file to a faster disk",
        keeps_volume=True,
    ),
}


def action_for(reason: str, detail: str) -> str:
    """The advice of a reason; "" if the detail of the file says what to do."""
    return "" if _HOLDS_ADVICE.search(detail) else REASONS[reason].action


def with_action(reason: str, detail: str) -> str:
    """The detail of a refused file, and what to do."""
    return "; ".join(filter(None, [detail, action_for(reason, detail)]))


def rejection(reason: str, detail: str) -> VolumeRejected:
    """The exception for a code of the list. Raises KeyError for a code that is not on it."""
    if reason not in REASONS:
        raise KeyError(f"reason code {reason!r} is not in the closed list")
    return VolumeRejected(reason, detail)


def error_origin(error: BaseException) -> str:
    """ "ValueError raised in values.convert_DS_string": the message is left out, for parsers quote what they read."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error).__name__
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} raised in {Path(code.co_filename).stem}.{code.co_name}"


def quarantine_record(file: str, sha256: str, stage: str, reason: str, detail: str) -> dict[str, str]:
    """One line of quarantine.jsonl: file, hash, stage, reason, detail, when (UTC, ISO 8601)."""
    if reason not in REASONS:
        raise KeyError(f"reason code {reason!r} is not in the closed list")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"file": file, "hash": sha256, "stage": stage, "reason": reason, "detail": detail, "when": when}
