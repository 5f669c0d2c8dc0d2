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
from paths import EXAMPLES

from tensorizer import CryptographyError, DecryptionParams, TensorDeserializer, TensorSerializer

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


@pytest.mark.parametrize("kind", ["exact", "random", "pwhash"])
def test_encrypt_existing_adds_and_removes_encryption(work: Work, kind: str) -> None:
    keyfile = {"exact": work.key, "random": work.folder / "keys" / "new", "pwhash": work.passphrase}[kind]
    assert work.add(kind, keyfile, "-q", *(LIMITS if kind == "pwhash" else ())) == 0
    if kind == "pwhash":
        key = DecryptionParams.from_string("correct horse")
    else:
        key = DecryptionParams.from_key(keyfile.read_bytes())
    assert_holds_the_model(work.secret, key)
    with pytest.raises(CryptographyError):
        TensorDeserializer(work.secret, device="cpu")
    assert work.remove("exact" if kind == "random" else kind, keyfile, "--quiet") == 0
    assert_holds_the_model(work.back)


def test_encrypt_existing_replaces_a_random_key_by_one_that_only_its_owner_can_read(work: Work) -> None:
    assert work.add("random", work.key, "-q") == 0
    assert work.key.stat().st_mode & 0o777 == 0o600
    assert_holds_the_model(work.secret, DecryptionParams.from_key(work.key.read_bytes()))
    kept = work.key.read_bytes()
    work.plain.write_bytes(b"not a file of tensors")
    assert work.add("random", work.key, "-q") == 1
    assert work.key.read_bytes() == kept
    assert sorted(path.name for path in work.folder.glob("key*")) == ["key"]


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_encrypt_existing_leaves_the_target_if_it_cannot_keep_a_random_key(work: Work, scheme: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    target = f"{scheme}{work.secret}"
    with fsspec.open(target, "wb") as file:
        file.write(b"was here before")
    (work.folder / "file").write_bytes(b"no folder")
    arguments = ("--keyfile", work.folder / "file" / "key", "--infile", work.plain, "-q")
    assert work.run("add", "random", *arguments, "--outfile", target) == 1
    with fsspec.open(target, "rb") as file:
        assert file.read() == b"was here before"


def test_encrypt_existing_strips_line_ends_of_a_passphrase_unless_told_otherwise(work: Work) -> None:
    assert work.add("pwhash", work.passphrase, *LIMITS, "--no-strip-trailing-newlines", "-q") == 0
    assert_holds_the_model(work.secret, DecryptionParams.from_string("correct horse\r\n"))
    assert work.remove("pwhash", work.passphrase, "-q") == 1
    assert work.remove("pwhash", work.passphrase, "--no-strip-trailing-newlines", "-q") == 0


def test_encrypt_existing_takes_limits_as_numbers_and_a_salt(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.add("pwhash", work.passphrase, "--opslimit", 1, "--memlimit", 9000, "--salt", SALT, "-q") == 0
    assert capsys.readouterr().out == f"salt: {SALT}\n"
    assert_holds_the_model(work.secret, DecryptionParams.from_string(b"correct horse"))


def test_encrypt_existing_lists_the_tensors_unless_quiet(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.add("exact", work.key) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 + 1
    assert lines[0] == "weight: torch.float32 [300, 400]"
    assert any(line.startswith("optimizer/state/0/step:") for line in lines)
    assert "6 tensors" in lines[-1]
    assert work.remove("exact", work.key, "-q") == 0
    assert capsys.readouterr().out == ""


FILES = "--infile PLAIN --outfile SECRET"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "add",
        f"remove random --keyfile KEY {FILES}",
        f"add exact {FILES}",
        "add exact --keyfile KEY --infile PLAIN --outfile PLAIN",
        "add exact --keyfile KEY --infile PLAIN --outfile ./PLAIN",
        f"add random --keyfile PLAIN {FILES}",
        f"add exact --keyfile SHORT {FILES}",
        f"add exact --keyfile NONE {FILES}",
        f"add pwhash --keyfile EMPTY {FILES} --opslimit min --memlimit min",
        f"add pwhash --keyfile PASSPHRASE {FILES}",
        f"add pwhash --keyfile PASSPHRASE {FILES} --opslimit huge --memlimit min",
        f"add pwhash --keyfile PASSPHRASE {FILES} --opslimit 0 --memlimit min",
        f"add pwhash --keyfile PASSPHRASE {FILES} --opslimit min --memlimit 8191",
        f"add pwhash --keyfile PASSPHRASE {FILES} --opslimit min --memlimit min --salt {SALT[:-2]}",
        f"add pwhash --keyfile PASSPHRASE {FILES} --opslimit min --memlimit min --salt {'x' * 32}",
    ],
)
def test_encrypt_existing_exits_with_2_on_wrong_usage(
    work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(work.folder)
    for name, content in {"SHORT": bytes(31), "EMPTY": b"\n", "KEY": bytes(32), "PASSPHRASE": b"correct"}.items():
        Path(name).write_bytes(content)
    work.plain.rename("PLAIN")
    assert work.run(*line.split()) == 2
    assert capsys.readouterr().err
    assert not Path("SECRET").exists()
    assert_holds_the_model(Path("PLAIN"))


def test_encrypt_existing_exits_with_1_on_failure_and_leaves_the_target(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.add("exact", work.key, "-q") == 0
    other = work.folder / "other"
    other.write_bytes(bytes(32))
    work.back.write_bytes(b"was here before")
    before = set(work.folder.iterdir())
    assert work.remove("exact", other, "-q") == 1
    assert "AuthenticationError" in capsys.readouterr().err
    assert work.remove("pwhash", work.passphrase, "-q") == 1
    for source in (work.plain, work.folder / "none"):
        assert work.run("remove", "exact", "--keyfile", work.key, "--infile", source, "--outfile", work.back) == 1
    assert work.back.read_bytes() == b"was here before"
    assert set(work.folder.iterdir()) == before


def test_encrypt_existing_runs_as_a_program(work: Work) -> None:
    command = [sys.executable, str(EXAMPLES / "encrypt_existing.py"), "add", "exact", "--keyfile", str(work.key)]
    command += ["--infile", str(work.plain), "--outfile", str(work.secret), "-q"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert_holds_the_model(work.secret, DecryptionParams.from_key(work.key.read_bytes()))


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
