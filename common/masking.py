"""Passwords in addresses are used and never shown; `${...}` stays as it was given wherever a configuration is written.

    sftp://user:secret@host/folder       sftp://user:***@host/folder     only the SFTP client asks for the password
    data.remote=${oc.env:BUCKET}/laion   ${oc.env:BUCKET}/laion          in every file and logger; the value is used

A password is taken out of an address where the address is read (`without_secrets`, and `remove_secrets` for a command
line), so that nothing after that can show it. What a process prints itself is not rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

MASK = "***"

_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://((?:(?!,[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s'\"<>])+)")
_VALUE = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.+)", re.DOTALL)  # an address alone: a password may hold a space
_PORT = re.compile(r"[^:]*:[0-9]*|\[[^\]]*\](:[0-9]*)?")  # host and port
# KEY=VALUE, --flag=VALUE or VALUE, in quotes of YAML's.
_WORD = re.compile(r"((?:-*([\w.]+)=)?)(['\"]?)(.*)\3", re.DOTALL)
_INNERMOST = re.compile(r"\$\{[^{}]+\}")
_HELD = re.compile(r"(\0[0-9]+\0)+")  # in place of `${...}`, whose ":" says nothing about the address around it

_passwords: dict[str, str] = {}
"""user@host:port -> its password."""
_values: dict[str, tuple[Any, Any]] = {}
"""Key -> its value and the text with `${...}` that gives it, of the configuration that was read last."""

# --- addresses ---


def mask_secrets(text: str) -> str:
    """Return a text with *** for the password, and for the query, of every address in it; those behind `${...}` stay."""
    if "://" not in text:
        return text
    held: list[str] = []

    def hold(match: re.Match[str]) -> str:
        held.append(match[0])
        return f"\0{len(held) - 1}\0"

    while (outer := _INNERMOST.sub(hold, text)) != text:
        text = outer
    text = _ADDRESS.sub(lambda match: _mask_address(match[1], match[2])[0], text)
    for number in reversed(range(len(held))):
        text = text.replace(f"\0{number}\0", held[number])
    return text


def mask_value(value: str) -> str:
    """Return a value, which may be an address alone, as `mask_secrets` does."""
    match = None if "${" in value else _VALUE.fullmatch(value)
    return _mask_address(match[1], match[2])[0] if match else mask_secrets(value)


def without_secrets(address: Any) -> Any:
    """Return a value, an address without its secrets; the password of an sftp:// address is kept for its client."""
    if isinstance(address, list):
        return [without_secrets(each) for each in address]
    if isinstance(address, dict):
        return {name: without_secrets(each) for name, each in address.items()}
    if not isinstance(address, str):
        return address
    if not (match := _VALUE.fullmatch(address)):
        return mask_secrets(address)
    return _keep_password(match)


def _keep_password(address: re.Match[str]) -> str:
    """Return an address without secrets; the password of an sftp:// address is kept for its client."""
    masked, user, password, host = _mask_address(address[1], address[2])
    if password not in ("", MASK) and address[1] == "sftp":
        _passwords[f"{user}@{host}"] = password
    return masked


