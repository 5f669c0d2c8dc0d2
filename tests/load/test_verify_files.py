"""``verify=``: whole files against a list, a signature of the model, or the hub, from the bytes that a load reads."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from samples import same

import tensorizer
from tensorizer import (
    AuthenticationError,
    FormatError,
    HashMismatchError,
    MissingHashError,
    convert,
    load_file,
    load_stream,
    save_file,
    verify,
)
from tensorizer._load import digests, open_file
from tensorizer._load.open_file import OpenFile
from tensorizer.cli.main import main

TENSORS = {f"layers.{i}.weight": torch.full((40 + i, 64), 1.5 + i) for i in range(12)}


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_of(folder) -> list:
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".tensors"))


def write_sums(folder, form="{}  {}"):
    lines = [form.format(sha256(path), path.name) for path in files_of(folder)]
    (folder / "SHA256SUMS").write_text("\n".join([*lines, ""]))
    return folder / "SHA256SUMS"


def bundle_of(folder, **changes) -> bytes:
    """What ``model_signing sign`` writes, without its signature."""
    resources = [{"algorithm": "sha256", "name": p.name, "digest": sha256(p)} for p in sorted(folder.iterdir())]
    root = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": folder.name, "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"resources": resources, "serialization": {"method": "files", "hash_type": "sha256"}},
        **changes,
    }
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    envelope = {"payload": payload, "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": ""}]}
    return json.dumps({"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "dsseEnvelope": envelope}).encode()


def write_bundle(folder):
    content = bundle_of(folder)
    (folder.parent / "model.sig").write_bytes(content)
    return folder.parent / "model.sig"


def flip(path, at=-100):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.fixture(params=["safetensors", "tensors", "shards"])
def folder(request, tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    form = "safetensors" if request.param == "shards" else request.param
    save_file(TENSORS, place / f"model.{form}", max_shard_size=30_000 if request.param == "shards" else None)
    return place


LOADS = {
    "load_stream": lambda folder, verify: dict(load_stream(folder, verify=verify, memory=10_000)),
    "load_stream, one dtype": lambda folder, verify: dict(load_stream(folder, verify=verify, dtype="float16")),
    "load_stream, some": lambda folder, verify: dict(load_stream(folder, verify=verify, filter_func="x".__eq__)),
    "load_file": lambda folder, verify: load_file(folder, verify=verify),
    "load_file, mapped": lambda folder, verify: load_file(folder, verify=verify, mmap=True),
    "convert": lambda folder, verify: convert(folder, folder.parent / "out.tensors", verify=verify),
    "convert back": lambda folder, verify: convert(folder, folder.parent / "out.safetensors", verify=verify),
}


@pytest.mark.parametrize("write", [write_sums, functools.partial(write_sums, form="{} *./{}"), write_bundle])
@pytest.mark.parametrize("way", LOADS)
def test_a_flipped_bit_is_found_by_what_states_the_digests(folder, write, way):
    stated = write(folder)
    LOADS[way](folder, stated)
    flip(files_of(folder)[-1])
    for path in folder.parent.glob("out.*"):
        path.unlink()
    with pytest.raises(HashMismatchError) as found:
        LOADS[way](folder, str(stated))
    if "tensors" not in folder.name:
        assert files_of(folder)[-1].name in str(found.value)
    assert not list(folder.parent.glob("out.*"))


def test_without_verify_a_safetensors_file_is_taken_as_it_is(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    flip(tmp_path / "model.safetensors")
    for choice in ({}, {"verify": "auto"}, {"verify": False}):
        assert load_file(tmp_path, **choice).keys() == dict(load_stream(tmp_path, **choice)).keys() == TENSORS.keys()


def test_auto_compares_the_digests_of_tensors_files_alone(tmp_path):
    save_file(TENSORS, tmp_path / "model.tensors")
    flip(tmp_path / "model.tensors")
    for load in (load_file, lambda path, **o: dict(load_stream(path, **o)), lambda path, **o: convert(path, path, **o)):
        with pytest.raises(HashMismatchError):
            load(tmp_path / "model.tensors")
    assert load_file(tmp_path / "model.tensors", verify=False).keys() == TENSORS.keys()
    save_file(TENSORS, tmp_path / "bare.tensors", hashes=None)
    assert all(same(load_file(tmp_path / "bare.tensors")[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("way", LOADS)
def test_a_file_without_a_line_is_missing_its_hash(folder, way):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  other.safetensors\n")
    with pytest.raises(MissingHashError, match=rf"{files_of(folder)[0].name}.*SHA256SUMS"):
        LOADS[way](folder, folder / "SHA256SUMS")


def test_verify_reports_files_that_differ(folder, capsys):
    sums = write_sums(folder)
    report = verify(folder, verify=sums)
    assert report
    assert report.sha256_matches is True
    assert main(["verify", str(folder), "--verify", str(sums)]) == 0
    flip(files_of(folder)[-1])
    report = verify(folder, verify=sums)
    assert not report
    assert report.sha256_matches is False
    assert [row.name for row in report.differing] == [str(files_of(folder)[-1])]
    capsys.readouterr()
    assert main(["verify", str(folder), "--verify", str(sums)]) == 1
    assert sha256(files_of(folder)[-1]) in capsys.readouterr().out
    assert main(["convert", str(folder), str(folder.parent / "out.tensors"), "--verify", str(sums)]) == 1
    assert not (folder.parent / "out.tensors").exists()


def test_verify_reads_several_files_together_where_they_are_hashed(tmp_path, monkeypatch):
    save_file(TENSORS, tmp_path / "model.safetensors", max_shard_size=30_000)
    monkeypatch.setattr(OpenFile, "files_at_once", 2)
    monkeypatch.setattr(open_file, "BATCH_NBYTES", 25_000)
    together, read = [], OpenFile.read

    def noted(self, entries, verify):
        together.append([os.path.basename(part.reader.source_name)[6:11] for part in self.parts(entries)])
        return read(self, entries, verify)

    monkeypatch.setattr(OpenFile, "read", noted)
    report, one_after_the_other = verify(tmp_path, verify=write_sums(tmp_path)), verify(tmp_path)
    assert report
    assert report.unverified == one_after_the_other.unverified
    assert len(together[0]) == 2
    assert sum(len(files) == 2 for files in together) > 2
    assert {file for files in together for file in files} == {f"{i + 1:05}" for i in range(len(files_of(tmp_path)))}


def test_verify_reads_each_file_once_where_a_digest_is_given(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    assert verify(path, sha256=sha256(path).upper()).sha256 == sha256(path)
    assert verify(path, sha256="0" * 64).sha256_matches is False


def test_a_file_that_is_not_of_the_hub_cannot_be_compared_with_it(folder):
    for load in (load_file, lambda path, **o: dict(load_stream(path, **o)), verify):
        with pytest.raises(ValueError, match=r"expected a file of the hub.*got another one"):
            load(folder, verify="hub")


def test_files_in_the_cache_of_the_hub_are_compared_with_what_it_stated(tmp_path):
    made = tmp_path / "made.safetensors"
    save_file(TENSORS, made)
    repository = tmp_path / "models--org--name"
    blob = repository / "blobs" / sha256(made)
    path = repository / "snapshots" / ("1" * 40) / "model.safetensors"
    for place in (blob, path):
        place.parent.mkdir(parents=True)
    made.rename(blob)
    path.symlink_to(blob)
    assert load_file(path, verify="hub").keys() == dict(load_stream(path.parent, verify="hub")).keys()
    flip(blob)
    with pytest.raises(HashMismatchError, match="by the hub"):
        load_file(path, verify="hub")
    small = blob.rename(blob.with_name("1" * 40))
    path.unlink()
    path.symlink_to(small)
    with pytest.raises(MissingHashError, match="the hub states no SHA-256"):
        load_file(path, verify="hub")


@pytest.mark.parametrize("value", [3, b"SHA256SUMS", object()])
def test_verify_takes_words_paths_and_truth_values(folder, value):
    with pytest.raises(TypeError, match="verify: expected 'auto', 'hub'"):
        load_file(folder, verify=value)


# --- lists and signatures ---------------------------------------------------------------------------------------------

DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{DIGEST}  model.safetensors", "model.safetensors"),
        (f"{DIGEST.upper()} *model.safetensors", "model.safetensors"),
        (f"{DIGEST}  ./sub/model.safetensors\r", "sub/model.safetensors"),
        (f"SHA256 (model.safetensors) = {DIGEST}", "model.safetensors"),
        (f"# made by hand\n\n{DIGEST}  a b", "a b"),
        (f"{DIGEST} model.safetensors", "model.safetensors"),
        (f"{DIGEST}  a\u2028b", "a\u2028b"),
        (f"\\{DIGEST}  a\\nb", "a\nb"),
    ],
)
def test_lines_of_sha256sum(line, name):
    assert digests.parse_sha256sums("SUMS", line.encode()) == {name: DIGEST}


@pytest.mark.parametrize(
    "content",
    ["", "no digest", f"{DIGEST[:-1]}  model", f"{DIGEST}  a\n{'b' * 64}  ./a", "<!DOCTYPE html><html>", f"{DIGEST}"],
)
def test_what_is_no_list_of_digests(content):
    with pytest.raises(FormatError, match="SUMS"):
        digests.parse_sha256sums("SUMS", content.encode())


def test_a_signature_lists_the_digests_of_its_files(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    content = bundle_of(tmp_path)
    expected = {"model.safetensors": sha256(tmp_path / "model.safetensors")}
    assert digests.parse_model_signature("model.sig", content) == expected
    envelope = json.dumps(json.loads(content)["dsseEnvelope"]).encode()
    assert digests.parse_model_signature("model.sig", envelope) == expected
    first = {
        "predicateType": "https://model_signing/Digests/v0.1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in expected.items()],
        "predicate": {"unused": "Unused"},
    }
    assert digests.parse_model_signature("model.sig", bundle_of(tmp_path, **first)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"predicateType": "https://slsa.dev/provenance/v1"},
        {"predicate": {"resources": []}},
        {"predicate": {"resources": [{"name": "a", "algorithm": "blake2b", "digest": DIGEST}]}},
        {"predicate": {"resources": [{"name": "a", "algorithm": "sha256", "digest": "x"}]}},
        {"subject": [{"name": "model", "digest": {"sha256": DIGEST}}]},
    ],
)
def test_other_signatures_are_refused(tmp_path, changes):
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(FormatError, match=r"model\.sig"):
        digests.parse_model_signature("model.sig", bundle_of(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"{}", b"{", b'{"payload": "?"}', b'{"dsseEnvelope": 3}', b'{"payload": "aGk="}'])
def test_json_that_is_no_signature(content):
    with pytest.raises(FormatError, match=r"model\.sig"):
        digests.parse_model_signature("model.sig", content)


def test_the_words_of_verify_are_no_paths():
    assert digests.verification("auto") == digests.Verification(where_stored=True)
    assert digests.verification(False) == digests.verification(None) == digests.Verification()
    assert digests.verification("hub").files.origin == "the hub"
    assert tensorizer.load_file.__kwdefaults__["verify"] == "auto"


# --- who has signed ---------------------------------------------------------------------------------------------------

SIGNS = """
import json, sys
from pathlib import Path
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import signing

