"""What a request is refused for, in the form of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that isn't answered, or not to its end.

    Args:
        status: of HTTP.
        message: one sentence.
        param: the field of the body that it is about.
        code: a word for programs.
        outcome: what the metrics count it as.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        outcome: str = "refused",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.outcome, self.headers = outcome, headers

    @property
    def body(self) -> dict[str, Any]:
        """What is answered."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}
