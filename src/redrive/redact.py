"""Scrubs secrets out of diagnostics before they leave the process. Total, linear, bounded."""

from __future__ import annotations

import re
import string

MASK = "***"
LONGEST_SECRET = 8192
_WINDOW = 3 * LONGEST_SECRET
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

# Finding where a secret could begin is cheap, because every hint starts with a plain letter; the costly pattern is
# tried there only. Both read the text in lower case: ignoring case by flag is ten times slower.
_HINTS = re.compile(
    "://|bearer|negotiate|basic|pass|pwd|secret|token|credential|auth|cookie|session|api|access|private|account|signing"
    "|encryption|master|storage|sig|sharedaccess|--[a-z]|eyj|akia|asia|gh[oprsu]_|github_pat_|glpat-|npm_|pypi-|xox|xapp-"
    "|rk_|sk_|sk-|whsec_|shpat_|dop_v1_|hvb|hvs|sg[.]|aiza|ya29[.]|-----begin"
)

# Every alternative either fails within a few hundred characters or consumes what it read, and what can be long is
# possessive: that keeps the whole linear, whatever the text. The last group of each is the secret.
_SECRET = re.compile(
    r"""(?x)
    ://[^\s:/@]{0,128}+:(?!//)((?:[^\s@"'<>]{0,256}+@){1,8})
  | ://([^\s:/@"'<>]{20,256}+@)
  | bearer\s{1,3}([a-z0-9._~+/=\-]{8,4096}+)
  | negotiate\s{1,3}((?:yi|tlrm)[a-z0-9+/=]{8,8192}+)
  | basic\s{1,3}(?P<basic>[a-z0-9+/=_\-]{8,4096}+)
  | (?:passw(?:or)?d|passphrase|passcode|(?<![a-z])pass|pwd|secret|token|credential|authorization|cookie
      |(?:api|access|private|account|signing|encryption|auth|master|storage)[_\-]?key|session[_\-]?id
      |(?<![a-z])sig(?!n)|(?<=[_\-])signature|sharedaccess(?:key|signature))
    [a-z0-9_\-]{0,40}+
    (?: > | \\{0,3}["'],\s{0,3}(?=b?["']) | \\{0,3}["']?\s{0,3}(?:=>|=|:|%3d)\s{0,3} )
    (?:b(?=["']))?(?P<quote>\\{0,3}["'])?
    (?:(?:bearer|basic|digest|token|apikey|negotiate)\s{1,3})?
    ((?(quote)(?:(?!(?P=quote))(?:\\.|[\s\S])){0,4096}+|[^\s"'&;<]{1,4096}+))
  | --[a-z][a-z\-]{0,40}+(?:(?<=password)|(?<=passwd)|(?<=secret)|(?<=token)|(?<=key))\s{1,3}([^\s\-]\S{0,4096}+)
  | (?<![a-z0-9])(eyj[a-z0-9_\-]{8,4096}+(?:\.[a-z0-9_\-]{1,4096}+){0,4})
  | \b((?:akia|asia)[a-z0-9]{16})\b
  | \b((?:gh[oprsu]_|github_pat_|glpat-|npm_|pypi-age|xox[abeprs]-|xapp-|[rs]k_(?:live|test)_|sk-|whsec_|shpat_|dop_v1_
      |hv[bs]\.|sg\.|aiza|ya29\.)[a-z0-9_.\-]{16,1024}+)
  | (-----begin\ [a-z0-9\ ]{0,30}private\ key(?:\ block)?-----(?:(?!-----end)[\s\S]){0,8192}+)
    """
)
_BASE64 = re.compile(r"[0-9+/=]|[a-z][A-Z]")


def scrub(text: str) -> str:
    """The text with credentials replaced; what surrounds them stays so that a person can still read it."""
    lowered = text.translate(_LOWER)
    hint = _HINTS.search(lowered)
    if hint is None:
        return text
    pieces, done = [], 0
    while hint is not None:
        found = _SECRET.match(lowered, hint.start())
        if found is None or (found["basic"] and not _BASE64.search(text, *found.span("basic"))):
            hint = _HINTS.search(lowered, hint.start() + 1)
            continue
        secret = found.start(found.lastindex or 0)
        pieces += [text[done:secret], MASK, "@" if lowered.startswith("://", found.start()) else ""]
        done = found.end()
        hint = _HINTS.search(lowered, done)
    return "".join(pieces) + text[done:]


def scrub_and_clip(text: str, limit: int) -> str:
    """At most `limit` characters, scrubbed, in a time that does not grow with the text."""
    if len(text) <= 2 * _WINDOW:
        return clip(scrub(text), limit)
    # The cut may fall into a secret and hide what gives it away, so the first stretch after it is left out.
    tail = scrub(text[-_WINDOW:])[LONGEST_SECRET:]
    mark = f" ...[{len(text) - limit} cut]... "
    head = limit * 2 // 3
    return scrub(text[:_WINDOW])[:head] + mark + tail[len(tail) - min(len(tail), limit - head - len(mark)) :]


def clip(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning and the end, which is where errors say what happened."""
    if len(text) <= limit:
        return text
    mark = f" ...[{len(text) - limit} cut]... "
    room = max(limit - len(mark), 0)
    head = room * 2 // 3
    return text[:head] + mark + text[len(text) - (room - head) :] if room else text[:limit]
