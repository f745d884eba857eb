"""Retries: which failures are transient, how long to wait for them, and the message for the user about the others.

Transient are timeouts, connections reset or refused, answers 408, 429 and 5xx, bodies that came short or damaged. The
wait before try n is uniform from 0 to first_wait * 2^(n-1) seconds ("full jitter", so that workers that failed together
do not return together). Everything else is reported at once.

No message repeats a text of the store or its library: it can hold a key or a signed address.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from octjepa.errors import MORE_FILES, OctjepaError, ResourceError, UsageError

_log = logging.getLogger(__name__)
_thread = threading.local()
T = TypeVar("T")

# Classes by name, of the error or one it derives from: importing botocore and aiohttp would load both always.
_TRANSIENT = {
    "TimeoutError",
    "ConnectionError",
    "DamagedBody",
    "HTTPClientError",
    "ConnectionClosedError",
    "IncompleteReadError",
    "ResponseParserError",
    "FlexibleChecksumError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ChecksumError",
    "FSTimeoutError",
}
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "GoogleAuthError",
}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}  # a signature holds the time of day
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}


class AbsentObject(UsageError):
    """The bucket has no object at this address. Other errors concern the whole bucket, or access to it."""


class ChangedObject(AbsentObject):
    """An object is gone, or has other content, since it was listed. The same command may succeed."""

    exit_code = 1


class DamagedBody(Exception):
    """A body that is not what the store said it is: too short, or with another checksum."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often and for how long a transient failure is retried."""

    tries: int = 8
    total_seconds: float = 300.0
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 30.0
    timeout_seconds: float = 60.0  # without a byte from the store

    @classmethod
    def from_environment(cls) -> RetryPolicy:
        """OCTJEPA_REMOTE_TRIES, _SECONDS, _WAIT and _TIMEOUT over the defaults. Raises UsageError for no number."""
        return cls(
            tries=max(1, int(_number("OCTJEPA_REMOTE_TRIES", cls.tries))),
            total_seconds=_number("OCTJEPA_REMOTE_SECONDS", cls.total_seconds),
            first_wait_seconds=_number("OCTJEPA_REMOTE_WAIT", cls.first_wait_seconds),
            timeout_seconds=_number("OCTJEPA_REMOTE_TIMEOUT", cls.timeout_seconds),
        )


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{variable} is {text!r}: expected a number above 0")
    return value


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it: fsspec's file systems wrap what their libraries raise."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _code(error: BaseException) -> tuple[int, str]:
    """(HTTP status or 0, the store's code such as "SlowDown" or "")."""
    for link in _chain(error):
        if _names(link) & _TRANSIENT:  # aiohttp files a body cut short under the code 400
            return 0, ""
        response = getattr(link, "response", None)
        if isinstance(response, dict):  # botocore's ClientError
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            return int(status or (code if code.isdigit() else 0)), code
        for name in ("code", "status"):  # gcsfs, aiohttp
            value = getattr(link, name, None)
            if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
                return int(value), ""
    if isinstance(error, FileNotFoundError):
        return 404, ""
    if isinstance(error, FileExistsError):
        return 412, ""
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):  # gcsfs writes 403 in words
        return 403, ""
    return 0, ""


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _classes(error: BaseException) -> set[str]:
    return {name for link in _chain(error) for name in _names(link)}


def out_of_open_files(error: BaseException) -> bool:
    """True if no socket could be opened because too many files are open; botocore hides the cause in its context."""
    links = [error_in_chain for link in _chain(error) for error_in_chain in (link, link.__context__)]
    return any(isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE} for error in links)


def is_transient(error: BaseException) -> bool:
    """True where the same call may succeed in a moment."""
    if out_of_open_files(error):
        return False
    status, code = _code(error)
    if status:
        return status in {408, 429} or (status >= 500 and status != 501) or code == "RequestTimeout"
    if any(getattr(link, "retryable", False) is True for link in _chain(error)):  # google.auth
        return True
    return bool(_classes(error) & _TRANSIENT)


def is_absent(error: BaseException) -> bool:
    """True where the store answers that there is no such object or bucket."""
    return _code(error)[0] == 404


def is_conflict(error: BaseException) -> bool:
    """True where a write that may not overwrite found an object."""
    return _code(error)[0] in {409, 412}


def user_error(error: BaseException, action: str, url: str) -> OctjepaError:
    """The error for the user: what was attempted at `url`, what kind of failure it is, what to do."""
    if out_of_open_files(error):
        return ResourceError(f"cannot {action} {url}: {os.strerror(errno.EMFILE)}: {MORE_FILES}")
    status, code = _code(error)
    description = " ".join(str(part) for part in (status or "", code if code != str(status) else "") if part)
    description = description or type(error).__name__
    bucket = "/".join(url.split("/")[:3])
    if status == 404:
        if code == "NoSuchBucket":
            return UsageError(f"cannot {action} {url}: there is no bucket {bucket}")
        return UsageError(f"cannot {action} {url}: there is nothing at this address, or no bucket {bucket}")
    if code in _CLOCK:
        return UsageError(
            f"cannot {action} {url}: the store refuses the date of the requests ({code}), because the clock of this "
            "machine is wrong: set it (NTP) and run the same command again"
        )
    if status in {401, 403} or code in _DENIED:
        return UsageError(
            f"cannot {action} {url}: access is denied ({description}). Check the credentials in the environment and "
            "their rights on the bucket; for a public bucket set OCTJEPA_ANONYMOUS=1"
        )
    if _classes(error) & _NO_CREDENTIALS:
        way = (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            if url.startswith("s3")
            else "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
        )
        return UsageError(
            f"cannot {action} {url}: no credentials were found. Set {way}; for a public bucket OCTJEPA_ANONYMOUS=1"
        )
    return OctjepaError(f"cannot {action} {url}: {description}")


def retry_count() -> int:
    """How often this thread has retried so far."""
    return int(getattr(_thread, "retries", 0))


def with_retries(call: Callable[[], T], action: str, url: str, policy: RetryPolicy) -> T:
    """`call()`, repeated after transient failures.

    A permanent failure is raised as it is. Raises OctjepaError after `policy` is used up.
    """
    start = time.monotonic()
    for number in range(1, policy.tries + 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            seconds = time.monotonic() - start
            wait = random.uniform(0, min(policy.longest_wait_seconds, policy.first_wait_seconds * 2 ** (number - 1)))
            if number == policy.tries or seconds + wait > policy.total_seconds:
                raise OctjepaError(
                    f"{user_error(error, action, url)}, {number} times in {seconds:.0f} s. The store does not answer "
                    "as it should: run the same command again later; what was finished is kept"
                ) from None
            status, code = _code(error)
            _log.info(
                "%s %s: %s, try %d of %d in %.1f s",
                action,
                url,
                code or status or type(error).__name__,
                number + 1,
                policy.tries,
                wait,
            )
            _thread.retries = retry_count() + 1
            time.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")
