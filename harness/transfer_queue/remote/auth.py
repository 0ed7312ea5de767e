"""Who may talk to a queue: whoever proves to have its token, which itself never travels."""

from __future__ import annotations

import hmac
import secrets


def new_token() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    """32 bytes that no other connection is challenged with."""
    return secrets.token_bytes(32)


def digest(token: bytes, nonce: bytes) -> bytes:
    """HMAC-SHA256 of the server's challenge."""
    return hmac.digest(token, b"transfer queue client" + nonce, "sha256")


def check(token: bytes, nonce: bytes, answer: bytes) -> None:
    """PermissionError unless the answer was made with this token."""
    if not hmac.compare_digest(digest(token, nonce), answer):
        raise PermissionError("the transfer queue refuses a client without its token")
