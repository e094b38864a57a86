"""Every error that a caller can meet, with its wire code, HTTP status and whether a retry helps.

    LoadOnceError
    ├── InvalidRequest            400  invalid_request          the caller's fault; names the field
    │   ├── UnsupportedParameter  400  unsupported_parameter    known to us, not served
    │   └── ContextTooLong        400  context_length_exceeded  prompt + max_tokens past the model's context
    ├── ModelNotFound             404  model_not_found          nobody has ever served that model
    ├── NotFound                  404  not_found                no such request or worker
    ├── Overloaded                429  overloaded               a bound was reached; retry later
    ├── Unavailable               503  unavailable              no worker for the model just now; retry later
    ├── OutOfMemory               503  out_of_memory            the device has no room; retry later
    ├── DeadlineExceeded          504  deadline_exceeded        the request's own deadline passed
    ├── Cancelled                 499  cancelled                the caller, or an operator, cancelled it
    ├── RequestFailed             500  request_failed           it took down its workers
    ├── InternalError             500  internal_error           our bug; the log has the rest
    └── ProtocolError             400  protocol_error           frames or headers that break the protocol
        └── VersionMismatch       400  protocol_version         another version of the protocol

An exception holds data and builds its sentence from it; the frontend maps it to HTTP in one place.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec


class LoadOnceError(Exception):
    """Base of all errors that cross the wire.

    Attributes:
        message: one sentence for the caller.
        param: name of the request field at fault, or None.
        retry_after_ms: when a retry may succeed, in milliseconds; None if it won't or nobody knows.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms


class InvalidRequest(LoadOnceError):
    """The request is wrong; sending it again won't help."""

    code = "invalid_request"
    http_status = 400


class UnsupportedParameter(InvalidRequest):
    """A field that is known but not served."""

    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    """Prompt and requested tokens don't fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(LoadOnceError):
    """No worker has served this model since the broker started."""

    code = "model_not_found"
    http_status = 404


class NotFound(LoadOnceError):
    """No such request or worker."""

    code = "not_found"
    http_status = 404


class Overloaded(LoadOnceError):
    """A bound was reached; `retry_after_ms` comes from the measured drain rate."""

    code = "overloaded"
    http_status = 429
    retryable = True


class Unavailable(LoadOnceError):
    """The model is known, but no worker serves it at present."""

    code = "unavailable"
    http_status = 503
    retryable = True


class OutOfMemory(LoadOnceError):
    """The device has no memory left for this request."""

    code = "out_of_memory"
    http_status = 503
    retryable = True


class DeadlineExceeded(LoadOnceError):
    """The request's deadline, counted from its submit, has passed."""

    code = "deadline_exceeded"
    http_status = 504
    retryable = True


class Cancelled(LoadOnceError):
    """The caller or an operator cancelled the request."""

    code = "cancelled"
    http_status = 499


class RequestFailed(LoadOnceError):
    """The request brought down as many workers as it may; it isn't tried again."""

    code = "request_failed"


class InternalError(LoadOnceError):
    """A fault of ours. The log has the details, the caller gets a neutral sentence."""


class ProtocolError(LoadOnceError):
    """Frames or a header that break the wire protocol."""

    code = "protocol_error"
    http_status = 400


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    code = "protocol_version"


def _walk(root: type[LoadOnceError]) -> list[type[LoadOnceError]]:
    return [root, *(found for child in root.__subclasses__() for found in _walk(child))]


# The base shares its code with InternalError, which comes later and wins.
BY_CODE: dict[str, type[LoadOnceError]] = {cls.code: cls for cls in _walk(LoadOnceError)}


def from_wire(
    code: str, message: str, *, param: str | None = None, retry_after_ms: int | None = None
) -> LoadOnceError:
    """Rebuild the exception that a peer reported; an unknown code becomes `InternalError`."""
    cls = BY_CODE.get(code, InternalError)
    return cls(message, param=param, retry_after_ms=retry_after_ms)


_PATH = re.compile(r"^(?P<why>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]+)`")


def from_validation(problem: Exception, *, within: str = "") -> InvalidRequest:
    """Turn a msgspec error into an `InvalidRequest` that names the field.

    Args:
        problem: what `msgspec` raised.
        within: prefix to drop from the field's path, such as ``params``.
    """
    if isinstance(problem, RecursionError):
        return InvalidRequest("The request is nested too deeply.")
    if not isinstance(problem, msgspec.ValidationError):
        return InvalidRequest(f"The request could not be decoded: {problem}.")
    match = _PATH.match(str(problem))
    why, path = (match["why"], match["path"] or "") if match else (str(problem), "")
    named = _MISSING.search(why) or _UNKNOWN.search(why)
    if named:
        path = f"{path}.{named['name']}" if path else named["name"]
    path = path.removeprefix(f"{within}.") if within else path
    return InvalidRequest(f"{path or 'request'}: {why}", param=path or None)
