"""The type checker behind jaxtyping in the tests: beartype, with int accepted for float as PEP 484 has it."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
