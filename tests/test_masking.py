"""common/masking.py: passwords and values behind `${...}` are used, and are nowhere to be found afterwards."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import socket
import sys
import threading
import traceback
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import paramiko
import pytest
from conftest import run
from test_config import Outer, problems, read
from test_log import COMMANDS

from checkpointing.content import identity_problems
from common import masking
from common.command_line import parse_command_line
from common.errors import ConfigError
from common.masking import mask_secrets, password_of, without_secrets
from config import load, to_yaml
from mds.stores import build_client
from run_folder.files import keep_keys, read_config

SECRETS = {"password": "hunter2pw/+x", "token": "q8f3token77", "variable": "blueheron4711"}
VARIABLE = "EASEL_TEST_SECRET"


def found_in(data: bytes, where: str) -> list[str]:
    """The secrets in some bytes, also packed, and as JSON, YAML, URLs and UTF-16 would have them."""
    hits = []
    for name, secret in SECRETS.items():
        forms = {secret, secret.replace("/", "%2F").replace("+", "%2B"), secret.replace("/", "\\/")}
        hits += [f"{name} in {where}" for form in forms if form.encode() in data or form.encode("utf-16-le") in data]
    for start in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda"):
        for at in (result.start() for result in re.finditer(re.escape(start), data)):
            try:
                inner = (zlib.decompressobj() if start[:1] == b"\x78" else zlib.decompressobj(31)).decompress(data[at:])
            except zlib.error:
                continue
            hits += found_in(inner, f"{where} (packed)") if len(inner) > 16 and inner != data else []
    return hits


def found_under(folder: Path) -> list[str]:
    """The secrets in the names and bytes of all files of a folder, archives opened."""
    hits, num = [], 0
    for path in sorted(folder.rglob("*")):
        hits += found_in(str(path.relative_to(folder)).encode(), f"the name {path}")
        if not path.is_file():
            continue
        num += 1
        hits += found_in(path.read_bytes(), str(path))
        if path.suffix != ".pt" and zipfile.is_zipfile(path):  # torch's files have their records as they are
            with zipfile.ZipFile(path) as archive:
                hits += [hit for name in archive.namelist() for hit in found_in(archive.read(name), f"{path}:{name}")]
    assert num > 10
    return hits


# --- addresses ---


ADDRESSES = """
sftp://user:p@w@host:22/x               sftp://user:***@host:22/x
s3://AKIA:a/b+c@bucket/p                s3://AKIA:***@bucket/p
s3://bucket/p?X-Amz-Signature=1&x=2     s3://bucket/p?***
https://token@host/x#access_token=b     https://***@host/x#***
http://user:pw@proxy:8080               http://***@proxy:8080
oci://bucket@namespace/p                oci://bucket@namespace/p
sftp://u:${oc.decode:${oc.env:PW}}@host/x   sftp://u:${oc.decode:${oc.env:PW}}@host/x
(https://h/p?x=y),                      (https://h/p?***),
address:a@b:c?d                         address:a@b:c?d
"""


def test_what_is_secret_in_an_address_is_masked_and_nothing_else():
    for address, masked in map(str.split, ADDRESSES.strip().splitlines()):
        assert mask_secrets(f"see {address} or 's3://b/h'") == f"see {masked} or 's3://b/h'"
        assert mask_secrets(masked) == masked
    assert mask_secrets("sftp://user:plain@${oc.env:HOST,a b}/x") == "sftp://user:***@${oc.env:HOST,a b}/x"


@pytest.mark.parametrize("key", ["text", "batch", "no_such_key", ""])
def test_no_password_is_in_a_message_whatever_its_letters_and_length(key, capsys):
    """A long one was cut before it was masked, and one with a space was taken for the end of the address."""
    for password in ("SEC RET", "SEC'RET", 'SEC"RET', "<SECRET>", "SECRET" * 20):
        try:
            assert read(f"{key}=sftp://user:{password}@host/x").text == "sftp://user:***@host/x"
        except ConfigError as error:
            assert "SEC" not in str(error)
        assert "SEC" not in capsys.readouterr().err


def test_a_typed_password_is_used_and_a_warning_names_where_it_belongs(capsys):
    config = read("text=sftp://user:hunter2@host/x")
    assert config.text == "sftp://user:***@host/x" and "text: sftp://user:***@host/x\n" in to_yaml(config)
    assert capsys.readouterr().err == (
        "command line: text: a secret stands in sftp://user:***@host/x. It is neither shown nor kept. Name a key's file in "
        "COMPOSER_SFTP_KEY_FILE, or a variable in its place: 'sftp://user:${oc.env:VARIABLE}@host/x'.\n"
    )


# --- `${...}` ---


def test_a_value_behind_a_variable_is_used_and_its_text_is_written(tmp_path, monkeypatch):
    for name, value in {"A": "s3://blueheron/x", "B": "18", "C": "true", "D": "2e-4"}.items():
        monkeypatch.setenv(f"EASEL_{name}", value)
    path = tmp_path / "run.yaml"
    path.write_text("text: ${oc.env:EASEL_A}/y\nlogger: {project: '${text}'}\noptimizer: {lr: '${oc.env:EASEL_D}'}\n")
    words = ["batch=${oc.env:EASEL_B}", "flag=${oc.env:EASEL_C}", "optimizer.betas=['0.${batch}',0.999]"]
    config = read(str(path), *words)
    assert (config.text, config.batch, config.flag, config.optimizer.lr) == ("s3://blueheron/x/y", 18, True, 2e-4)
    assert config.logger.project == "s3://blueheron/x/y" and list(config.optimizer.betas) == [0.18, 0.999]
    written = to_yaml(config)
    lines = ("batch: ${oc.env:EASEL_B}", "text: ${oc.env:EASEL_A}/y", "flag: ${oc.env:EASEL_C}", "  project: ${text}")
    assert set(lines) <= set(written.splitlines())
    assert "blueheron" not in written and "18" not in written
    path.write_text(written)
    assert read(str(path)) == config
    assert "${" not in to_yaml(read("batch=18"))


ENV = "${oc.env:EASEL_A}"
WITHOUT_VALUE = [
    (f"batch={ENV}", f"batch is '{ENV}', which resolves to an invalid value. Possible: an integer."),
    ("text=${text}", "text: '${text}' has no value: circular interpolation. Write "),
    ("text=${oc.env:EASEL_UNSET}", "text: '${oc.env:EASEL_UNSET}' has no value: Environment variable "),
    ("text=${optimizer}", "text: '${optimizer}' stands for a section or another `${...}`. "),
    ("text='${oc.env:'", "'text='${oc.env:'' has a '${' that cannot be read. "),
]


def test_a_variable_without_a_fitting_value_is_refused_unseen(monkeypatch, tmp_path):
    monkeypatch.setenv("EASEL_A", SECRETS["variable"])
    for word, problem in WITHOUT_VALUE:
        [text] = problems(word)
        assert text.startswith(f"command line: {problem}") and SECRETS["variable"] not in text
    path = tmp_path / "run.yaml"
    path.write_text("text: ${oc.env:EASEL_UNSET}\n")
    assert read(str(path), "text=here").text == "here", "what is overridden needs no variable"
    command = parse_command_line([str(path)], {})
    assert load(Outer, command, check=lambda config: [], unread=("text",)) == Outer(), "nor does what is not read"


def test_a_run_goes_on_where_only_what_may_change_stands_behind_another_value(tmp_path, monkeypatch):
    monkeypatch.setenv("EASEL_A", "4")
    text = "seed: 17\neval: {batch_size: '${oc.env:EASEL_A}'}\ntext: '${oc.env:EASEL_B}'\n"
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(tmp_path) == {"seed": 17, "eval.batch_size": 4}  # EASEL_B is not set here
    keep_keys(tmp_path, {"eval.steps": 50})
    assert read_config(tmp_path) == {"seed": 17, "eval.batch_size": 4, "eval.steps": 50}
    saved = {"identity": {"seed": 17, "model.denoiser": "${oc.env:EASEL_B}/old"}}
    assert identity_problems(saved, {"seed": 17, "model.denoiser": "/here/old"}, tmp_path) == []
    assert identity_problems(saved, {"seed": 18, "model.denoiser": "/here/old"}, tmp_path) != []


# --- what is printed ---


IN_ADDRESS = f"s3://user:{SECRETS['password']}@bucket/x"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_a_password_of_its_command_line(name, tmp_path, monkeypatch, capsys):
    """As an argument, as two, as files of each kind and in keys."""
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(name).main
    # One would serve a folder that does not exist yet, the other render into it.
    own = {"reports.live": ["port=none"], "prepare.shapes": ["num_images=none"]}.get(name, [])
    files = [f"{IN_ADDRESS}.{suffix}" for suffix in ("json", "png", "md")]
    in_keys = [[f"out={IN_ADDRESS}"], [f"{IN_ADDRESS}.yaml", f"results={IN_ADDRESS}"]]
    for words in ([IN_ADDRESS], [IN_ADDRESS] * 2, files, *in_keys):
        try:
            code = main([*words, *own])
        except Exception:
            code = None
            traceback.print_exc()
        output = "".join(capsys.readouterr())
        assert found_in(output.encode(), output) == [] and code == 2, output
        assert "user:***@bucket" in output or name == "launch.mlperf"  # whose words are for the training
    assert not any(tmp_path.rglob("*"))


def test_the_client_has_the_passwords_that_a_command_line_no_longer_has():
    word = "data.streams=[{remote: sftp://a:pw1@host/x, proportion: 1},{remote: 'sftp://b:pw2@host/y'}]"
    words = [word, "data.remote='sftp://c:p w@host/z'", "data.remote=sftp://c:${oc.env:PW}@host/z"]
    masked, warnings = masking.remove_secrets(words)
    assert masked == [word.replace("pw1", "***").replace("pw2", "***"), words[1].replace("p w", "***"), words[2]]
    passwords = [password_of(urlsplit(f"sftp://{user}:***@host/z")) for user in "abc"]
    assert passwords == ["pw1", "pw2", "p w"]
    assert [warning.split(":")[1].strip() for warning in warnings] == ["data.streams", "data.remote"]


# --- whole runs ---


class Files(paramiko.SFTPServerInterface):
    """The files of this machine, to read."""

    def open(self, path, flags, attr):
        handle = paramiko.SFTPHandle(flags)
        handle.readfile = Path(path).open("rb")  # noqa: SIM115  the handle closes it
        handle.stat = lambda: paramiko.SFTPAttributes.from_stat(os.fstat(handle.readfile.fileno()))
        return handle

    def stat(self, path):
        return paramiko.SFTPAttributes.from_stat(Path(path).stat())

    lstat = stat


class ByPassword(paramiko.ServerInterface):
    def check_auth_password(self, username, password):
        is_right = (username, password) == ("user", SECRETS["password"])
        return paramiko.AUTH_SUCCESSFUL if is_right else paramiko.AUTH_FAILED

    def check_channel_request(self, kind, number):
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def by_password(tmp_path, monkeypatch) -> Iterator[str]:
    """HOST:PORT of an SFTP server that lets in whoever knows the password, and a client that knows the server."""
    key, transports = paramiko.RSAKey.generate(2048), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the socket was closed
                while True:
                    transport = paramiko.Transport(server.accept()[0])
                    transport.add_server_key(key)
                    transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
                    transport.start_server(event=threading.Event(), server=ByPassword())
                    transports.append(transport)

        threading.Thread(target=serve, daemon=True).start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        hosts = tmp_path / "known_hosts"
        hosts.write_text(f"[127.0.0.1]:{server.getsockname()[1]} {key.get_name()} {key.get_base64()}\n")
        monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(hosts))
        monkeypatch.delenv("COMPOSER_SFTP_KEY_FILE", raising=False)
        yield place
        server.shutdown(socket.SHUT_RDWR)
    for transport in transports:
        transport.close()


def test_the_client_logs_in_with_a_password_that_no_longer_stands_in_the_address(by_password, tmp_path):
    (tmp_path / "file").write_text("what it holds")
    address = without_secrets(f"sftp://user:{SECRETS['password']}@{by_password}{tmp_path}/file")
    assert address == f"sftp://user:***@{by_password}{tmp_path}/file"
    client = build_client(address)
    client.download(address, str(tmp_path / "copy"), 20.0)
    client.clean_up()
    assert (tmp_path / "copy").read_text() == "what it holds"


@pytest.mark.long
@pytest.mark.timeout(600, func_only=True)
def test_a_whole_run_that_is_resumed_holds_no_secret_and_prints_none(miniature, by_password, tmp_path, capsys):
    """Two starts from a store with a password: as it was typed, and behind a variable. Every file and line is searched."""
    runs, prompts = tmp_path / "runs", tmp_path / SECRETS["variable"] / "prompts.tsv"
    prompts.parent.mkdir()
    shutil.copyfile(miniature.prompts, prompts)
    own = ["data.workers=2", "eval.when=in_training", "eval.every_images=16", "target.clip=2.0", "mlperf.enabled=true"]
    own += ["loggers.wandb.project=easel", "loggers.wandb.mode=offline", "loggers.tensorboard.log_dir=null"]
    own += [f"eval.prompts='{tmp_path}/${{oc.env:{VARIABLE}}}/prompts.tsv'"]
    # What is not used stands in all that is written, too.
    own += ["model.denoiser=null", f"loggers.wandb.tags=['https://x.invalid/?token={SECRETS['token']}']"]
    printed = ""
    for password, batches in ((SECRETS["password"], 4), (f"${{oc.env:{VARIABLE}_PW}}", 6)):
        remote = f"data.remote='sftp://user:{password}@{by_password}{miniature.moments}'"
        words = miniature.small(runs, "one", remote, f"data.local={tmp_path}/cache", *own, f"max_duration={batches}ba")
        variables = {VARIABLE: SECRETS["variable"], f"{VARIABLE}_PW": SECRETS["password"]}
        done = run(sys.executable, "benchmark.py", *words, **variables)
        printed += done.stdout + done.stderr
        assert done.returncode == 0, printed
        assert f"batches={batches} " in done.stdout
    assert "resumes from batch 4" in printed and "a secret stands in sftp://user:***@" in printed
    assert found_in(printed.encode(), "what is printed") == [] and found_under(runs) == []
    names = {path.name for path in runs.rglob("*")}
    assert {"mlperf.log", "config.yaml"} <= names and any("tfevents" in name for name in names)
    displayed = f"sftp://user:***@{by_password}{miniature.moments}"
    wandbs = [path.read_bytes() for path in sorted(runs.rglob("run-*.wandb"))]  # a start each, with its command line
    assert len(wandbs) == 2 and f"data.remote='{displayed}'".encode() in wandbs[0]
    assert f"  remote: {displayed}\n" in (runs / "one/config.yaml").read_text()
    later = (runs / "one/overrides.yaml").read_text()
    assert f"  remote: {displayed.replace('***', f'${{oc.env:{VARIABLE}_PW}}')}\n" in later
