"""What a process uses and does not show: passwords in addresses, values behind `${...}`, control characters of captions.

    sftp://user:secret@host/folder       sftp://user:***@host/folder     everywhere; the client alone asks for the password
    data.remote=${oc.env:BUCKET}/laion   ${oc.env:BUCKET}/laion          in every file, message and logger; the value is used

A password is taken out of an address where the address comes in (`without_secrets`; of a command line, cli/command.py), so
that nothing behind that has it to show: in a path that is made of an address none would be known. A value is put back to its
text where it goes out: in a run's files (record/config_file.py), and in what is printed (`watch`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, UnsupportedInterpolationType

MASK = "***"
LEAST_CHARACTERS = 4  # of a value that is looked for in texts: a shorter one would be found everywhere
WITHIN_WORDS = 8  # so many are also looked for within a word

_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://((?:(?!,[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s'\"<>])+)")
_VALUE = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.+)", re.DOTALL)  # an address alone: a password may hold a space
_PORT = re.compile(r"[^:]*:[0-9]*|\[[^\]]*\](:[0-9]*)?")  # host and port
_WORD = re.compile(
    r"((?:-*([\w.]+)=)?)(['\"]?)(.*)\3", re.DOTALL
)  # KEY=VALUE, --flag=VALUE or VALUE, in quotes of YAML's
_INNERMOST = re.compile(r"\$\{[^{}]+\}")
_HELD = re.compile(r"(\0[0-9]+\0)+")  # in place of `${...}`, whose ":" says nothing about the address around it
_VARIABLE = re.compile(r"\$\{oc\.env:([^{},]+)[^{}]*\}")

_passwords: dict[str, str] = {}
"""user@host:port -> its password."""
_values: dict[str, tuple[Any, Any]] = {}
"""Key -> its value and the text with `${...}` that gives it, of the configuration that was read last."""
_texts: dict[str, str] = {}
"""Value -> the text with `${...}` that gives it."""

# --- addresses ---


def masked(text: str) -> str:
    """Return a text with *** for the password, and for the query, of every address in it; those behind `${...}` stay."""
    if "://" not in text:
        return text
    held: list[str] = []

    def hold(found: re.Match[str]) -> str:
        held.append(found[0])
        return f"\0{len(held) - 1}\0"

    while (outer := _INNERMOST.sub(hold, text)) != text:
        text = outer
    text = _ADDRESS.sub(lambda found: _masked(found[1], found[2])[0], text)
    for number in reversed(range(len(held))):
        text = text.replace(f"\0{number}\0", held[number])
    return text


def masked_value(value: str) -> str:
    """Return a value, which may be an address alone, as `masked` does."""
    found = None if "${" in value else _VALUE.fullmatch(value)
    return _masked(found[1], found[2])[0] if found else masked(value)


def without_secrets(address: Any) -> Any:
    """Return a value, where it is an address, as `masked` does; the password of an sftp:// address is kept for its client."""
    if isinstance(address, list):
        return [without_secrets(each) for each in address]
    if isinstance(address, dict):
        return {name: without_secrets(each) for name, each in address.items()}
    if not isinstance(address, str):
        return address
    if not (found := _VALUE.fullmatch(address)):
        return masked(address)
    return _kept(found)


def _kept(address: re.Match[str]) -> str:
    """Return an address without secrets; the password of an sftp:// address is kept for its client."""
    shown, user, password, host = _masked(address[1], address[2])
    if password not in ("", MASK) and address[1] == "sftp":
        _passwords[f"{user}@{host}"] = password
    return shown