place = Path(sys.argv[1])
for name in ("signer", "other"):
    key = ec.generate_private_key(ec.SECP256R1())
    pem, pkcs8, plain = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    (place / name).write_bytes(key.private_bytes(pem, pkcs8, plain))
    public = key.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo)
    (place / f"{name}.pub").write_bytes(public)
signing.Config().use_elliptic_key_signer(private_key=place / "signer").sign(place / "model", place / "model.sig")
"""


def outcome(verify_by, source, program):
    """What a load of `source` prints, or raises, in the environment in which `program` ran."""
    load = "import sys, json, tensorizer; print(len(tensorizer.load_file(sys.argv[1], verify=json.loads(sys.argv[2]))))"
    found = program(load, str(source), json.dumps(verify_by))
    return found.stdout.strip() or found.stderr.splitlines()[-1].removeprefix("tensorizer.errors.")


@pytest.mark.slow
@pytest.mark.network
def test_a_signature_is_checked_where_a_key_is_given(tmp_path, package_folder):
    packages = package_folder("model_signing", "model_signing>=1.1", complete=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}

    def program(*arguments, check=False):
        command = [sys.executable, "-W", "ignore", "-c", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=check)

    save_file(TENSORS, tmp_path / "model" / "model.safetensors", max_shard_size=30_000)
    model, signature = tmp_path / "model", tmp_path / "model.sig"
    program(SIGNS, str(tmp_path), check=True)
    by_signer = {"signature": str(signature), "public_key": str(tmp_path / "signer.pub")}
    by_other = {"signature": str(signature), "public_key": str(tmp_path / "other.pub")}
    assert outcome(by_signer, model, program) == str(len(TENSORS))
    refused = outcome(by_other, model, program)
    assert refused.startswith(f"AuthenticationError: {signature}: expected a signature by the key {tmp_path}/other.pub")
    assert outcome(str(signature), model, program) == str(len(TENSORS))  # only the digests

    flip(files_of(model)[0])
    refused = outcome(by_signer, model, program)
    assert refused.startswith("HashMismatchError: ")
    assert f"by {signature}, signed by the key {tmp_path}/signer.pub" in refused

    # A list of the changed files, under the old signature.
    bundle = json.loads(signature.read_bytes())
    bundle["dsseEnvelope"]["payload"] = json.loads(bundle_of(model))["dsseEnvelope"]["payload"]
    signature.write_text(json.dumps(bundle))
    assert outcome(str(signature), model, program) == str(len(TENSORS))
    assert outcome(by_signer, model, program).startswith("AuthenticationError: ")


@pytest.fixture
def model_signing(monkeypatch):
    """Stands for the package; what it finds signed, and what it was asked for."""
    found = SimpleNamespace(entries={}, asked=[], error=None)

    class Config:
        def use_elliptic_key_verifier(self, **keywords):
            found.asked.append(keywords)

        use_sigstore_verifier = use_elliptic_key_verifier

        def set_hashing_config(self, config):
            self.config = config

        def verify(self, model_path, signature_path):
            if found.error is not None:
                raise found.error
            entries = [
                SimpleNamespace(identifier=name, digest=SimpleNamespace(digest_hex=digest))
                for name, digest in found.entries.items()
            ]
            if self.config.hash(model_path, files_to_hash=None) != SimpleNamespace(
                resource_descriptors=lambda: iter(entries)
            ):
                raise ValueError("mismatch")

    package = types.ModuleType("model_signing")
    package.verifying = SimpleNamespace(Config=Config)
    monkeypatch.setitem(sys.modules, "model_signing", package)
    return found


def test_the_identity_of_a_keyless_signature_may_be_given(folder, model_signing):
    signature = write_bundle(folder)
    who = {"identity": "release@example.org", "identity_provider": "https://accounts.example.org"}
    model_signing.entries = {path.name: sha256(path) for path in folder.iterdir()}
    assert len(load_file(folder, verify={"signature": signature, **who})) == len(TENSORS)
    assert model_signing.asked == [{"identity": who["identity"], "oidc_issuer": who["identity_provider"]}]
    model_signing.error = ValueError("no")
    with pytest.raises(AuthenticationError, match=r"signature by release@example\.org \(https://accounts"):
        load_file(folder, verify={"signature": signature, **who})


def test_the_list_that_is_used_is_the_one_that_was_signed(folder, model_signing):
    signature = write_bundle(folder)
    model_signing.entries = {path.name: "0" * 64 for path in folder.iterdir()}
    with pytest.raises(AuthenticationError, match="another one"):
        load_file(folder, verify={"signature": signature, "public_key": "key.pub"})


def test_a_signer_is_not_passed_over_where_model_signing_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(ImportError, match="install the package model_signing"):
        load_file(folder, verify={"signature": write_bundle(folder), "public_key": "key.pub"})


def test_a_signer_of_a_plain_list_is_refused(folder, model_signing):
    with pytest.raises(FormatError, match="is not JSON"):
        load_file(folder, verify={"signature": write_sums(folder), "public_key": "key.pub"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"signature": "a", "publickey": "b"}, r"unknown key 'publickey'; did you mean 'public_key'\?"),
        ({"signature": "a"}, "with 'public_key', or with 'identity' and 'identity_provider', got 'signature'"),
        ({"public_key": "a"}, "expected 'signature'"),
        ({"signature": "a", "identity": "b"}, "identity_provider"),
        ({"signature": "a", "identity": "b", "identity_provider": "c", "public_key": "d"}, "expected"),
        ({}, "got no keys"),
    ],
)
def test_mappings_that_do_not_say_who_has_signed_are_refused(folder, given, text):
    with pytest.raises(ValueError, match=text):
        load_file(folder, verify=given)


def test_the_command_line_takes_the_signer_as_json(folder, model_signing, capsys):
    signature = write_bundle(folder)
    model_signing.entries = {path.name: sha256(path) for path in folder.iterdir()}
    given = json.dumps({"signature": str(signature), "public_key": "key.pub"})
    assert main(["verify", str(folder), "--verify", given]) == 0
    model_signing.error = ValueError("no")
    assert main(["verify", str(folder), "--verify", given]) == 5
    assert "expected a signature by the key key.pub" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(folder), "--verify", "{"])
    assert "argument --verify: expected a path, a URI, a word or JSON" in capsys.readouterr().err
