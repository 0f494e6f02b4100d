"""The hub: names on it, whether it can be reached, and why it refuses a model or a data set. Loads nothing itself."""

import os
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

HUB = "https://huggingface.co"  # licences are accepted there, whatever mirror HF_ENDPOINT names
LOG_IN = "`hf auth login` (or set HF_TOKEN)"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refusal(error: Exception, ref: str, data: bool = False) -> str | None:
    """What the hub's answer means for `ref`, and the remedy; None if `error` is not about permission."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    page, what = f"{HUB}/{'datasets/' if data else ''}{ref}", "data set" if data else "model"
    for cause in _causes(error):
        # `datasets` raises an error of its own, of which the text alone says what the hub's client had raised.
        if isinstance(cause, GatedRepoError) or (data and "is a gated dataset" in str(cause)):
            known = "; the token that is set here has no access yet" if has_token() else ""
            return f"{ref} is gated: accept its licence at {page}, then log in with {LOG_IN}{known}"
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        hidden = isinstance(cause, RepositoryNotFoundError) or (data and "cannot be accessed" in str(cause))
        if hidden or (status == 401 and not has_token()):
            return (
                f"the hub shows no {what} {ref}{_to_whom()}: check the name at {page}; if it is private, log in with "
                f"{LOG_IN} as someone who may read it"
            )
        if status in (401, 403):
            return f"the hub refuses {ref} ({status}){_to_whom()}: see {page}, and log in anew with {LOG_IN}"
    return None


def has_token() -> bool:
    """Whether there is a token for the hub, in HF_TOKEN or from `hf auth login`."""
    from huggingface_hub import get_token

    return get_token() is not None


def _to_whom() -> str:
    return " to the token that is set here" if has_token() else " without a token"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself, then what it was raised from."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def reachable() -> bool:
    """Whether the hub's name resolves. Without this check the hub's client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves the name
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
