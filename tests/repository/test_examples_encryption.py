"""The encryption examples: their command lines, their exit codes, and that what they write can be read."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from places import EXAMPLES

from tensorizer import CryptographyError, DecryptionParams, TensorDeserializer, TensorSerializer, TensorType

SALT = "000102030405060708090a0b0c0d0e0f"
LIMITS = ["--opslimit", "min", "--memlimit", "MIN"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("encrypt_existing", EXAMPLES / "encrypt_existing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nested() -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        "weight": torch.randn(300, 400),
        "half": torch.randn(5).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "optimizer": {"state": [{"step": torch.ones(2)}, {"step": torch.zeros(1, dtype=torch.int64)}]},
    }


class Work:
    """A folder with a plain file, a key, a passphrase, and the tool to run on them."""

    def __init__(self, folder: Path, tool: ModuleType) -> None:
        self.folder, self.tool = folder, tool
        self.plain, self.secret, self.back = (folder / f"{name}.tensors" for name in ("plain", "secret", "back"))
        self.key, self.passphrase = folder / "key", folder / "passphrase"
        self.key.write_bytes(bytes(range(32)))
        self.passphrase.write_bytes(b"correct horse\r\n")
        with TensorSerializer(self.plain) as serializer:
            serializer.write_state_dict(nested())

    def run(self, *args: object) -> int:
        try:
            return int(self.tool.main([str(arg) for arg in args]))
        except SystemExit as ending:
            return int(ending.code or 0)

    def add(self, kind: str, keyfile: Path, *more: object) -> int:
        return self.run("add", kind, "--keyfile", keyfile, "--infile", self.plain, "--outfile", self.secret, *more)

    def remove(self, kind: str, keyfile: Path, *more: object) -> int:
        return self.run("remove", kind, "--keyfile", keyfile, "--infile", self.secret, "--outfile", self.back, *more)


@pytest.fixture
def work(tmp_path: Path, tool: ModuleType) -> Work:
    return Work(tmp_path, tool)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
    keys = a.keys() if hasattr(a, "keys") else range(len(a))
    return len(a) == len(b) and all(same(a[key], b[key]) for key in keys)


def assert_holds_the_model(path: Path, encryption: DecryptionParams | None = None) -> None:
    with TensorDeserializer(path, device="cpu", encryption=encryption) as found:
        assert same(nested(), found.tree())


@pytest.mark.parametrize("kind", ["exact", "random"])
def test_a_nested_state_dict_survives_encryption_and_decryption_with_a_key(work: Work, kind: str) -> None:
    keyfile = work.key if kind == "exact" else work.folder / "new-key"
    assert work.add(kind, keyfile, "-q") == 0
    assert len(keyfile.read_bytes()) == 32
    assert_holds_the_model(work.secret, DecryptionParams.from_key(keyfile.read_bytes()))
    with pytest.raises(CryptographyError):
        TensorDeserializer(work.secret, device="cpu")
    assert work.remove("exact", keyfile, "--quiet") == 0
    assert_holds_the_model(work.back)


def test_a_random_key_file_can_be_read_by_its_owner_alone(work: Work) -> None:
    keyfile = work.folder / "new-key"
    assert work.add("random", keyfile, "-q") == 0
    assert keyfile.stat().st_mode & 0o777 == 0o600
    first = keyfile.read_bytes()
    assert work.add("random", keyfile, "-q") == 0
    assert keyfile.read_bytes() != first


def test_the_folder_of_a_random_key_file_is_made(work: Work) -> None:
    keyfile = work.folder / "keys" / "new-key"
    assert work.add("random", keyfile, "-q") == 0
    assert_holds_the_model(work.secret, DecryptionParams.from_key(keyfile.read_bytes()))


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_no_encrypted_file_appears_whose_random_key_could_not_be_kept(work: Work, scheme: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    target = f"{scheme}{work.secret}"
    with fsspec.open(target, "wb") as file:
        file.write(b"was here before")
    (work.folder / "file").write_bytes(b"no folder")
    arguments = ("--keyfile", work.folder / "file" / "key", "--infile", work.plain, "-q")
    assert work.run("add", "random", *arguments, "--outfile", target) == 1
    with fsspec.open(target, "rb") as file:
        assert file.read() == b"was here before"


def test_a_file_uri_names_the_path_that_the_library_would_write(work: Work) -> None:
    target, keyfile = work.folder / "a b.tensors", work.folder / "key"
    arguments = ("--keyfile", keyfile, "--infile", work.plain, "-q")
    assert work.run("add", "random", *arguments, "--outfile", target.as_uri()) == 0
    assert "%20" in target.as_uri()
    assert target.exists()


def test_a_passphrase_file_works_with_and_without_its_line_end(work: Work) -> None:
    assert work.add("pwhash", work.passphrase, *LIMITS, "-q") == 0
    assert_holds_the_model(work.secret, DecryptionParams.from_string("correct horse"))
    assert work.remove("pwhash", work.passphrase, "-q") == 0
    assert_holds_the_model(work.back)

    assert work.add("pwhash", work.passphrase, *LIMITS, "--no-strip-trailing-newlines", "-q") == 0
    assert_holds_the_model(work.secret, DecryptionParams.from_string("correct horse\r\n"))
    assert work.remove("pwhash", work.passphrase, "-q") == 1
    assert work.remove("pwhash", work.passphrase, "--no-strip-trailing-newlines", "-q") == 0


def test_limits_may_be_numbers_and_the_salt_given(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.add("pwhash", work.passphrase, "--opslimit", 1, "--memlimit", 9000, "--salt", SALT, "-q") == 0
    assert capsys.readouterr().out == f"salt: {SALT}\n"
    assert_holds_the_model(work.secret, DecryptionParams.from_string(b"correct horse"))


def test_without_quiet_every_tensor_has_a_line_and_the_end_too(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.add("exact", work.key) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 + 1
    assert lines[0].startswith("weight: torch.float32 [300, 400]")
    assert any(line.startswith("optimizer/state/0/step:") for line in lines)
    assert "6 tensors" in lines[-1]
    assert work.remove("exact", work.key, "-q") == 0
    assert capsys.readouterr().out == ""


def test_wrong_usage_exits_with_2_and_writes_nothing(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    short, empty = work.folder / "short", work.folder / "empty"
    short.write_bytes(bytes(31))
    empty.write_bytes(b"\n")
    files = ["--infile", work.plain, "--outfile", work.secret]
    passphrase = ["add", "pwhash", "--keyfile", work.passphrase, *files]
    wrong = [
        [],
        ["add"],
        ["remove", "random", "--keyfile", work.key, *files],
        ["add", "exact", *files],
        ["add", "exact", "--keyfile", work.key, "--infile", work.plain, "--outfile", work.plain],
        [
            "add",
            "exact",
            "--keyfile",
            work.key,
            "--infile",
            work.plain,
            "--outfile",
            work.folder / "." / "plain.tensors",
        ],
        ["add", "random", "--keyfile", work.plain, *files],
        ["add", "exact", "--keyfile", short, *files],
        ["add", "exact", "--keyfile", work.folder / "none", *files],
        ["add", "pwhash", "--keyfile", empty, *files, *LIMITS],
        passphrase,
        [*passphrase, "--opslimit", "huge", "--memlimit", "min"],
        [*passphrase, "--opslimit", "0", "--memlimit", "min"],
        [*passphrase, "--opslimit", "min", "--memlimit", "8191"],
        [*passphrase, *LIMITS, "--salt", SALT[:-2]],
        [*passphrase, *LIMITS, "--salt", "x" * 32],
    ]
    for args in wrong:
        assert work.run(*args) == 2, args
        assert capsys.readouterr().err, args
    assert not work.secret.exists()
    assert_holds_the_model(work.plain)


def test_a_failure_exits_with_1_and_leaves_the_target_as_it_was(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.add("exact", work.key, "-q") == 0
    other = work.folder / "other"
    other.write_bytes(bytes(32))
    work.back.write_bytes(b"was here before")
    before = set(work.folder.iterdir())
    assert work.remove("exact", other, "-q") == 1
    assert "AuthenticationError" in capsys.readouterr().err
    assert work.remove("pwhash", work.passphrase, "-q") == 1
    assert work.back.read_bytes() == b"was here before"
    assert set(work.folder.iterdir()) == before
    assert work.run("remove", "exact", "--keyfile", work.key, "--infile", work.plain, "--outfile", work.back) == 1
    assert (
        work.run("add", "exact", "--keyfile", work.key, "--infile", work.folder / "none", "--outfile", work.back) == 1
    )


def test_module_files_keep_their_kinds_and_indices(work: Work) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with TensorSerializer(work.plain) as serializer:
        serializer.write_module(module)
    assert work.add("exact", work.key, "-q") == 0
    key = DecryptionParams.from_key(work.key.read_bytes())
    with (
        TensorDeserializer(work.plain, lazy_load=True, device="cpu") as a,
        TensorDeserializer(work.secret, lazy_load=True, device="cpu", encryption=key) as b,
    ):
        kinds = [[entry[:3] for entry in source.read_tensors()] for source in (a, b)]
    assert kinds[0] == kinds[1]


def test_the_tool_runs_as_a_program(work: Work) -> None:
    command = [sys.executable, str(EXAMPLES / "encrypt_existing.py"), "add", "exact", "--keyfile", str(work.key)]
    command += ["--infile", str(work.plain), "--outfile", str(work.secret), "-q"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert_holds_the_model(work.secret, DecryptionParams.from_key(work.key.read_bytes()))


def test_the_tool_never_holds_the_whole_model(work: Work) -> None:
    nbytes, count = 16 << 20, 24
    with TensorSerializer(work.plain) as serializer:
        for i in range(count):
            serializer.write_tensor(0, f"t{i}", TensorType.STATE_DICT, torch.full((nbytes // 4,), float(i)))
    code = (
        "import resource, runpy, sys\n"
        "tool = runpy.run_path(sys.argv[1])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "assert tool['main'](sys.argv[2:]) == 0\n"
        "print(peak() - before)\n"
    )
    tool = str(EXAMPLES / "encrypt_existing.py")
    command = ["add", "exact", "--keyfile", work.key, "--infile", work.plain, "--outfile", work.secret, "-q"]
    result = subprocess.run(
        [sys.executable, "-c", code, tool, *map(str, command)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < nbytes * count / 2


def test_the_model_example_restores_the_same_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32, window_size=8, intermediate_size=32,
    )  # fmt: skip
    transformers.GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    environment = {
        **os.environ,
        "MODEL_PASSPHRASE": "correct horse",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "encryption.py"), "--model-ref", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "the decrypted model is identical" in result.stdout
    assert "correct horse" not in result.stdout + result.stderr
