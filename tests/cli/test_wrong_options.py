"""Command lines that would lose a key, write plain text or check nothing: refused before anything is written."""

from __future__ import annotations

import math
import os

import pytest
import torch
from command_line import run
from torch_versions import READS_PICKLES

from tensorizer import EncryptionParams, TensorSerializer, stream_io
from tensorizer.signing import SigningKey

KEY = bytes(range(32))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a model, the same encrypted, a pickle, a key and a signing key."""
    monkeypatch.chdir(tmp_path)
    for name, encryption in (("m.tensors", None), ("secret.tensors", EncryptionParams(KEY))):
        with TensorSerializer(name, encryption=encryption) as serializer:
            serializer.write_state_dict({"a": torch.arange(1000.0), "b": torch.ones(1000)})
    torch.save({"a": torch.ones(2), "n": 3}, "m.bin")
    for name in ("key", "out/key", "src/config.json", "dst/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(KEY)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "src" / "m.tensors").write_bytes((tmp_path / "m.tensors").read_bytes())
    SigningKey.generate().save("signing")
    os.symlink("key", "link")
    os.symlink(".", "here")
    return tmp_path


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder, command, *texts, status=2, **environment):
    """Asserts that a command ends with a status and texts in its one line, and leaves all files as they were."""
    before = content(folder)
    result = run(*command, **environment)
    assert (result.returncode, result.stdout) == (status, b""), (command, result)
    message = result.stderr.decode()
    assert message.count("\n") == 1, (command, message)
    assert all(text in message for text in texts), (command, message)
    assert content(folder) == before, command


def test_an_output_never_replaces_the_file_of_a_key(folder):
    shard = "new-00001-of-00002.tensors"
    cases = [
        ("--generate-key", "encrypt m.tensors same --generate-key same"),
        ("--generate-key", "encrypt m.tensors ./missing/../same --generate-key same"),
        ("--generate-key", "encrypt m.tensors here/same --generate-key same"),
        ("--generate-key", f"encrypt m.tensors file://{folder}/same --generate-key same"),
        ("--generate-key", "encrypt m.tensors out --force --generate-key out/model.tensors"),
        ("--generate-key", "convert m.tensors same --generate-key ./same"),
        ("--generate-key", "convert m.tensors out --generate-key out/model.tensors"),
        ("--generate-key", "convert m.tensors new/ --generate-key new/model.tensors"),
        ("--generate-key", f"convert m.tensors new.tensors --max-shard-size 5KB --generate-key {shard}"),
        ("--generate-key", "convert src new/m.tensors --all --generate-key new/config.json"),
        ("--generate-key", "convert m.tensors same --dry-run --generate-key same"),
        ("--generate-key", "encrypt secret.tensors same --in-key-file key --generate-key same"),
        ("--key-file", "encrypt m.tensors key --force --key-file key"),
        ("--key-file", "encrypt m.tensors key --force --key-file link"),
        ("--key-file", "encrypt m.tensors link --force --key-file key"),
        ("--passphrase-file", "encrypt m.tensors key --force --passphrase-file key"),
        ("--key-file", "decrypt secret.tensors key --force --key-file key"),
        ("--in-key-file", "encrypt secret.tensors key --force --in-key-file key --key-env K"),
        ("--key-file", "encrypt secret.tensors key --force --in-key-env K --key-file key"),
        ("--in-key-file", "convert secret.tensors key --force --in-key-file key"),
        ("--key-file", "convert src dst/m.tensors --all --force --key-file dst/config.json"),
    ]
    for option, command in cases:
        refused(folder, command.split(), option, "the same file", K=KEY.hex())
    os.link("key", "second")
    refused(folder, ["encrypt", "m.tensors", "second", "--force", "--key-file", "key"], "the same file")
    (folder / "m.tensors.sig").write_bytes((folder / "signing").read_bytes())
    refused(folder, ["sign", "m.tensors", "--force", "--key", "m.tensors.sig"], "the same file")


def test_convert_all_does_not_copy_a_key_that_is_in_the_folder_of_the_source(folder):
    os.link("key", "src/key")
    for option in ("--key-file src/key", "--key-file key"):
        refused(folder, ["convert", "src", "new/m.tensors", "--all", *option.split()], "src/key", "--all would copy")


def test_a_key_may_be_in_the_folder_of_the_output(folder):
    for command in (
        "convert m.tensors out --key-file out/key",
        "convert m.tensors out/ --force --generate-key out/new.key",
        "convert m.tensors out/s.tensors --max-shard-size 5KB --key-file out/key",
        "convert src out/m.tensors --all --key-file out/key",
        "encrypt m.tensors out/e.tensors --generate-key out/e.tensors.key",
    ):
        result = run(*command.split())
        assert result.returncode == 0, (command, result)
    assert (folder / "out" / "key").read_bytes() == KEY


def test_an_option_with_an_empty_text_is_never_taken_as_not_given(folder):
    commands = {
        "convert m.tensors plain.tensors": "key-file key-env passphrase-file passphrase-env generate-key in-key-file "
        "in-key-env in-passphrase-file in-passphrase-env key max-shard-size s3-endpoint s3-profile",
        "encrypt m.tensors plain.tensors": "key-file key-env passphrase-file passphrase-env generate-key opslimit",
        "encrypt secret.tensors plain.tensors --key-file key": "in-key-file in-passphrase-env",
        "verify m.tensors": "public-key signature sha256 filter key-file",
        "sign m.tensors --key signing": "output file-key-file",
        "sign m.tensors": "key generate-key",
        "cache prune --cache out": "location max-size older-than",
        "cache ls": "cache",
    }
    for command, options in commands.items():
        for option in options.split():
            for given in ([f"--{option}", ""], [f"--{option}="]):
                before = content(folder)
                result = run(*command.split(), *given, TENSORIZER_CACHE="out")
                assert (result.returncode, result.stdout) == (2, b""), (command, given, result)
                assert f"--{option}".encode() in result.stderr
                assert b"Traceback" not in result.stderr
                assert content(folder) == before, (command, given)


def test_messages_say_what_the_user_gave(folder):
    refused(
        folder,
        ["encrypt", "secret.tensors", "e2", "--key-file", "key"],
        "is encrypted already",
        "--in-key-file",
        status=5,
    )
    refused(folder, ["encrypt", "m.tensors", "e", "--generate-key", "nodir/k"], "nodir/k: No such file", status=3)
    refused(folder, ["sign", "--generate-key", "nodir/k"], "nodir/k: No such file", status=3)
    why, status = ("(--skip-non-tensors)", 6) if READS_PICKLES else ("torch 2.6 or later", 3)
    refused(folder, ["convert", "m.bin", "n.tensors"], why, status=status)
    refused(folder, ["convert", "src", "served", "--all"], "--all: ")
    refused(folder, ["convert", "m.tensors", "n.tensors", "--max-shard-size", "x"], "--max-shard-size: expected")
    refused(folder, ["cache", "prune", "--cache", "out", "--max-size", "x"], "--max-size: expected")
    refused(folder, ["cache", "prune", "--cache", "out", "--older-than", "-1"], "--older-than: expected")
    words = "encrypt m.tensors e --passphrase-env P --opslimit"
    refused(folder, [*words.split(), "0"], "--opslimit: expected", P="words")
    refused(folder, [*words.split(), "1", "--memlimit", "0"], "--memlimit: expected", P="words")


def test_what_the_configuration_of_a_store_lacks_is_told_in_one_line(folder, monkeypatch):
    pytest.importorskip("boto3")
    broken = folder / "s3cfg"
    monkeypatch.setattr(stream_io, "_s3_default_config_paths", (str(broken),))
    nothing = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(folder / "missing"))
    nothing["AWS_EC2_METADATA_DISABLED"] = "true"
    copy = ["convert", "--force", "--no-check", "m.tensors", "s3://bucket/m", "--s3-endpoint", "http://127.0.0.1:9"]
    refused(folder, [*copy, "--s3-profile", "nobody"], "profile (nobody)", status=3, **nothing)
    refused(folder, copy, "s3://bucket/m", "no credentials were found: set AWS_ACCESS_KEY_ID", status=3, **nothing)
    broken.write_text("access_key = A\n")
    refused(folder, copy, "s3cfg, line 1: not as files of s3cmd are", status=3, **nothing)


def test_a_filter_that_no_tensor_matches_is_an_error_of_verify_and_diff(folder):
    for command in (
        "verify m.tensors --filter zzz",
        "verify m.tensors src/m.tensors --filter zzz",
        "verify m.tensors --json --filter zzz",
        "diff m.tensors src/m.tensors --filter zzz",
        "diff m.tensors src/m.tensors --json --filter zzz",
    ):
        result = run(*command.split())
        assert (result.returncode, result.stdout) == (2, b""), (command, result)
        assert b"--filter zzz: no tensor has such a name" in result.stderr
    with TensorSerializer("other.tensors") as serializer:
        serializer.write_state_dict({"zzz": torch.ones(2)})
    result = run("verify", "m.tensors", "other.tensors", "--filter", "zzz")
    assert result.returncode == 0, result
    assert result.stdout.startswith(b"other.tensors: ok: 1 verified")
    assert run("diff", "m.tensors", "other.tensors", "--filter", "zzz").returncode == 1


def test_tolerances_are_numbers_of_zero_and_more(folder):
    for option in ("--rtol", "--atol"):
        for text in ("nan", "-1", "-1e-9", "x", str(-math.inf)):
            result = run("diff", "m.tensors", "m.tensors", f"{option}={text}")
            assert (result.returncode, result.stdout) == (2, b""), (option, text, result)
            assert f"{option}: expected 0 or more, got {text!r}".encode() in result.stderr
        assert run("diff", "m.tensors", "m.tensors", option, "1e-3").returncode == 0
