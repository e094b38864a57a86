"""Every exception as an HTTP answer in OpenAI's shape, in this one place.

The middleware `answer` in `app.py` and the events of a broken stream in `sse.py` both come here. What we
don't know is logged whole by the caller and answered neutrally.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from broker.errors import InternalError, LoadOnceError
from http_frontend.openai_types import ErrorBody, ErrorResponse
from http_frontend.own_types import GenerationError

RETRY_AFTER_S: Final = 1  # when nobody measured how long


class HttpError(Exception):
    """A refusal that only HTTP knows: no such route, no key, too many bytes.

    Attributes:
        status: the HTTP status.
        code: OpenAI's `code`.
        message: one sentence for the caller.
        param: the request's field at fault, or None.
        headers: more header lines for the answer.
        close: close the connection, because the rest of the request was not read.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers
        self.close = close


class Answer(msgspec.Struct, frozen=True):
    """An error, ready to be sent."""

    status: int
    error: ErrorBody
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False

    def body(self) -> bytes:
        """The body in OpenAI's shape."""
        return msgspec.json.encode(ErrorResponse(self.error))

    def generation_body(self) -> bytes:
        """The body in the shape of `POST /generation`."""
        error = self.error
        return msgspec.json.encode(
            GenerationError(self.status, error.message, error.param, error.code or error.type)
        )


_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "service_unavailable",
    504: "timeout",
}


def answer_to(problem: Exception) -> Answer:
    """The answer to an exception; any but ours is an internal error."""
    if isinstance(problem, HttpError):
        body = ErrorBody(problem.message, error_type(problem.status), problem.param, problem.code)
        return Answer(problem.status, body, problem.headers, problem.close)
    if not isinstance(problem, LoadOnceError):
        problem = InternalError("Something went wrong here. The request id finds it in the log.")
    status = problem.http_status
    headers: tuple[tuple[str, str], ...] = ()
    if problem.retryable and status in (429, 503):
        wait_ms = problem.retry_after_ms
        headers = (("Retry-After", str(RETRY_AFTER_S if wait_ms is None else math.ceil(wait_ms / 1000))),)
    return Answer(
        status, ErrorBody(problem.message, error_type(status), problem.param, problem.code), headers
    )


def error_type(status: int) -> str:
    """OpenAI's `type` for a status."""
    return _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
