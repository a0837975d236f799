"""Scrubs secrets out of diagnostics before they leave the process. Total, linear, bounded."""

from __future__ import annotations

import re

MASK = "***"

_SECRETS = re.compile(
    r"""(?ix)
    (?P<dsn>\b[a-z][a-z0-9+.\-]{1,20}://[^\s:/@]{0,128}:)[^\s@/]{1,256}(?=@)
  | (?P<auth>\b(?:bearer|basic)\s+)[a-z0-9._~+/=\-]{8,4096}
  | (?P<named>["']?\b[a-z0-9_\-]{0,40}
      (?:password|passwd|pwd|secret|token|api[_\-]?key|access[_\-]?key|private[_\-]?key|authorization
        |sharedaccesskey|accountkey|credential)
      [a-z0-9_\-]{0,20}["']?\s{0,3}[=:]\s{0,3}["']?)[^\s"',;&)}\]]{1,4096}
  | \beyJ[a-z0-9_\-]{8,4096}\.[a-z0-9_\-]{8,4096}\.?[a-z0-9_\-]{0,4096}
  | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
  | \b(?:ghp|gho|ghs|xox[abp]|sk_live|sk_test|rk_live)[_\-][a-z0-9\-]{10,256}
  | -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----[^-]{0,8192}
    """
)


def scrub(text: str) -> str:
    """The text with credentials replaced; what surrounds them stays so that a person can still read it."""
    return _SECRETS.sub(_hide, text)


def _hide(found: re.Match[str]) -> str:
    kept = found["dsn"] or found["auth"] or found["named"] or ""
    return kept + MASK


def clip(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning and the end, which is where errors say what happened."""
    if len(text) <= limit:
        return text
    mark = f" ...[{len(text) - limit} cut]... "
    room = max(limit - len(mark), 0)
    head = room * 2 // 3
    return text[:head] + mark + text[len(text) - (room - head) :] if room else text[:limit]
