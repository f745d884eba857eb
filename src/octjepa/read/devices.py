"""The vocabulary of devices: known instruments by the words of their headers, every other one under its own name.

A device is named `make_model` in lower case (`zeiss_cirrus`, `optovue_avanti`). The vocabulary is open: a model that is
not listed becomes the words of Manufacturer and ManufacturerModelName, and is never assigned to another device.
Source of models and methods: the makers' product pages and DICOM conformance statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from octjepa.reasons import rejection

Modality = Literal["SD-OCT", "SS-OCT", "TD-OCT", ""]

UNKNOWN = "unknown"
_LONGEST = 60
# Words of a company's name that do not tell it from another company.
_COMPANY = frozenset(
    [
        "ag",
        "carl",
        "co",
        "company",
        "corp",
        "corporation",
        "engineering",
        "gmbh",
        "inc",
        "kg",
        "kk",
        "limited",
        "llc",
        "ltd",
        "meditec",
        "microsystems",
        "sa",
        "srl",
        "technologies",
        "technology",
    ]
)
_NO_NAME = frozenset(("", "unknown", "none", "na", "n_a", "anonymous", "anonymized", "anonymised", "oct", "op", "opt"))


@dataclass(frozen=True)
class Device:
    """One instrument: its name in octjepa, make, model, OCT method ("" is not known) and whether it images a retina."""

    name: str
    make: str
    model: str
    modality: Modality = ""
    images_retina: bool = True


@dataclass(frozen=True)
class _Listed:
    """A device and the pattern that names it. `product` words name it in file names and protocols too."""

    device: Device
    pattern: re.Pattern[str]
    product: bool


def _listed(
    name: str, model: str, modality: Modality, pattern: str, product: bool = False, retina: bool = True
) -> _Listed:
    device = Device(name, name.partition("_")[0].capitalize(), model, modality, retina)
    return _Listed(device, re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])"), product)


# The first pattern that fits counts, so a longer name stands before the shorter one that is a part of it.
_LISTED = (
    _listed("heidelberg_anterion", "ANTERION", "SS-OCT", "anterion", retina=False),
    _listed("heidelberg_spectralis", "Spectralis", "SD-OCT", "spectralis", product=True),
    _listed("zeiss_plex_elite", "PLEX Elite", "SS-OCT", r"plex[ _-]?elite", product=True),
    _listed("zeiss_stratus", "Stratus", "TD-OCT", r"stratus(?:[ _-]?oct)?"),
    _listed("zeiss_visante", "Visante", "TD-OCT", r"visante(?:[ _-]?oct)?", retina=False),
    _listed("zeiss_iolmaster", "IOLMaster", "SS-OCT", r"iol[ _-]?master", retina=False),
    _listed("zeiss_cirrus", "Cirrus", "SD-OCT", r"(?:zeiss)?cirrus(?:photo|hdoct|oct)?", product=True),
    _listed("topcon_maestro2", "Maestro2", "SD-OCT", r"(?:3d ?oct-1 ?)?maestro[ _-]?2", product=True),
    _listed("topcon_maestro", "Maestro", "SD-OCT", r"(?:3d ?oct-1 ?)?maestro|3d ?oct-1(?![0-9])", product=True),
    _listed("topcon_triton", "DRI OCT Triton", "SS-OCT", r"triton(?:[ _-]?plus)?", product=True),
    _listed("topcon_atlantis", "DRI OCT-1 Atlantis", "SS-OCT", r"atlantis|dri[ _-]?oct[ _-]?1(?![0-9])"),
    _listed("optovue_avanti", "Avanti RTVue XR", "SD-OCT", r"avanti|rtvue[ _-]?xr"),
    _listed("optovue_rtvue", "RTVue", "SD-OCT", r"rtvue", product=True),
    _listed("optovue_ivue", "iVue", "SD-OCT", r"ivue"),
    _listed("optovue_solix", "Solix", "SD-OCT", r"solix"),
    _listed("nidek_rs_3000", "RS-3000", "SD-OCT", r"rs[ _-]?3000"),
    _listed("nidek_rs_330", "RS-330", "SD-OCT", r"rs[ _-]?330"),
    _listed("canon_oct_hs100", "OCT-HS100", "SD-OCT", r"hs[ _-]?100"),
    _listed("canon_oct_s1", "Xephilio OCT-S1", "SS-OCT", r"oct[ _-]?s1(?![0-9])"),
    _listed("huvitz_hoct", "HOCT-1", "SD-OCT", r"hoct"),
    _listed("bioptigen_envisu", "Envisu", "SD-OCT", r"envisu", product=True),  # sold by Bioptigen, then by Leica
    _listed("tomey_casia", "CASIA", "SS-OCT", r"casia[ _-]?2?", retina=False),
)
_BY_NAME = {listed.device.name: listed.device for listed in _LISTED}
_MAKES = frozenset(name.partition("_")[0] for name in _BY_NAME)


def device_slug(text: str) -> str:
    """The words of `text` as a name: "NIDEK CO., LTD. Mirante" -> "nidek_mirante"; "" if it names nothing."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word and word not in _COMPANY]
    slug = "_".join(dict.fromkeys(words))[:_LONGEST].strip("_")
    return "" if slug in _NO_NAME else slug


