"""What commands print: tables, colours, JSON, names of any kind, no secrets; and streams that close early."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import warnings

import pytest
import reference_safetensors
import torch
from command_line import KEY, run, some_tensors, write, write_key
from servers.file_server import serve_folder

import tensorizer._C
import tensorizer.torch
from tensorizer import EncryptionParams
from tensorizer.cli.output import table


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model.tensors", some_tensors())


def test_names_cannot_act_on_the_terminal(tmp_path):
    path = write(tmp_path / "m", {"a\x1b[31mb\u202ec": torch.zeros(1)})
    output = run("inspect", path).stdout
    assert b"\x1b" not in output
    assert "\u202e" not in output.decode()
    assert b"\\x1b[31mb\\u202ec" in output


def test_a_reader_that_stops_reading_ends_the_command_quietly(tmp_path):
    path = write(tmp_path / "many", {f"t{i}": torch.zeros(1) for i in range(5000)})
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorizer", "inspect", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert errors == b""


def test_a_terminal_gets_colours_and_tables_as_wide_as_it_is(tmp_path):
    path = write(tmp_path / "m", {"a." * 80 + "weight": torch.zeros(3)})

    def on_terminal(columns, **environment):
        parent, child = pty.openpty()
        import fcntl
        import termios

        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorizer", "inspect", "m"],
            stdout=child,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
            | {"TERM": "xterm", **environment},
        )
        os.close(child)
        text = b""
        try:
            while piece := os.read(parent, 65536):
                text += piece
        except OSError:  # the other side is closed
            pass
        os.close(parent)
        process.wait(timeout=60)
        return text.decode()

    narrow, wide = on_terminal(80, NO_COLOR="1"), on_terminal(220, NO_COLOR="1")
    assert max(map(len, narrow.splitlines()[1:])) <= 80
    assert "…" in narrow
    assert "…" not in wide
    assert "\x1b[" not in narrow
    assert "\x1b[" in on_terminal(80)
    piped = run("inspect", path).stdout.decode()
    assert "\x1b[" not in piped
    assert "…" not in piped


def test_long_names_keep_their_numbers_and_last_words_on_a_narrow_terminal():
    name = "language_model.model.layers.17.block_sparse_moe.experts.3.feed_forward.gate_proj.weight"
    for width in (56, 70, 80):
        (_, line) = table(["name", "size"], [[name, "8 KB"]], frozenset({1}), width)
        assert len(line) <= width
        assert ".17." in line
        assert ".3." in line
        assert "gate_proj.weight" in line
    for width in (30, 40):
        (_, line) = table(["name", "size"], [[name, "8 KB"]], frozenset({1}), width)
        assert len(line) <= width
        assert line.startswith("…17…3…")
        assert "weight" in line
    (_, line) = table(["name", "size"], [["x" * 200, "8 KB"]], frozenset({1}), 40)
    assert len(line) == 40


def test_screens_say_what_was_not_done_and_where_the_rest_is(tmp_path, model):
    tensors = some_tensors()
    secret = tmp_path / "secret.tensors"
    write(secret, tensors, encryption=EncryptionParams(KEY), metadata={"note": "text"})
    assert b"metadata: encrypted" in run("inspect", secret).stdout
    assert b"would write" in run("convert", "--dry-run", model, tmp_path / "m.safetensors").stdout
    assert run("convert", model, tmp_path / "m.safetensors").returncode == 0
    assert b"structure ok" in run("verify", tmp_path / "m.safetensors").stdout
    assert run("verify", "-q", model).stdout == b""
    weight = torch.ones(3)
    tied = write(tmp_path / "tied.tensors", {f"t.{i}": weight for i in range(40)}, metadata={"long": "x" * 5000})
    lines = run("inspect", "--metadata", "--no-tensors", tied).stdout.decode().splitlines()
    assert lines[11] == "tie: 29 more (--json lists all)"
    assert lines[12].endswith("… (4,000 more characters; --json shows all)")


SECRET = "".join(["s3", "cr3t"])


def test_no_command_tells_the_credentials_or_the_query_of_a_uri(tmp_path, model, monkeypatch):
    key_file = write_key(tmp_path / "key")
    """Whatever becomes of the command: sources and targets that are there, are not, and cannot be."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory").store
    write(tmp_path / "encrypted.tensors", {"a": torch.ones(2)}, encryption=EncryptionParams(KEY))
    tensorizer.torch.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "junk.tensors").write_bytes(b"junk" * 100)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "folder" / "model.tensors").write_bytes(model.read_bytes())
    (tmp_path / "new.key").write_bytes(b"old")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    names = ("model.tensors", "encrypted.tensors", "junk.tensors", "missing.tensors", "model.safetensors.index.json")
    told = []
    with serve_folder(tmp_path) as address:
        at = address.replace("http://", f"http://user:{SECRET}@")
        there = [f"{at}/{name}?X-Amz-Signature={SECRET}" for name in names]
        sources = [
            *there,
            f"memory://m/missing.tensors?sig={SECRET}",
            f"ftp://user:{SECRET}@127.0.0.1:1/m.tensors",
            f"nobody://user:{SECRET}@host/m.tensors?{SECRET}",
            f"redis://user:{SECRET}@127.0.0.1:none/m",
            f"file://user:{SECRET}@host/m.tensors",
            f"hf://org/name/m.tensors?{SECRET}#{SECRET}",
        ]
        targets = [
            f"memory://m/target.tensors?sig={SECRET}",
            f"memory://m/target.tensors?sig={SECRET}",  # it exists by now
            *(uri for uri in sources if not uri.startswith("hf")),
        ]
        commands = [[name, *more, uri] for uri in sources for name, *more in (
            ("inspect",), ("inspect", "--json"), ("verify",), ("verify", "--json"), 
            ("verify", "--hub", "--key-file", key_file), ("verify", "--sha256", "0" * 64),
            ("diff", model),
        )]  # fmt: skip
        commands += [[*command, uri, tmp_path / "out"] for uri in sources for command in (
            ["convert", "--all", "--force"],
            ["convert", "--json", "--in-key-file", key_file],
            ["encrypt"], ["decrypt"],
            ["decrypt", "--json", "--force", "--key-file", key_file],
            ["encrypt", "--in-key-file", key_file], ["encrypt", "--generate-key", tmp_path / "new.key", "--force"],
        )]  # fmt: skip
        commands += [[*command, model, uri] for uri in targets for command in (
            ["convert"], ["convert", "--force", "-v"], ["convert", "--json", "--force"], ["convert", "--dry-run", "-v"],
            ["convert", "--max-shard-size", "1KB"], ["convert", "--max-shard-size", "1KB", "--json", "--force"],
            ["encrypt", "--key-file", key_file],
            ["encrypt", "--key-file", key_file, "--json", "--force"],
        )]  # fmt: skip
        commands += [["convert", "--all", *more, tmp_path / "folder", uri] for uri in targets for more in (
            ["--dry-run", "-v"], ["-v"], ["--json", "--force"], ["--force", "-v"], ["--max-shard-size", "1KB"],
        )]  # fmt: skip
        try:
            for command in commands:
                with warnings.catch_warnings(record=True) as warned:
                    result = run(*command, HF_ENDPOINT="http://127.0.0.1:1", HF_HUB_OFFLINE="1")
                text = (result.stdout + result.stderr).decode() + "".join(str(one.message) for one in warned)
                if SECRET in text:
                    told.append((" ".join(map(str, command)), text))
        finally:
            store.clear()
    assert not told, "\n".join(f"{command}\n    {text}" for command, text in told)


