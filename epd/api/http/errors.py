"""Errors in OpenAI's format: status, type, code, and the name of the parameter that is at fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from epd.frontend import JsonObject

RETRY_AFTER_S = 1.0  # where nobody can know when it is worth another try


class ApiError(Exception):
    """What the client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        """`headers`: of the response, besides; `retry_after_s`: of one that may be retried."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.retry_after_s = retry_after_s

    @property
    def may_be_retried(self) -> bool:
        """The request has no fault: Retry-After is sent, too."""
        return self.status in (429, 503)

    @property
    def body(self) -> JsonObject:
        """The JSON object of the response, or of the in-band event of a stream, as OpenAI's."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def retry_after(wait_s: float = RETRY_AFTER_S) -> tuple[bytes, bytes]:
    """The header with the time of the next try; it has whole seconds."""
    return b"retry-after", b"%d" % max(1, math.ceil(wait_s))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def openai_body(error: ApiError, request_id: str = "") -> JsonObject:
    """The JSON object of a response; OpenAI has the request's id in a header only."""
    return error.body


def failure_event(error: ApiError) -> bytes:
    """What ends a stream that has begun and cannot go on."""
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"
