"""The command line, run as users run it: commands, exit statuses, keys."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch
from command_line import KEY, flip, run, some_tensors, write, write_key
from paths import ROOT
from torch_versions import reads_pickles

import tensorizer._C
import tensorizer.torch
from tensorizer import EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.cli.main import make_parser


@pytest.fixture
def tensors():
    return some_tensors()


@pytest.fixture
def model(tmp_path, tensors):
    return write(tmp_path / "model.tensors", tensors)


@pytest.fixture
def key_file(tmp_path):
    return write_key(tmp_path / "key")


def test_help_of_every_command_needs_no_torch():
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in ("torch", "numpy", "boto3"), name
sys.meta_path.insert(0, Refuse())
from tensorizer.cli.main import make_parser
parser = make_parser()
parser.format_help()
for commands in parser._subparsers._group_actions:
    for command in commands.choices.values():
        command.format_help()
print(sorted(commands.choices))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("inspect", "ls", "verify", "convert", "encrypt", "decrypt", "diff", "sign", "cache"):
        assert command in result.stdout


def test_a_command_imports_its_own_module_and_no_other_ones():
    program = """
import sys
from tensorizer.cli.main import make_parser
make_parser("diff").parse_args(["diff", "a", "b"])
print(*sorted(name for name in sys.modules if name.startswith("tensorizer.cli.")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = {name.rpartition(".")[2] for name in result.stdout.split()}
    assert "diff" in found
    assert not found & {"inspect", "verify", "convert", "encrypt", "sign", "cache"}


def test_the_bar_of_convert_is_there_when_it_is_asked_for_and_needs_tqdm(model, tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    shown = run("convert", model, tmp_path / "a.tensors", "--progress")
    assert shown.returncode == 0, shown.stderr
    assert b"100%" in shown.stderr
    assert run("convert", model, tmp_path / "b.tensors").stderr == b""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    refused = run("convert", model, tmp_path / "c.tensors", "--progress")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"pip install tqdm" in refused.stderr
    assert not (tmp_path / "c.tensors").exists()


def test_inspect_lists_names_dtypes_shapes_and_sizes(model):
    result = run("inspect", model)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.decode().splitlines()
    assert "4 tensors" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["embed.weight", "layers.0.weight", "layers.1.weight", "steps"]
    assert "float16" in lines[2]
    assert "[64, 32]" in lines[2]
    assert "4.1 KB" in lines[2]
    assert result.stderr == b""


def test_inspect_as_json_has_integers_and_a_schema(model, tensors):
    document = json.loads(run("ls", "--json", model).stdout)
    assert document["schema"] == 1
    (file,) = document["files"]
    assert file["tensor_count"] == 4
    assert file["encrypted"] is False
    assert file["file_nbytes"] == model.stat().st_size
    assert [(t["name"], t["dtype"], t["shape"], t["nbytes"]) for t in file["tensors"]] == [
        (name, str(tensor.dtype)[6:], list(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    ]
    content = model.read_bytes()
    first = file["tensors"][0]
    assert content[first["offset"] :][: first["stored_nbytes"]] == tensors["embed.weight"].numpy().tobytes()


def test_inspect_groups_names_that_differ_in_numbers(tmp_path):
    path = write(tmp_path / "m", {f"h.{i}.mlp.{j}": torch.zeros(2) for i in range(12) for j in (0, 3)})
    result = run("inspect", "--group", path)
    assert "h.{0...11}.mlp.{2 numbers} x24" in result.stdout.decode()


def test_inspect_needs_no_key_of_an_encrypted_file(tmp_path, tensors):
    path = write(tmp_path / "secret.tensors", tensors, encryption=EncryptionParams(KEY))
    result = run("inspect", path)
    assert result.returncode == 0
    assert "encrypted" in result.stdout.decode()


def test_folders_of_shards_are_inspected_verified_compared_and_converted_as_one_model(tmp_path, tensors, model):
    folder = tmp_path / "folder"
    assert run("convert", model, f"{folder}/", "--max-shard-size", "5KB", "--to", "tensors").returncode == 0
    (folder / "config.json").write_text("{}")
    lines = run("inspect", "--long", folder).stdout.decode().splitlines()
    assert "4 tensors" in lines[0]
    assert "3 shards" in lines[0]
    assert lines[2].endswith("1 of 3")
    (document,) = json.loads(run("inspect", "--json", folder / "model.tensors.index.json").stdout)["files"]
    assert document["files"] == [f"model-0000{i}-of-00003.tensors" for i in (1, 2, 3)]
    assert document["tensors"][3]["file"] == document["files"][2]
    result = run("verify", folder)
    assert (result.returncode, b"4 verified" in result.stdout) == (0, True)
    assert run("diff", model, folder).returncode == 0
    assert run("verify", "--sha256", "0" * 64, folder).returncode == 2
    assert run("convert", "--all", folder, tmp_path / "other" / "m.safetensors").returncode == 0
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["config.json", "m.safetensors"]
    shard = folder / "model-00002-of-00003.tensors"
    flip(shard, shard.stat().st_size - 100)
    result = run("verify", folder)
    assert result.returncode == 1
    assert b"layers." in result.stdout
    shard.rename(folder / "away")
    assert run("verify", folder).returncode == 3
    assert run("inspect", folder).returncode == 3


def test_verify_finds_an_index_that_was_changed(tmp_path):
    path = write(tmp_path / "noted.tensors", {"aa": torch.ones(3), "bb": torch.ones(3)}, metadata={"note": "text"})
    content = path.read_bytes()
    assert run("verify", path).returncode == 0
    path.write_bytes(content.replace(b"bb", b"cc", 1))  # in the index, not in the record
    result = run("verify", path)
    assert (result.returncode, b"index does not match" in result.stdout) == (1, True)


@pytest.fixture
def places(tmp_path, model, tensors, key_file):
    """Files of every kind, by the names that command lines in tables have for them."""
    content = model.read_bytes()
    found = {name: tmp_path / name for name in ("damaged", "garbage", "cut", "missing", "fresh", "wrong")}
    found["damaged"].write_bytes(content)
    flip(found["damaged"], len(content) - 12)
    found["garbage"].write_bytes(b"no tensors in here" * 100)
    found["cut"].write_bytes(content[:-1000])
    found["wrong"].write_bytes(bytes(32))
    found["wrong"].chmod(0o600)
    other = write(tmp_path / "other.tensors", {**tensors, "steps": torch.tensor(8)})
    wide = write(tmp_path / "complex.tensors", {"c": torch.zeros(2, dtype=torch.complex128)})
    secret = write(tmp_path / "secret.tensors", tensors, encryption=EncryptionParams(KEY))
    return {**found, "model": model, "other": other, "complex": wide, "secret": secret, "key": key_file}


@pytest.mark.parametrize(
    ("status", "command"),
    [
        (0, "verify MODEL"),
        (0, "diff MODEL MODEL"),
        (1, "verify DAMAGED"),
        (1, "diff MODEL OTHER"),
        (2, "inspect"),
        (2, "frobnicate"),
        (2, "inspect --jso MODEL"),
        (2, "encrypt MODEL FRESH"),
        (3, "inspect MISSING"),
        (3, "verify MISSING"),
        (3, "diff MODEL MISSING"),
        (3, "convert MISSING FRESH"),
        (4, "inspect GARBAGE"),
        (4, "verify CUT"),
        (4, "diff MODEL GARBAGE"),
        (5, "verify SECRET"),
        (5, "verify SECRET --key-file WRONG"),
        (5, "verify MODEL --key-file KEY"),
        (5, "decrypt SECRET FRESH"),
        (5, "encrypt SECRET FRESH --key-file KEY"),
        (5, "encrypt SECRET FRESH --in-key-file WRONG --key-file KEY"),
        (5, "encrypt MODEL FRESH --in-key-file KEY --key-file KEY"),
        (6, "convert MODEL OTHER"),
        (6, "convert COMPLEX c.safetensors"),
        (6, "encrypt MODEL FRESH --generate-key KEY"),
    ],
)
def test_exit_status(places, tmp_path, monkeypatch, status, command):
    monkeypatch.chdir(tmp_path)
    result = run(*(places[word.lower()] if word.isupper() else word for word in command.split()))
    assert result.returncode == status, result
    if status > 1:
        assert b"Traceback" not in result.stderr
        assert result.stdout == b""
    assert not places["fresh"].exists()
    assert places["key"].read_bytes() == KEY


def test_encrypt_changes_a_key_and_decrypt_gives_the_same_tensors(tmp_path, model, tensors, key_file):
    secret, again, clear = tmp_path / "secret", tmp_path / "again", tmp_path / "clear.tensors"
    new_key = tmp_path / "new key"
    assert run("encrypt", model, secret, "--key-file", key_file).returncode == 0
    result = run("encrypt", secret, again, "--in-key-file", key_file, "--generate-key", new_key)
    assert result.returncode == 0, result.stderr
    assert new_key.stat().st_mode & 0o777 == 0o600
    assert new_key.stat().st_size == 32
    assert run("decrypt", again, clear, "--key-env", "K", K=new_key.read_bytes().hex()).returncode == 0
    assert run("diff", model, clear).returncode == 0
    for path in (secret, again):
        assert tensors["embed.weight"].numpy().tobytes()[:64] not in path.read_bytes()


def test_passphrases_come_from_files_variables_and_standard_input(tmp_path, model):
    secret, clear = tmp_path / "secret", tmp_path / "clear"
    cheap = ("--opslimit", "min", "--memlimit", "min")
    words = tmp_path / "words"
    words.write_text("correct horse\n")
    words.chmod(0o600)
    assert run("encrypt", model, secret, "--passphrase-file", "-", *cheap, stdin=b"correct horse\r\n").returncode == 0
    for options, environment in (
        (["--passphrase-file", words], {}),
        (["--passphrase-env", "P"], {"P": "correct horse"}),
    ):
        result = run("decrypt", "--force", secret, clear, *options, **environment)
        assert result.returncode == 0, result.stderr
        assert run("diff", model, clear).returncode == 0
    assert run("decrypt", "--force", secret, clear, "--passphrase-env", "P", P="wrong").returncode == 5


def test_a_passphrase_without_an_end_is_refused_by_the_name_of_its_file(tmp_path, model):
    longest = tmp_path / "longest"
    longest.write_bytes(b"x" * 65_536)
    cheap = ("--opslimit", "min", "--memlimit", "min")
    assert run("encrypt", model, tmp_path / "secret", "--passphrase-file", longest, *cheap).returncode == 0
    for path, stdin, name in (("/dev/zero", b"", "/dev/zero"), ("-", b"x" * 65_537, "standard input")):
        result = run("encrypt", model, tmp_path / "other", "--passphrase-file", path, *cheap, stdin=stdin)
        assert result.returncode == 5
        assert f"{name}: expected a passphrase of at most 65536 bytes" in result.stderr.decode()


def test_a_key_file_that_everybody_can_read_is_warned_of(tmp_path, model, key_file):
    key_file.chmod(0o644)
    result = run("encrypt", model, tmp_path / "secret", "--key-file", key_file)
    assert result.returncode == 0
    assert str(key_file) in result.stderr.decode()


def test_no_secret_is_in_the_output_or_in_the_arguments(tmp_path, model):
    secret = tmp_path / "secret"
    result = run("encrypt", model, secret, "--key-env", "K", "-v", "--json", K=KEY.hex())
    assert result.returncode == 0
    assert KEY.hex().encode() not in result.stdout + result.stderr
    text = run("encrypt", "--help").stdout.decode()
    for option in ("--key ", "--passphrase "):
        assert option not in text


def test_verify_names_the_tensor_that_does_not_match(model):
    content = model.read_bytes()
    with TensorDeserializer(model, device="cpu", lazy_load=True) as file:
        entry = next(entry for entry in file.entries() if entry.name == "layers.1.weight")
    assert content
    flip(model, entry.data_offset)
    result = run("verify", model)
    assert result.returncode == 1
    assert "layers.1.weight" in result.stdout.decode()
    document = json.loads(run("verify", "--json", model).stdout)
    assert document["ok"] is False
    assert [bad["name"] for bad in document["files"][0]["mismatched"]] == ["layers.1.weight"]
    assert document["files"][0]["verified"] == 3


def test_a_file_without_digests_is_not_verified(tmp_path, tensors):
    path = write(tmp_path / "m", tensors, hashes=None)
    result = run("verify", "--json", path)
    assert result.returncode == 1
    assert json.loads(result.stdout)["files"][0]["unverified"] == list(tensors)


def test_diff_says_what_was_added_removed_and_changed(tmp_path, model, tensors):
    changed = dict(tensors)
    changed["new"] = torch.zeros(3)
    del changed["steps"]
    changed["layers.0.weight"] = tensors["layers.0.weight"] + 0.5
    changed["embed.weight"] = tensors["embed.weight"].float()
    other = write(tmp_path / "other", changed)
    result = run("diff", model, other)
    assert result.returncode == 1
    text = result.stdout.decode()
    for line in ("- steps", "+ new", "~ embed.weight: float16 [64, 32] -> float32 [64, 32]", "~ layers.0.weight"):
        assert line in text
    assert "max abs 0.5" in text
    assert run("diff", "-q", model, other).stdout == b""
    document = json.loads(run("diff", "--json", "--ignore-dtype", "--atol", "1", model, other).stdout)
    assert document["added"] == ["new"]
    assert document["removed"] == ["steps"]
    assert document["changed"] == []


def test_equal_digests_need_no_payload(tmp_path, model, tensors):
    same = write(tmp_path / "same", tensors)
    document = json.loads(run("diff", "--json", model, same).stdout)
    assert (document["ok"], document["same"], document["nbytes_read"]) == (True, 4, 0)


def test_an_interrupt_is_status_130_and_silent(model, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tensorizer._files.inspect.inspect", interrupt)
    assert run("inspect", model) == (130, b"", b"")


def test_the_reference_page_lists_every_command_and_option():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        if name == "ls":
            continue
        section = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert section, name
        for option in command._option_string_actions:
            assert option in section, (name, option)


def test_the_output_at_the_top_of_the_reference_page_is_what_the_commands_print():
    program = (
        f"import runpy; print(runpy.run_path({str(ROOT / 'scripts' / 'cli_reference.py')!r})['session'](), end='')"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page.partition("```console\n")[2].partition("```")[0] == printed.stdout


def test_the_version_names_the_libraries_that_the_module_runs_with():
    result = run("--version")
    assert result.returncode == 0
    first, second = result.stdout.decode().splitlines()
    assert first == f"tensorizer {tensorizer.__version__}"
    versions = dict(item.split(" ") for item in second.removeprefix("with ").split(", "))
    assert versions == tensorizer._C.library_versions()
    assert {"curl", "openssl", "libsodium", "hiredis", "isa-l"} <= set(versions)
    assert all(version.count(".") >= 1 and version[0].isdigit() for version in versions.values()), versions


@pytest.mark.filterwarnings("ignore")  # torch warns of nested and quantised tensors
@reads_pickles
def test_pickles_that_hold_no_plain_tensors_are_refused_by_name(tmp_path):
    cases = {
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.ones(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    for name, tensor in cases.items():
        torch.save({"fine": torch.ones(1), name: tensor}, tmp_path / "m.bin")
        for target in ("m.tensors", "m.safetensors"):
            result = run("convert", tmp_path / "m.bin", tmp_path / target)
            assert result.returncode == 6, (name, result)
            assert f"'{name}'".encode() in result.stderr
            assert b"m.bin" in result.stderr
            assert b"'fine'" not in result.stderr
            assert not (tmp_path / target).exists()


@reads_pickles
def test_a_pickle_of_the_older_form_that_was_cut_is_no_valid_file(tmp_path):
    torch.save(
        {"a": torch.arange(100.0), "b": torch.ones(50)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False
    )
    content = (tmp_path / "m.bin").read_bytes()
    assert run("convert", tmp_path / "m.bin", tmp_path / "m.tensors").returncode == 0
    for nbytes in [*range(1, 200), *range(200, len(content), 37)]:
        (tmp_path / "cut.bin").write_bytes(content[:nbytes])
        result = run("convert", tmp_path / "cut.bin", tmp_path / "cut.tensors")
        assert result.returncode == 4, (nbytes, result)
        assert result.stderr.rstrip().rpartition(b": ")[2], (nbytes, result)
        assert not (tmp_path / "cut.tensors").exists()


def test_indexes_of_the_wrong_form_are_no_valid_files(tmp_path):
    contents = ("[]", "3", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": null}', "{")
    for name in ("pytorch_model.bin.index.json", "model.safetensors.index.json", "model.tensors.index.json"):
        for content in contents:
            (tmp_path / name).write_text(content)
            for source in (tmp_path / name, tmp_path):
                result = run("convert", source, tmp_path / "out" / "m.tensors")
                assert result.returncode == 4, (name, content, result)
                assert name.encode() in result.stderr
        (tmp_path / name).unlink()


def test_diff_compares_names_whether_a_tensor_is_stored_once_or_under_each(tmp_path):
    shared = torch.arange(6.0)
    tied, apart = {"a": shared, "b": shared, "c": torch.ones(2)}, {"a": shared, "b": shared.clone(), "c": torch.ones(2)}
    files = [tmp_path / name for name in ("once.tensors", "once.safetensors", "twice.tensors", "apart.tensors")]
    tensorizer.torch.save_file(tied, files[0])
    tensorizer.torch.save_file(tied, files[1])
    tensorizer.torch.save_file(tied, files[2], ties="twice")
    tensorizer.torch.save_file(apart, files[3])
    for one in files:
        for other in files:
            report = tensorizer.diff(one, other)
            assert (report.ok, report.same) == (True, 3), (one, other, report)
    other = tmp_path / "other.tensors"
    tensorizer.torch.save_file({**apart, "b": shared + 1}, other)
    for one in files:
        report = tensorizer.diff(one, other)
        assert [(change.name, change.what, change.max_abs) for change in report.changed] == [("b", "data", 1.0)]
        assert (report.added, report.removed, report.same) == ((), (), 2)
    tensorizer.torch.save_file({"b": shared, "d": shared}, other)
    for one in files:
        report = tensorizer.diff(one, other)
        assert (report.added, report.removed, report.same) == (("d",), ("a", "c"), 1)


def test_a_new_key_is_written_when_the_writing_begins_so_errors_before_leave_none(tmp_path, model):
    key = tmp_path / "new.key"
    for status, *command in (
        (2, "convert", "--all", tmp_path, "memory://store/model"),  # a file or a folder: nobody can tell
        (3, "convert", tmp_path / "nowhere.tensors", "memory://store/model.tensors"),
        (3, "encrypt", tmp_path / "nowhere.tensors", "memory://store/model.tensors"),
    ):
        result = run(*command, "--generate-key", key)
        assert (result.returncode, key.exists()) == (status, False), (command, result)
        assert b"new key" not in result.stderr
    assert run("encrypt", model, "memory://store/model.tensors", "--generate-key", key).returncode == 0
    assert run("verify", "memory://store/model.tensors", "--key-file", key).returncode == 0


def test_a_new_key_is_never_written_over_a_file_and_not_for_a_dry_run(tmp_path, model):
    target, key = tmp_path / "m.tensors", tmp_path / "new.key"
    assert run("convert", "--dry-run", model, target, "--generate-key", key).returncode == 0
    assert not key.exists()
    key.write_bytes(b"of somebody else")
    assert run("encrypt", model, target, "--generate-key", key).returncode == 6
    assert key.read_bytes() == b"of somebody else"


@pytest.mark.parametrize(
    "command",
    [
        "convert MODEL -",
        "convert - m.tensors",
        "encrypt MODEL - --key-file KEY",
        "decrypt - m.tensors --key-file KEY",
        "inspect -",
        "verify -",
        "diff MODEL -",
    ],
)
def test_standard_streams_are_refused_by_every_command(places, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    result = run(*(places[word.lower()] if word.isupper() else word for word in command.split()))
    assert result.returncode == 2, result
    assert b"./-" in result.stderr
    assert not (tmp_path / "-").exists()


def test_a_file_may_be_called_dash(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("convert", model, "./-").returncode == 0
    assert run("inspect", "./-").returncode == 0


def test_uris_that_name_no_object_are_wrong_arguments_and_become_no_local_paths(model, tmp_path, key_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    needs_key = b"an s3 URI needs a bucket and a key"
    cases = [
        *((needs_key, command, "s3://k") for command in ("inspect", "verify")),
        (needs_key, "diff", model, "s3://k"),
        (needs_key, "convert", model, "s3://k", "--force"),
        (needs_key, "encrypt", model, "s3://k/", "--key-file", key_file),
    ]
    for uri in ("s3://", "http://", "https://?x", "S3:///", "gs://", "redis://", "file://"):
        cases += [(b"malformed URI", "inspect", uri), (b"malformed URI", "convert", model, uri, "--force")]
    for text, *command in cases:
        result = run(*command)
        assert result.returncode == 2, (command, result)
        assert text in result.stderr, (command, result)
        assert result.stderr.count(b"\n") == 1, (command, result)
    assert sorted(tmp_path.iterdir()) == before


def test_diff_names_the_file_that_needs_a_key(model, tmp_path, tensors):
    one, other = (write(tmp_path / name, tensors, encryption=EncryptionParams(KEY)) for name in ("one", "other"))
    for pair, named, silent in [
        ((one, model), [one], [model]),
        ((model, other), [other], [model]),
        ((one, other), [one, other], []),
    ]:
        result = run("diff", *pair)
        assert result.returncode == 5, result
        assert b"--key-file" in result.stderr
        assert all(bytes(path) in result.stderr for path in named), result
        assert not any(bytes(path) in result.stderr for path in silent), result


def test_named_pipes_are_refused_and_not_waited_for(model, tmp_path, key_file):
    for name in ("pipe.tensors", "pipe.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        for command in (("inspect",), ("verify",), ("convert",), ("diff", model)):
            target = [tmp_path / "out"] if command[0] == "convert" else []
            result = run(*command, tmp_path / name, *target)
            assert result.returncode == 3, (name, command, result)
            assert b"pipe" in result.stderr
        (tmp_path / name).unlink()


def test_pickles_need_a_torch_that_reads_them_safely(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2)}, tmp_path / "m.bin")
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    result = run("convert", tmp_path / "m.bin", tmp_path / "m.tensors")
    assert result.returncode == 3
    assert b"torch 2.6 or later" in result.stderr


def test_diff_knows_the_names_of_a_root_module_with_and_without_their_dot(tmp_path):
    module = torch.nn.Linear(2, 2)
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(module)
    assert run("convert", tmp_path / "m.tensors", tmp_path / "m.safetensors").returncode == 0
    assert run("diff", tmp_path / "m.tensors", tmp_path / "m.safetensors").returncode == 0
    assert run("diff", tmp_path / "m.safetensors", tmp_path / "m.tensors").returncode == 0