@pytest.mark.parametrize(
    ("closed", "command", "statuses"),
    [
        ("1", "inspect MODEL", [0]),
        ("1", "inspect --json MODEL", [0]),
        ("2", "inspect MODEL", [0]),
        ("2", "inspect /nowhere", [3]),
        ("12", "inspect /nowhere", [3]),
        ("0", "decrypt /nowhere /nowhere.too", [3, 5]),
        ("01", "convert MODEL OUT.tensors", [0]),
    ],
)
def test_closed_streams_end_a_command_without_a_traceback(model, tmp_path, fresh_process, closed, command, statuses):
    program = """
        import os, sys
        for number in map(int, sys.argv[1]):
            os.close(number)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, None)  # as Python starts without them
            setattr(sys, f"__{name}__", None)
        from tensorizer.cli.main import main
        sys.exit(main(sys.argv[2:]))
    """
    places = {"MODEL": model, "OUT.tensors": tmp_path / "out.tensors"}
    result = fresh_process(program, closed, *(places.get(word, word) for word in command.split()))
    assert result.returncode in statuses, result
    assert "Traceback" not in result.stderr, result.stderr
    assert "Exception ignored" not in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--help | true", 0),
        ("inspect /nowhere 2>&1 | true", 0),
        ("inspect /nowhere >&- 2>&-", 3),
    ],
)
def test_the_shell_may_close_streams(command, status):
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tensorizer {command}"], capture_output=True, timeout=120, check=False
    )
    assert result.returncode == status, result
    assert b"Traceback" not in result.stderr
    assert b"Exception ignored" not in result.stderr


def refuse_constant(text):
    raise AssertionError(f"{text} is no JSON")