def is_listed(name: str) -> bool:
    """Whether `name` is that of a listed device, such as a folder in an AI-READI tree has it."""
    return name in _BY_NAME


def parse_device(text: str) -> str:
    """The device that a file name, folder or protocol names by its product, or "" (a word there may mean anything)."""
    lower = text.lower()
    if lower in _BY_NAME:
        return lower
    return next((listed.device.name for listed in _LISTED if listed.product and listed.pattern.search(lower)), "")


def _listed_name(make: str, model: str, text: str) -> str:
    """The listed device that make and model name, or ""; words of no product count only next to their make."""
    for listed in _LISTED:
        home = listed.device.name.partition("_")[0]
        if (listed.product or not make or home in make) and listed.pattern.search(text):
            return listed.device.name
    # Zeiss calls its Cirrus instruments HD-OCT, often by a number alone.
    return "zeiss_cirrus" if "zeiss" in make and "hd_oct" in model else ""


def stated_device(manufacturer: str, model: str) -> tuple[str, bool]:
    """(device, whether a model is stated) by a header or a manifest; a make alone never stands for one model of it.

    ("Carl Zeiss Meditec", "CIRRUS HD-OCT 5000") -> ("zeiss_cirrus", True), ("Zeiss", "") -> ("zeiss", False),
    ("Acme", "X-1") -> ("acme_x_1", True), ("", "") -> ("", False).
    """
    make, own = device_slug(manufacturer), device_slug(model)
    text = " ".join(f"{manufacturer} {model}".lower().split())
    name = text if text in _BY_NAME else _listed_name(make, own, text)
    if name or not own:
        return name or make, bool(name)
    words = dict.fromkeys([*make.split("_"), *own.split("_")]) if make else dict.fromkeys(own.split("_"))
    slug = "_".join(words)[:_LONGEST].strip("_")
    return slug, slug != make and slug not in _MAKES


def named_model(texts: Iterable[str], manufacturer: str, usual: str) -> str:
    """The listed model of `manufacturer` that one of a file's own `texts` names; otherwise `usual`.

    For formats of one make, most of whose files come from one instrument: ("ANTERION",) -> "ANTERION",
    ("Heidelberg Retina Angiograph",) -> "Spectralis", the name of its camera part and not of a separate OCT.
    """
    make = device_slug(manufacturer)
    names = (_listed_name(make, device_slug(text), text.lower()) for text in texts)
    return next((describe_device(name).model for name in names if name.startswith(f"{make}_")), usual)


def pick_device(stated: list[tuple[str, bool]], named: list[str], notes: list[str]) -> str:
    """The device of a scan, "unknown" if nothing names one; a disagreement is noted.

    `stated` are those of manifest and header (`stated_device`), `named` those of folder and file name, each the most
    trusted first. A stated model takes precedence; a folder completes a stated make, but never replaces it.
    """
    makes = [device for device, has_model in stated if device and not has_model]
    models = [device for device, has_model in stated if has_model] + [device for device in named if device]
    if len(set(models)) > 1 or any(not model.startswith(make) for make in makes for model in models):
        notes.append("device_disagrees")
    if not any(has_model for _, has_model in stated) and makes:
        return next((model for model in models if model.startswith(makes[0])), makes[0])
    return next(iter(models), UNKNOWN)


def describe_device(name: str) -> Device:
    """The device called `name`; of one that is not listed the make is the first word and the method unknown."""
    make, _, model = name.partition("_")
    return _BY_NAME.get(name) or Device(name, make, model.replace("_", " "))


def check_images_retina(name: str) -> None:
    """Raises VolumeRejected not_retina for a device of the anterior segment."""
    device = describe_device(name)
    if not device.images_retina:
        raise rejection(
            "not_retina",
            f"its device {name} ({device.make} {device.model}) images the anterior segment, not the retina",
        )
