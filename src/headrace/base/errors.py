"""The error tree: every fault that the outside world can cause, with what to say and do about it.

A class carries a stable ``code``, the HTTP status at the edge, whether the same request may succeed
when repeated, and the error ``type`` that OpenAI clients read. Our own bugs are ``assert``s and never
appear here. Messages say what, the value, the limit, and what to do.

    HeadraceError
    ├── RequestError                 400  the caller's request is wrong (``param`` names the field)
    │   ├── ContextLengthError       400
    │   ├── AuthenticationError      401
    │   ├── PermissionDenied         403
    │   ├── NotFoundError            404
    │   ├── MethodNotAllowed         405
    │   ├── RequestTimeout           408  the client was too slow sending
    │   ├── PayloadTooLarge          413
    │   ├── UnsupportedMedia         415
    │   ├── QuarantinedError         422
    │   └── RateLimitError           429
    ├── OverloadedError              503  we are short: queue full, loading, draining
    ├── DeadlineError                504  the deadline passed before the first byte
    ├── EngineError                  500  the engine failed this request
    │   ├── NumericalError           500
    │   └── WorkerLostError          500  the worker died after the request had started
    ├── ConfigError                  –    exit code 2; file, line and nearest key where known
    ├── ModelError                   –    the model's files cannot be used
    │   ├── ModelFormatError         –    a header, shape or value in a file is wrong
    │   ├── ModelIntegrityError      –    a file is not the one that its manifest names
    │   ├── ModelUnsupportedError    –    well-formed, but this build does not run it
    │   └── ModelTooLargeError       –    does not fit this machine; the arithmetic is in the message
    ├── SourceError                  –    a model source could not be reached or does not have it
    ├── ProtocolError                –    a frame of the worker link is malformed
    └── MachineError                 –    this machine lacks something (native library, CPU feature)
        ├── AddressInUseError        –    another program listens there
        └── AlreadyRunningError      –    the same server runs already
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Base of all faults that are not our own bugs."""

    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = hint
        self.retry_after_s = retry_after_s
        self._code = code

    @property
    def stable_code(self) -> str:
        """The code on the wire: the instance's own where one was given, else the class's."""
        return self._code or self.code


class RequestError(HeadraceError):
    """The request is wrong; ``param`` names the field."""

    code = "invalid_value"
    error_type = "invalid_request_error"
    http_status = 400


class ContextLengthError(RequestError):
    """Prompt plus requested output does not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    error_type = "authentication_error"
    http_status = 401


class PermissionDenied(RequestError):
    """The key, address or origin may not do this."""

    code = "permission_denied"
    error_type = "permission_error"
    http_status = 403


class NotFoundError(RequestError):
    """Unknown route, model or object."""

    code = "not_found"
    error_type = "not_found_error"
    http_status = 404


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


class RequestTimeout(RequestError):
    """The client was too slow sending its request."""

    code = "request_read_timeout"
    error_type = "timeout_error"
    http_status = 408


class PayloadTooLarge(RequestError):
    """The body is over the limit."""

    code = "request_too_large"
    http_status = 413


class UnsupportedMedia(RequestError):
    """The content type or encoding is not accepted."""

    code = "unsupported_media_type"
    http_status = 415


class QuarantinedError(RequestError):
    """This request was running each time that workers died; it is not tried again."""

    code = "request_quarantined"
    http_status = 422


class RateLimitError(RequestError):
    """The caller is over its own limit."""

    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"
    http_status = 429
    is_retryable = True


class OverloadedError(HeadraceError):
    """We are short of capacity; nothing was started, a retry is safe."""

    code = "queue_full"
    error_type = "overloaded_error"
    http_status = 503
    is_retryable = True


class DeadlineError(HeadraceError):
    """The request's deadline passed before its first byte."""

    code = "generation_timeout"
    error_type = "timeout_error"
    http_status = 504


class EngineError(HeadraceError):
    """The engine failed this request."""

    code = "engine_error"


class NumericalError(EngineError):
    """The model produced NaN or infinity."""

    code = "numerical_error"


class WorkerLostError(EngineError):
    """The worker died after it had started this request."""

    code = "worker_lost"


class ConfigError(HeadraceError):
    """A setting is unknown, malformed or contradicts another; the message names file, line and key."""

    code = "invalid_config"


class ModelError(HeadraceError):
    """The model's files cannot be used."""

    code = "model_invalid"


class ModelFormatError(ModelError):
    """A header, shape or value in a model file is wrong."""

    code = "model_format"


class ModelIntegrityError(ModelError):
    """A file's bytes are not the ones that its manifest names."""

    code = "model_integrity"


class ModelUnsupportedError(ModelError):
    """The model is well-formed, but this build does not run it."""

    code = "model_unsupported"


class ModelTooLargeError(ModelError):
    """The model does not fit this machine."""

    code = "model_too_large"


class SourceError(HeadraceError):
    """A model source could not be reached, or does not have what was asked for."""

    code = "source_unavailable"
    is_retryable = True


class ProtocolError(HeadraceError):
    """A frame of the worker link is malformed, oversized or of another version."""

    code = "protocol_error"


class MachineError(HeadraceError):
    """This machine lacks something that is needed: the native library, a CPU feature, memory."""

    code = "machine_unfit"


class AddressInUseError(MachineError):
    """Another program listens on the address that we were told to use."""

    code = "address_in_use"


class AlreadyRunningError(MachineError):
    """A server with the same name and state folder runs already."""

    code = "already_running"