def test_json_is_valid_whatever_the_values_and_names_are(tmp_path):
    a = write(tmp_path / "a.tensors", {"x": torch.tensor([0.0, 1.0]), "y": torch.tensor([float("inf")])})
    b = write(tmp_path / "b.tensors", {"x": torch.tensor([1.0, 1.0]), "y": torch.tensor([1.0])})
    result = run("diff", "--json", b, a)
    changed = {row["name"]: row for row in json.loads(result.stdout, parse_constant=refuse_constant)["changed"]}
    assert (changed["x"]["max_abs"], changed["x"]["max_rel"]) == (1.0, "Infinity")
    assert changed["y"]["max_abs"] == "Infinity"
    strange = tmp_path / os.fsdecode(b"model-\xe9\xff.tensors")
    strange.write_bytes(a.read_bytes())
    document = json.loads(run("inspect", "--json", strange).stdout, parse_constant=refuse_constant)
    assert document["files"][0]["tensor_count"] == 2
    copy = json.loads(run("convert", "--json", a, strange, "--force").stdout)
    assert copy["files"] == [str(strange)]


def test_nothing_that_a_file_says_of_a_tensor_acts_on_the_terminal(tmp_path):
    acting = "a\x1b[31m\r\n\x7f\x9b31m\u202e\U000e0001"
    rows = {
        f"{acting}é😀": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": acting, "shape": [2], "data_offsets": [8, 16]},
    }
    file = tmp_path / "x.safetensors"
    file.write_bytes(reference_safetensors.build(rows, bytes(16)))
    other = tmp_path / "y.safetensors"
    rows["b"] = {**rows["b"], "dtype": "I32"}
    other.write_bytes(reference_safetensors.build(rows, bytes(16)))
    for command in (["diff", other], ["ls"], ["ls", "--group"], ["ls", "--long"], ["ls", "--json"]):
        result = run(*command, file)
        text = (result.stdout + result.stderr).decode()
        assert result.returncode == (command[0] == "diff"), text
        assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == [], command
        assert "\\x1b" in text or "\\u001b" in text
    assert "é😀" in text
    (found,) = json.loads(result.stdout)["files"]
    assert {tensor["name"]: tensor["dtype"] for tensor in found["tensors"]} == {f"{acting}é😀": "float32", "b": acting}


def test_names_that_are_no_unicode_are_shown_by_every_command(tmp_path):
    name = "half \ud800"
    path = write(tmp_path / "m.tensors", {name: torch.ones(2)})
    for command in (("inspect",), ("verify",), ("diff", path), ("inspect", "--group", "--long")):
        assert run(*command, path).returncode == 0, command
        assert run(*command, "--json", path).returncode == 0, command
    tensors = json.loads(run("inspect", "--json", path).stdout)["files"][0]["tensors"]
    assert [tensor["name"] for tensor in tensors] == [name]
    assert b"half \\ud800" in run("inspect", path).stdout
    assert run("convert", path, tmp_path / "other.tensors").returncode == 0
    assert run("convert", path, tmp_path / "m.safetensors").returncode == 6
    path.write_bytes(path.read_bytes()[:-40])
    for command in (("verify",), ("convert", "--json")):
        target = [tmp_path / "out.tensors"] if command[0] == "convert" else []
        assert run(*command, path, *target).returncode in (1, 4), command


def test_a_broken_pipe_that_is_not_the_output_is_an_error(model, monkeypatch):
    def fail(*_, **__):
        raise BrokenPipeError(32, "Broken pipe", "redis://user:password@host/m")

    monkeypatch.setattr("tensorizer._files.convert.convert", fail)
    result = run("convert", "--force", model, "redis://user:password@host/m")
    assert result.returncode == 3
    assert result.stderr.decode().strip() == "tensorizer: redis://host/m: Broken pipe"


def test_a_full_disk_under_the_output_is_one_line_and_a_status(model):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["inspect", str(model)], ["--version"], ["--help"]):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "tensorizer", *arguments]
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
        assert result.returncode == 3, arguments
        assert result.stderr.decode().strip() == "tensorizer: standard output: No space left on device", arguments


def test_names_that_the_outputs_encoding_lacks_are_written_out(tmp_path):
    path = write(tmp_path / "m.tensors", {"重み": torch.ones(2)})
    for encoding in ("ascii", "latin-1"):
        result = run("inspect", path, encoding=encoding)
        assert result.returncode == 0, result.stderr
        assert rb"\u91cd\u307f" in result.stdout


def test_names_are_written_out_in_the_locale_c_without_its_utf_8_mode(tmp_path):
    path = write(tmp_path / "m.tensors", {"重み": torch.ones(2)})
    command = [sys.executable, "-m", "tensorizer", "inspect", str(path)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    environment.pop("PYTHONIOENCODING", None)
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert rb"\u91cd\u307f" in result.stdout
