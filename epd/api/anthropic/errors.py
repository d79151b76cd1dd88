"""Anthropic's form of errors."""

from __future__ import annotations

from epd.api.http.errors import ApiError
from epd.frontend import JsonObject

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str = "") -> JsonObject:
    """As Anthropic's, with the code and the field."""
    told = {
        "type": _ERRORS.get(error.status, "api_error" if error.status >= 500 else _ERRORS[400]),
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    body: JsonObject = {"type": "error", "error": told}
    return body | ({"request_id": request_id} if request_id else {})
