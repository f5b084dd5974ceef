"""Keep secrets out of everything that is written or shown: text, bytes, objects in; the same without secrets out.

Three things are recognised: a value that stands beside a name that means a secret (`api_key='x'`, `--api-key x`,
`"Authorization": "Bearer x"`, `HF_TOKEN=x`, `https://user:x@host`), a value whose own shape is that of a known token
(`hf_...`, `sk-...`, `AKIA...`, a JWT, a private key), and exact values that the caller knows, in whatever encoding.
An absent value (`None`, null, empty, false, `${NAME}`) stays, so that "no key was set" remains visible.
Applying it twice changes nothing more. It runs on every log line: a line without any hint costs about a microsecond.

Source: SGLang dumps `api_key`, `admin_api_key` and `ssl_keyfile_password` in its `server_args=` line, in /server_info
and in each JSONL row of bench_serving (server_args.py `dataclasses.asdict`, 0.5.11 to 0.5.23).
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

#: What stands in a secret's place. Plain letters: it survives every quoting and encoding that the value stood in.
REDACTED = "REDACTED"

#: Exact values shorter than this are not searched for everywhere: they would destroy numbers and words.
MIN_EXACT_LENGTH = 4

_MAX_DEPTH = 200
#: A value that was hidden may have stood between a name and another value; a second pass sees that.
_MAX_PASSES = 8

# Names that mean a secret, in any case and with '_', '-' or nothing between the words; only their end has to match.
_ANY_CASE = (
    r"api[ _-]?keys?|pass(?:word|wd|phrase)s?|secrets?|secret[_-]?(?:access[_-]?)?keys?|access[_-]?key(?:[_-]?id)?"
    r"|private[_-]?key|authorization|(?:set-)?cookie|credentials"
    r"|(?:hf|hub|access|auth|bearer|refresh|session|security|api|secret|github|gitlab|wandb|slack)[_-]token"
)
# Environment spellings: only in capitals, because `eos_token=` and `cache_key=` are ordinary words in lower case.
_CAPITALS = r"_(?:TOKEN|PASS|KEY|AUTH|SECRET)"
_NAME = rf"(?:(?i:{_ANY_CASE})|{_CAPITALS})(?![\w-])"
#: Capitals whose words say that it is no secret: BOS_TOKEN, PUBLIC_KEY, HF_HUB_DISABLE_IMPLICIT_TOKEN.
_ORDINARY = re.compile(
    r"(?:^|_)(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|IMAGE|VIDEO|AUDIO|STOP|START|END|MAX|MIN|NUM|PER|NEXT|LAST|FIRST|THINK|BONUS)_TOKEN$"
    r"|(?:^|_)(?:PUBLIC|CACHE|SORT|PRIMARY|FOREIGN|ROUTING|PARTITION|HASH|SHARD|GROUP)_KEY$|(?:^|_)(?:DISABLE|ENABLE)_"
    r"|(?:^|_)(?:FORWARD|BACKWARD|SINGLE|MULTI|FAST|DRY|BY)_PASS$"
)

_END = r"""(?=[\s,;&)\]}"']|\\["']|$)"""
_ABSENT = rf"(?:None|null|none|nil|NULL|True|False|true|false|\$\{{[A-Za-z_]\w*\}}|\$[A-Z][A-Z0-9_]*){_END}"
_QUOTED = r""""(?:\\[\s\S]|[^"\\\n])*"|'(?:\\[\s\S]|[^'\\\n])*'|["'][^\n]*"""
_ESCAPED = r"""(?P<{0}>\\+["'])(?:(?!(?P={0}))[^\n])*(?:(?P={0}))?"""
_BARE = r"""(?:\\[^\s"']|[^\s"'&;\\])+(?:(?:'[^'\s,]+'|"[^"\s,]+")[^\s"'&;\\]*)*"""
_PAIR = re.compile(
    rf"(?P<name>{_NAME})(?P<kq>\\*[\"']|\])?(?P<sep>[ \t]*(?:=>|:=|=|:)[ \t]*(?:[bru]{{1,2}}(?=[\"']))?)"
    rf"(?P<value>{_ABSENT}|{_ESCAPED.format('vq')}|{_QUOTED}|\[[^\]\n]*\]"
    rf"|(?i:bearer|basic|digest)[ \t]+[^\s\"',;]+|{_BARE})"
)
_HEADER = re.compile(
    r"""(?P<name>(?i:authorization|cookie))(?P<kq>\\*["'])?(?P<sep>[ \t]*:[ \t]*|,[ \t]*b?(?=["']))"""
    rf"""(?P<value>{_ABSENT}|{_ESCAPED.format("hq")}|{_QUOTED}|[^\s"'][^"'\r\n]*)"""
)
_ASSIGNED_IN_QUOTES = re.compile(
    rf"""(?P<oq>["'])(?P<name>[\w.-]{{0,80}}?{_NAME})(?P<sep>=)(?P<value>(?!\\*["'])(?:\\[^\n]|(?!(?P=oq))[^\\\n])+)(?=(?P=oq))"""
)
_FLAG = re.compile(
    rf"""(?<![\w-])(?P<name>--?[\w-]{{0,60}}?(?:(?i:{_ANY_CASE})|token))(?![\w-])"""
    r"""(?P<sep>(?:\s|\\\r?\n)+|\\*["'][ \t]*,\s*[bru]?(?=\\*["']))"""
    rf"""(?P<value>{_ABSENT}|{_ESCAPED.format("fq")}|{_QUOTED}|(?!-){_BARE})"""
    r"""(?P<more>(?:[ \t]+(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])(?!-)[\w.-]{8,}(?![\w./:=-]))*)"""
)
_BEARER = re.compile(
    r"(?P<sep>\b[Bb]earer[ \t]+)(?P<value>(?!(?:[Tt]okens?|[Aa]uth\w*|scheme|header|is|and|or)\b)[\w.~+/=-]{4,})"
)
_URL_USER = re.compile(r"""(?P<sep>://[^\s/:@"'?#]{0,200}:)(?P<value>[^\s/@"']{1,400})(?=@)""")
_URL_QUERY = re.compile(
    r"""(?P<sep>[?&](?i:token|key|sig|signature|auth|pwd|x-amz-(?:signature|credential|security-token))=)(?P<value>[^&\s"'#<>]+)"""
)
_TOKEN_MEMBER = re.compile(
    r"""(?P<sep>["'](?i:token)["'][ \t]*:[ \t]*["'])(?P<value>(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{20,})(?=["'])"""
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?P<value>hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_PRIVATE_KEY = re.compile(r"(?P<sep>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?P<value>[\s\S]*?)(?=-----END|\Z)")

#: Without one of these (in the lowered text) none of the patterns above can match.
_HINTS = (
    "key", "_token", "passw", "passph", "secret", "authoriz", "bearer", "cookie", "credentials", "_pass", "_auth",
    "://", "hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat", "akia", "asia", "xox", "glpat",
    "nvapi", "eyj", "token=", "token'", 'token"', "--token", "hf-token", "hub-token", "auth-token", "access-token",
    "bearer-token", "refresh-token", "session-token", "security-token", "api-token", "github-token", "gitlab-token",
    "wandb-token", "slack-token", "&sig", "?sig", "pwd",
)  # fmt: skip


#: For a short text one pattern is faster than a search for each hint; for a long one it is the other way round.
_HINT = re.compile("|".join(map(re.escape, _HINTS)))
_SHORT_TEXT = 64


def _has_hint(text: str) -> bool:
    """Whether any of the patterns can match: what runs on every line and word."""
    lowered = text.lower()
    if len(lowered) <= _SHORT_TEXT:
        return _HINT.search(lowered) is not None
    return any(hint in lowered for hint in _HINTS)


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with every secret replaced by `REDACTED`; absent values (None, null, empty) stay visible.

    Args:
        text: any text: a log line, a unit file, JSON, a command line.
        secrets: exact values to remove wherever they stand, also URL-, JSON-, HTML- or shell-encoded; values shorter
            than 4 characters are only removed beside a name that means a secret.

    Example: `redact_text("api_key='abc', port=30000")` is `"api_key='REDACTED', port=30000"`.
    """
    exact = _exact_pattern(tuple(sorted({s for s in secrets if s})))
    if exact is not None:
        text = exact.sub(REDACTED, text)
    if not _has_hint(text):
        return text
    for _ in range(_MAX_PASSES):
        once = text
        text = _redact_patterns(once, None)
        if text == once:
            break
    return text


def redact_bytes(data: bytes, secrets: Iterable[str] = ()) -> bytes:
    """The bytes with every secret replaced; bytes that are not UTF-8 pass through unchanged."""
    return redact_text(data.decode("utf-8", "surrogateescape"), secrets).encode("utf-8", "surrogateescape")


def redact_object(obj: T, secrets: Iterable[str] = ()) -> T:
    """The same object without secrets: values whose key means a secret, arguments after a secret's flag, and all text.

    Handles dict, list, tuple, set, str, bytes, dataclasses and pydantic models; anything else is returned as it is.
    An environment entry of the form `{"name": "HF_TOKEN", "value": "x"}` is understood.

    Example: `redact_object({"api_key": "abc", "port": 1})` is `{"api_key": "REDACTED", "port": 1}`.
    """
    hidden: T = _walk(obj, tuple(secrets), False, 0)
    return hidden


def find_secrets(obj: object) -> tuple[str, ...]:
    """Values that stand beside a name that means a secret, to be removed elsewhere too (4 characters or more).

    Example: `find_secrets({"args": ["--api-key", "abcd"]})` is `("abcd",)`.
    """
    found: list[str] = []
    _collect(obj, False, found, 0)
    return tuple(sorted({value for value in found if len(value) >= MIN_EXACT_LENGTH and value != REDACTED}))


def is_secret_name(name: str) -> bool:
    """Whether a key, flag or variable of this name holds a secret (`admin_api_key`, `--hf-token`, `HF_TOKEN`)."""
    return any(match.end() == len(name) for match in re.finditer(_NAME, name)) and not _ORDINARY.search(name)


def _redact_patterns(text: str, found: list[str] | None) -> str:
    def named(match: re.Match[str]) -> str:
        name = match["name"]
        if name.startswith("_"):
            start = match.start()
            head = re.search(r"[\w.-]*\Z", text_now[max(0, start - 80) : start])
            name = (head[0] if head else "") + name
        if _ORDINARY.search(name):
            return match[0]
        value = match["value"]
        if re.sub(r"\W", "", value) == name.lstrip("-").replace("-", "_").upper():
            return match[0]  # a usage line: [--api-key API_KEY]
        more = match.groupdict().get("more") or ""
        if found is not None:
            found.extend(part for part in [_inner(value), *more.split()] if part.strip() and not _IS_ABSENT.match(part))
        start = match.start("value") - match.start()
        tail = match[0][start + len(value) + len(more) :]
        return match[0][:start] + _hide(value) + re.sub(r"\S+", REDACTED, more) + tail

    def shaped(match: re.Match[str]) -> str:
        if match["value"].startswith("sk-") and not re.search(r"\d", match["value"]):
            return match[0]  # a word such as sk-learn-compatible-something
        if found is not None:
            found.append(match["value"])
        prefix = match.groupdict().get("sep") or ""
        return prefix + REDACTED

    for pattern, how in _PATTERNS:
        text_now = text
        text = pattern.sub(named if how else shaped, text)
    return text


_PATTERNS: tuple[tuple[re.Pattern[str], bool], ...] = (
    (_PRIVATE_KEY, False),
    (_HEADER, True),
    (_ASSIGNED_IN_QUOTES, True),
    (_FLAG, True),
    (_PAIR, True),
    (_BEARER, False),
    (_URL_USER, False),
    (_URL_QUERY, False),
    (_TOKEN_MEMBER, False),
    (_SHAPES, False),
)
_IS_ABSENT = re.compile(_ABSENT + r"\Z")


def _inner(value: str) -> str:
    """The value without the quotes around it."""
    quote = re.match(r"""\\*["']""", value)
    if quote:
        value = value[quote.end() :]
        return value[: -len(quote[0])] if value.endswith(quote[0]) else value
    return value.rstrip(",)]}")


def _hide(value: str) -> str:
    """The value's quotes or brackets with the placeholder in them; an absent value as it is."""
    opening = re.match(r"""\\*["']|\[""", value)
    if opening is None:
        if _IS_ABSENT.match(value):
            return value
        stripped = value.rstrip(",)]}")
        return REDACTED + value[len(stripped) :] if stripped else value
    closing = "]" if opening[0] == "[" else opening[0]
    inner = value[opening.end() :]
    closed = inner.endswith(closing)
    inner = inner[: -len(closing)] if closed else inner
    if not inner.strip() or _IS_ABSENT.match(inner):
        return value
    if opening[0] == "[" and not re.search(r"[^\s,\"']", re.sub(r"\b(?:None|null)\b", "", inner)):
        return value
    return opening[0] + REDACTED + (closing if closed else "")


#: A longer value is no key that stands percent-encoded in a URL; a pattern for each of its characters takes seconds.
_MAX_PERCENT = 512


@functools.lru_cache(maxsize=64)
def _exact_pattern(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    """One pattern for all exact values in all their encodings; the placeholder first, so that it is never cut up."""
    forms: set[str] = set()
    for secret in secrets:
        if len(secret) < MIN_EXACT_LENGTH:
            continue
        escaped = [secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]]
        escaped += [html.escape(secret), shlex.quote(secret)[1:-1] if shlex.quote(secret) != secret else secret]
        escaped += [json.dumps(escaped[1])[1:-1]]
        forms.update(re.escape(form) for form in escaped if form)
        if len(secret) <= _MAX_PERCENT:
            forms.add("".join(_percent(char) for char in secret))
    if not forms:
        return None
    return re.compile("|".join([REDACTED, *sorted(forms, key=lambda f: (-len(f), f))]))


def _percent(char: str) -> str:
    """A pattern for one character, plain or percent-encoded in either case of the digits."""
    encoded = "".join(
        "%" + "".join(f"[{digit}{digit.lower()}]" if digit.isalpha() else digit for digit in f"{byte:02X}")
        for byte in char.encode("utf-8", "surrogateescape")
    )
    return f"(?:{re.escape(char)}|{encoded}{'|[+]' if char == ' ' else ''})"


_SECRET_FLAG = re.compile(rf"--?[\w-]{{0,60}}?(?:(?i:{_ANY_CASE})|token)\Z")
_MAX_FLAG = 100


def _is_secret_flag(item: object) -> bool:
    """Whether a word of a command line is a flag whose value is a secret."""
    return isinstance(item, str) and len(item) <= _MAX_FLAG and _SECRET_FLAG.match(item) is not None


def _walk(obj: Any, secrets: tuple[str, ...], hide: bool, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return REDACTED
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, str):
        if hide:
            return obj if not obj.strip() or _IS_ABSENT.match(obj) else REDACTED
        return redact_text(obj, secrets)
    if isinstance(obj, bytes):
        return (REDACTED.encode() if obj else obj) if hide else redact_bytes(obj, secrets)
    if isinstance(obj, (int, float)):
        return REDACTED if hide else obj
    again: Callable[[Any, bool], Any] = lambda value, deeper: _walk(value, secrets, deeper, depth + 1)  # noqa: E731
    if isinstance(obj, dict):
        entry = isinstance(obj.get("name"), str) and "value" in obj and is_secret_name(obj["name"])
        return {
            (redact_text(key, secrets) if isinstance(key, str) else key): again(
                value, hide or (isinstance(key, str) and (is_secret_name(key) or (entry and key == "value")))
            )
            for key, value in obj.items()
        }
    if isinstance(obj, (list, tuple)):
        if len(obj) > 8 and not hide and _all_plain(obj, secrets):
            return type(obj)(*obj) if hasattr(obj, "_fields") else type(obj)(obj)
        items = []
        after_flag = False
        pair = len(obj) == 2 and isinstance(obj[0], (str, bytes)) and is_secret_name(_as_text(obj[0])) and not hide
        for index, item in enumerate(obj):
            items.append(again(item, hide or after_flag and not _is_flag(item) or (pair and index == 1)))
            after_flag = _is_secret_flag(item)
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    if isinstance(obj, (set, frozenset)):
        return type(obj)(again(item, hide) for item in obj)
    if isinstance(obj, BaseModel):
        names = type(obj).model_fields
        return obj.model_copy(update={name: again(getattr(obj, name), hide or is_secret_name(name)) for name in names})
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = [field.name for field in dataclasses.fields(obj) if field.init]
        return dataclasses.replace(
            obj, **{name: again(getattr(obj, name), hide or is_secret_name(name)) for name in fields}
        )
    return obj


def _all_plain(items: list[Any] | tuple[Any, ...], secrets: tuple[str, ...]) -> bool:
    """Whether a list of texts holds no hint and none of the secrets: one search for all of its words."""
    if not all(isinstance(item, str) for item in items):
        return False
    joined = "\0".join(items)
    if _has_hint(joined) or any("token" in item.lower() for item in items if item[:1] == "-"):
        return False
    exact = _exact_pattern(tuple(sorted({s for s in secrets if s})))
    return exact is None or exact.search(joined) is None


def _is_flag(item: object) -> bool:
    return isinstance(item, str) and item.startswith("--")


def _as_text(item: str | bytes) -> str:
    return item.decode("latin-1") if isinstance(item, bytes) else item


def _collect(obj: Any, hide: bool, found: list[str], depth: int) -> None:
    if depth > _MAX_DEPTH or obj is None or isinstance(obj, bool):
        return
    if isinstance(obj, bytes):
        obj = obj.decode("utf-8", "surrogateescape")
    if isinstance(obj, str):
        if hide and obj.strip() and not _IS_ABSENT.match(obj):
            found.append(obj)
        elif not hide and _has_hint(obj):
            _redact_patterns(obj, found)
    elif isinstance(obj, (int, float)) and hide:
        found.append(str(obj))
    elif isinstance(obj, dict):
        entry = isinstance(obj.get("name"), str) and is_secret_name(obj["name"])
        for key, value in obj.items():
            secret = isinstance(key, str) and (is_secret_name(key) or (entry and key == "value"))
            _collect(value, hide or secret, found, depth + 1)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        if isinstance(obj, (list, tuple)) and len(obj) > 8 and not hide and _all_plain(obj, ()):
            return
        after_flag = False
        for item in obj:
            _collect(item, hide or (after_flag and not _is_flag(item)), found, depth + 1)
            after_flag = _is_secret_flag(item)
