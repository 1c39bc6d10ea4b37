"""What must not be written into a run's directory, which may be shown to anyone: secrets, by their names and places."""

from __future__ import annotations

import re

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY|APIKEY|AUTH", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def redacted(name: str, value: str) -> str:
    """The value of an environment variable as it may be recorded: a secret blanked, and credentials inside a URL."""
    return "<redacted>" if _SECRET.search(name) else _CREDENTIALS_IN_URL.sub("<redacted>@", value)
