"""Whether a Ray cluster answers at an address, and, when it does not let us in, which part of the token is wrong.

Ray 2.60 itself only says ``Failed to connect to Ray cluster``. The GCS speaks gRPC; one call without a token and one
with ours tell a missing token, a wrong one and a mode that is off apart. Nothing is started and no cluster is joined.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Mapping

_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_VERSION = re.compile(rb"\d+\.\d+\.\d+[0-9A-Za-z.]*")


class Answer(enum.Enum):
    """How a GCS answers one call."""

    OK = "ok"
    UNAUTHENTICATED = "unauthenticated"
    UNREACHABLE = "unreachable"


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What was found: ``is_ok``, one line that says what it is, one that says what to do (empty when it is fine)."""

    is_ok: bool
    detail: str
    fix: str = ""
    ray_version: str = ""


@dataclasses.dataclass(frozen=True)
class TokenSetting:
    """What this process would present to a cluster."""

    mode: str
    token: str
    source: str

    @property
    def is_token_mode(self) -> bool:
        return self.mode == "token"


Call = Callable[[str, str], tuple[Answer, bytes]]


def read_token_setting(environ: Mapping[str, str]) -> TokenSetting:
    """Mode and token as Ray reads them: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ``~/.ray/auth_token``, in this order."""
    path = environ.get("RAY_AUTH_TOKEN_PATH") or os.path.join(environ.get("HOME", ""), ".ray", "auth_token")
    token, source = environ.get("RAY_AUTH_TOKEN", ""), "RAY_AUTH_TOKEN"
    if not token:
        source = path
        try:
            with open(path, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError:
            token = ""
    # With no mode set, Ray uses a token where it finds one.
    mode = environ.get("RAY_AUTH_MODE", "").lower() or ("token" if token else "disabled")
    return TokenSetting(mode, token, source)


def probe_cluster(address: str, environ: Mapping[str, str], call: Call | None = None) -> ProbeResult:
    """Ask the GCS at ``host:port`` whether it is there and lets us in. Bounded: two calls of 5 s each."""
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if match is None:
        return ProbeResult(False, f"{address!r} is not an address of the form host:port", "see `ray status`")
    if address.startswith("ray://"):
        return ProbeResult(False, f"{address} is a Ray Client address", "use the GCS address, host:6379 by default")
    call = call or _grpc_call
    answer, reply = call(address, "")
    if answer is Answer.UNREACHABLE:
        return ProbeResult(False, f"nothing answers at {address}", "is the cluster up, the port right and open?")
    version = _VERSION.search(reply)
    setting = read_token_setting(environ)
    if answer is Answer.OK:
        return ProbeResult(True, f"Ray at {address} answers; it asks for no token", "", _text(version))
    if not setting.token:
        fix = "put the cluster's token into RAY_AUTH_TOKEN, or into a file named by RAY_AUTH_TOKEN_PATH"
        return ProbeResult(False, f"Ray at {address} asks for a token: token missing ({setting.source} has none)", fix)
    answer, reply = call(address, setting.token)
    if answer is not Answer.OK:
        fix = "take the token of the cluster's head node (`ray get-auth-token` there)"
        return ProbeResult(False, f"Ray at {address} asks for a token: token wrong (from {setting.source})", fix)
    version = _VERSION.search(reply)
    if not setting.is_token_mode:
        detail = f"Ray at {address} asks for a token: mode off (RAY_AUTH_MODE={setting.mode})"
        return ProbeResult(False, detail, "set RAY_AUTH_MODE=token; the token itself is right", _text(version))
    return ProbeResult(True, f"Ray at {address} answers and accepts the token", "", _text(version))


def _text(match: re.Match[bytes] | None) -> str:
    return match[0].decode() if match else ""


def _grpc_call(address: str, token: str) -> tuple[Answer, bytes]:
    # grpcio comes with ray[default].
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary(
            _CHECK_ALIVE, request_serializer=lambda request: request, response_deserializer=lambda reply: reply
        )
        try:
            return Answer.OK, method(b"", metadata=metadata, timeout=5.0)
        except grpc.RpcError as error:
            refused = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            return (Answer.UNAUTHENTICATED if refused else Answer.UNREACHABLE), b""