def take_secrets_out(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line as `without_secrets` does, and a warning for each word that had a secret in an address.

    A word with `${...}` stays as it is: what stands behind that is not known yet.
    """
    words, warnings = [], []
    for word in argv:
        parts = _WORD.fullmatch(word)
        assert parts is not None
        begin, key, quote, value = parts.groups()
        found = _VALUE.fullmatch(value)
        shown = value if "${" in value else _kept(found) if found else _ADDRESS.sub(_kept, value)
        words.append(f"{begin}{quote}{shown}{quote}")
        if shown != value:
            warnings.append(secret_found(f"command line: {key}" if key else "command line", shown))
    return words, warnings


def secret_found(where: str, shown: str) -> str:
    """Say that a secret was given in an address, and where it belongs."""
    return f"{where}: a secret stands in {shown}. It is neither shown nor kept. {where_it_belongs(shown)}."


def _masked(scheme: str, rest: str) -> tuple[str, str, str, str]:
    """Return an address without secrets; its user, password and host."""
    end = re.search(r"[/?#]|$", rest).start()  # type: ignore[union-attr]
    if "@" in rest[end:] and "@" not in rest[:end] and ":" in rest[:end] and not _PORT.fullmatch(rest[:end]):
        end = rest.rindex("@") + re.search(r"[/?#]|$", rest[rest.rindex("@") :]).start()  # type: ignore[union-attr]
    # A password may hold what ends an address, where nobody has quoted it.
    before, at, host = rest[:end].rpartition("@")
    user, colon, password = before.partition(":")
    if at and scheme.lower() in ("http", "https"):  # a token stands there alone, too
        shown = before if _HELD.fullmatch(before) else MASK
    else:
        shown = f"{user}:{MASK}" if colon and not _HELD.fullmatch(password) else before
    tail = re.sub(r"\?[^)\]]+?(?=[.,;:]*([)\]]|$))", f"?{MASK}", rest[end:])
    tail = re.sub(r"#[^)\]]*=[^)\]]*?(?=[.,;:]*([)\]]|$))", f"#{MASK}", tail)
    return f"{scheme}://{shown}{at}{host}{tail}", user, password, host


def password_of(place: SplitResult) -> str | None:
    """Return the password for an address: the one that stands in it, or that was taken out of it."""
    return _passwords.get(_account(place)) if place.password == MASK else place.password


def is_lost(place: SplitResult) -> bool:
    """True for an address as a run's config.yaml has it, whose password this process was not told."""
    return f":{MASK}@" in f"{place.netloc}" and _account(place) not in _passwords


def _account(place: SplitResult) -> str:
    return f"{place.username}@{place.netloc.rpartition('@')[2]}"


def where_it_belongs(address: str) -> str:
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


def look_up(tree: DictConfig, key: str) -> tuple[Any, str | None]:
    """Return what a key's `${...}` stands for; or why it stands for nothing, without a value, which may be a secret."""
    try:
        value = OmegaConf.select(tree, key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (InterpolationKeyError, InterpolationToMissingValueError):
        return None, "names a key that has no value. Possible: another key, or ${oc.env:VARIABLE}"
    except UnsupportedInterpolationType:
        return None, "is of a kind that is not known. Possible: ${oc.env:VARIABLE}, or another key"
    except Exception as error:  # OmegaConf's own: a dozen, of several unrelated classes
        if unset := re.search("Environment variable '(.*)' not found", str(error)):
            ways = f"Set it, or write ${{oc.env:{unset[1]},DEFAULT}}"
            return None, f"has no value: the variable {unset[1]} is not set. {ways}"
        if "Recursive" in str(error) or isinstance(error, RecursionError):
            return None, "leads back to itself. Give a value"
        return None, "cannot be read. Write ${oc.env:VARIABLE}, or ${KEY} of another key"
    if isinstance(value, dict):
        return None, "stands for a section. Give its keys one by one"
    if is_interpolated(value):
        return None, "stands for a text that has ${ in it. Possible: a value"
    return value, None


def keep(texts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Know what stands behind `${...}` in the configuration that was read last.

    Args:
        texts: key -> what was given, for those with `${...}`.
        values: key -> value of the whole configuration.
    """
    _values.clear()
    for key in texts.keys() & values.keys():
        value, text = values[key], texts[key]
        _values[key] = (value, text)
        pairs = _pairs(value, text) if key != "run_name" else ()  # that is the folder's name, for all to see
        for given, shown in pairs:
            if isinstance(given, str) and "${oc." in str(shown):  # of another key: that one's own text says it
                remember(given, shown)
    if _texts:  # whatever the command is: what it prints is then looked at
        watch()


def _pairs(value: Any, text: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value with what was given for it, in lists and sections too."""
    if isinstance(value, list) and isinstance(text, list):
        for one, given in zip(value, text, strict=False):
            yield from _pairs(one, given)
    elif isinstance(value, dict) and isinstance(text, dict):
        for name in value.keys() & text.keys():
            yield from _pairs(value[name], text[name])
    else:
        yield value, text


def written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value as it may be written or sent: with `${...}` where that stood, and no password in an address."""
    texts = {key: text for key, (value, text) in _values.items() if key in values and values[key] == value}
    return {key: _masked_each(value) for key, value in {**values, **texts}.items()}


def _masked_each(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked_each(each) for each in value]
    if isinstance(value, dict):
        return {name: _masked_each(each) for name, each in value.items()}
    return masked(value) if isinstance(value, str) else value


def hidden_of(keys: Sequence[str], text: str) -> str:
    """Return a text about keys with `${...}` for their values, also for numbers, where it names them first."""
    for value, shown in (_values[key] for key in keys if key in _values):
        if not isinstance(value, list | bool | None):
            text = re.sub(
                rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", lambda _, shown=shown: str(shown), text, count=1
            )
    return text


# --- what is printed ---


def remember(value: str, text: str) -> None:
    """Have `hidden` show the text in place of the value that it stands for, and of the variables in it."""
    found = {os.environ.get(name, ""): f"${{oc.env:{name}}}" for name in _VARIABLE.findall(text)}
    for secret, shown in {**found, value: text}.items():
        if len(secret) >= LEAST_CHARACTERS and not _is_number(secret):
            _texts[secret] = masked(shown)


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[-+0-9.,eE_]+", text))


def hidden(text: str) -> str:
    """Return a text as it may be shown: see `masked`, and `${...}` for the values behind it."""
    if found := [value for value in sorted(_texts, key=len, reverse=True) if value in text]:  # one may hold another
        forms = [
            re.escape(value) if len(value) >= WITHIN_WORDS else rf"(?<!\w){re.escape(value)}(?!\w)" for value in found
        ]
        # Not in place of a key of a result line or of YAML, which others read.
        text = re.sub(rf"({'|'.join(forms)})(?!=|:(\s|$))", lambda match: _texts[match[0]], text)
    return masked(text)


def printable(text: str) -> str:
    """Return a text on one line without control characters, which could lead a terminal or a font astray."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def watch() -> None:
    """Show all that this process prints as `hidden` has it; called again where a library has taken a stream over."""
    for stream in (sys.stdout, sys.stderr):
        if not getattr(stream.write, "hides", False):
            stream.write = _Hiding(stream.write)  # type: ignore[method-assign]


def print_as_it_is(text: str) -> None:
    """Print a line of figures for others to read, in which nothing is to be hidden."""
    stdout_write = sys.stdout.write
    getattr(stdout_write, "write", stdout_write)(text + "\n")
    sys.stdout.flush()


class _Hiding:
    hides = True

    def __init__(self, write: Any):
        self.write = write

    def __call__(self, text: str) -> Any:
        return self.write(hidden(text) if isinstance(text, str) else text)