def remove_secrets(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line as `without_secrets` does, and a warning for each word that had a secret in an address.

    A word with `${...}` stays as it is: what stands behind that is not known yet.
    """
    words, warnings = [], []
    for word in argv:
        parts = _WORD.fullmatch(word)
        assert parts is not None
        begin, key, quote, value = parts.groups()
        match = _VALUE.fullmatch(value)
        masked = value if "${" in value else _keep_password(match) if match else _ADDRESS.sub(_keep_password, value)
        words.append(f"{begin}{quote}{masked}{quote}")
        if masked != value:
            warnings.append(secret_warning(f"command line: {key}" if key else "command line", masked))
    return words, warnings


def secret_warning(where: str, masked: str) -> str:
    """Say that a secret was given in an address, and where it belongs."""
    return f"{where}: a secret stands in {masked}. It is neither shown nor kept. {secret_advice(masked)}."


def _mask_address(scheme: str, rest: str) -> tuple[str, str, str, str]:
    """Return an address without secrets; its user, password and host."""
    end = re.search(r"[/?#]|$", rest).start()  # type: ignore[union-attr]
    if "@" in rest[end:] and "@" not in rest[:end] and ":" in rest[:end] and not _PORT.fullmatch(rest[:end]):
        end = rest.rindex("@") + re.search(r"[/?#]|$", rest[rest.rindex("@") :]).start()  # type: ignore[union-attr]
    # A password may hold what ends an address, if it was not quoted.
    before, at, host = rest[:end].rpartition("@")
    user, colon, password = before.partition(":")
    if at and scheme.lower() in ("http", "https"):  # a token stands there alone, too
        account = before if _HELD.fullmatch(before) else MASK
    else:
        account = f"{user}:{MASK}" if colon and not _HELD.fullmatch(password) else before
    tail = re.sub(r"\?[^)\]]+?(?=[.,;:]*([)\]]|$))", f"?{MASK}", rest[end:])
    tail = re.sub(r"#[^)\]]*=[^)\]]*?(?=[.,;:]*([)\]]|$))", f"#{MASK}", tail)
    return f"{scheme}://{account}{at}{host}{tail}", user, password, host


def password_of(address: SplitResult) -> str | None:
    """Return the password for an address: the one that stands in it, or that was taken out of it."""
    return _passwords.get(_account(address)) if address.password == MASK else address.password


def is_password_missing(address: SplitResult) -> bool:
    """True for an address as a run's config.yaml has it, whose password this process does not have."""
    return f":{MASK}@" in f"{address.netloc}" and _account(address) not in _passwords


def _account(address: SplitResult) -> str:
    return f"{address.username}@{address.netloc.rpartition('@')[2]}"


def secret_advice(address: str) -> str:
    """Say where a secret is kept that was given in an address."""
    scheme, _, rest = address.partition("://")
    if scheme == "sftp":
        example = f"'sftp://{rest.partition(':')[0]}:${{oc.env:VARIABLE}}@{rest.partition('@')[2]}'"
        return f"Name a key's file in COMPOSER_SFTP_KEY_FILE, or a variable in its place: {example}"
    if scheme == "s3":
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in AWS_PROFILE, and leave it out"
    return "Leave it out: what a store asks for is read from its own variables"


# --- `${...}` ---


def is_interpolated(value: Any) -> bool:
    """True for a text, or a list or section of some, with `${...}` in it."""
    if isinstance(value, list | dict):
        return any(map(is_interpolated, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def resolve_interpolation(tree: DictConfig, key: str) -> tuple[Any, str | None]:
    """Return what a key's `${...}` stands for, or why it has no value."""
    try:
        value = OmegaConf.select(tree, key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError) as error:
        is_circular = isinstance(error, RecursionError) or "Recursive" in str(error)
        why = str(error).splitlines()[0].rpartition("interpolation: ")[2].strip('".')
        why = "circular interpolation" if is_circular else why
        return None, f"has no value: {why}. Write ${{oc.env:VARIABLE}}, or ${{KEY}} of another key"
    if isinstance(value, dict) or is_interpolated(value):
        return None, "stands for a section or another `${...}`. Give the value itself"
    return value, None


def remember_interpolations(texts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Remember what was given with `${...}` in the configuration that was read last.

    Args:
        texts: key -> what was given, for those with `${...}`.
        values: key -> value of the whole configuration.
    """
    _values.clear()
    _values.update({key: (values[key], texts[key]) for key in texts.keys() & values.keys()})


def restore_interpolations(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value as it may be written or sent: with `${...}` where that stood, and no password in an address."""
    texts = {key: text for key, (value, text) in _values.items() if key in values and values[key] == value}
    return {key: _mask_each(value) for key, value in {**values, **texts}.items()}


def _mask_each(value: Any) -> Any:
    if isinstance(value, list):
        return [_mask_each(each) for each in value]
    if isinstance(value, dict):
        return {name: _mask_each(each) for name, each in value.items()}
    return mask_secrets(value) if isinstance(value, str) else value


def to_printable(text: str) -> str:
    """Return a text on one line without control characters, which could lead a terminal or a font astray."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
