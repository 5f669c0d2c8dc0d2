"""Keys of files and signatures: where they come from, and where they never appear."""

from __future__ import annotations

import logging
import pickle
import subprocess
from typing import Any

import pytest
from authentic_files import OTHER, PUBLIC, SIGNER, K, W, encrypted, opened, signed, values
from samples import same, state_dict_bytes

from tensorizer import (
    AuthenticationError,
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    PublicKey,
    SigningKey,
    TensorSerializer,
)


def test_a_passphrase_file_opens_with_the_passphrase_and_with_its_key():
    secret = EncryptionParams.from_string("open sesame", 1, 8192)
    data = state_dict_bytes(values(), encryption=secret)
    for params in (DecryptionParams.from_string("open sesame"), DecryptionParams.from_key(secret.key)):
        with opened(data, encryption=params) as file:
            assert file.authenticated == "key"
            assert same(file["a"], values()["a"])
    limited = DecryptionParams.from_string("open sesame", max_derivations=1)
    assert opened(data, encryption=limited).authenticated == "key"
    with pytest.raises(CryptographyError):
        opened(data, encryption=DecryptionParams.from_string("open barley"))


def test_a_provider_is_asked_once_and_when_the_file_is_opened():
    asked = []

    def provide() -> bytes:
        asked.append(1)
        return K

    with opened(encrypted(), encryption=DecryptionParams.from_provider(provide), lazy_load=True) as file:
        assert len(asked) == 1
        file["a"]
    assert len(asked) == 1


def openssl(*arguments: Any) -> None:
    result = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"openssl: {result.stderr!r:.200}")


def test_keys_of_openssl_and_hex_keys_work_and_others_do_not(tmp_path):
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    key, shown = SigningKey.from_file(private), PublicKey.from_file(public)
    assert key.public_key == shown
    assert hash(shown) == hash(key.public_key)
    assert len(bytes(shown)) == 32
    (tmp_path / "seed.hex").write_text(K.hex().upper() + "\n")
    (tmp_path / "public.hex").write_text(f" {PUBLIC}\n")
    assert str(SigningKey.from_file(tmp_path / "seed.hex").public_key) == PUBLIC
    assert str(PublicKey.from_file(tmp_path / "public.hex")) == PUBLIC == str(SIGNER.public_key)
    other = tmp_path / "p256.pem"
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", other)
    openssl("pkey", "-in", other, "-pubout", "-out", tmp_path / "p256.pub")
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", private, "-aes256", "-passout", "pass:secret", "-out", locked)
    (tmp_path / "nothing").write_text("")
    (tmp_path / "zz").write_text("zz" * 32)
    for name in ("p256.pem", "locked.pem", "k.pub", "nothing", "zz"):
        with pytest.raises(ValueError, match="Ed25519"):
            SigningKey.from_file(tmp_path / name)
    for name in ("p256.pub", "k.pem", "nothing", "zz"):
        with pytest.raises(ValueError, match="key"):
            PublicKey.from_file(tmp_path / name)


def test_keys_that_are_none_are_refused():
    for bad in (bytes(32), bytes([1]) + bytes(31), b"\xff" * 32, b"short"):
        with pytest.raises(ValueError, match="public key"):
            PublicKey.from_bytes(bad)
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey.from_bytes(b"short")
    for wrong in ("text", 7):
        with pytest.raises(TypeError):
            SigningKey.from_bytes(wrong)
        with pytest.raises(TypeError):
            PublicKey.from_bytes(wrong)
    for wrong in (7, [None], [None, SIGNER.public_key], [[SIGNER.public_key]], (False,)):
        with pytest.raises(TypeError, match="public_key"):
            opened(signed(), public_key=wrong)
    with pytest.raises(ValueError, match="empty"):
        opened(signed(), public_key=[])


def test_saved_keys_are_for_their_owner_alone_and_replace_nothing(tmp_path):
    key, path = SigningKey.generate(), tmp_path / "release.pem"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.from_file(path).public_key == key.public_key
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        SIGNER.save(path)
    assert path.read_bytes() == before
    key.public_key.save(tmp_path / "release.pub")
    assert PublicKey.from_file(tmp_path / "release.pub") == key.public_key
    openssl("pkey", "-in", path, "-noout")
    openssl("pkey", "-pubin", "-in", tmp_path / "release.pub", "-noout")


def test_private_keys_appear_nowhere(tmp_path, caplog):
    seed = bytes(range(100, 132))
    key = SigningKey.from_bytes(seed)
    shown = [repr(key), str(key), repr(vars(type(key)))]
    with pytest.raises(TypeError) as caught:
        pickle.dumps(key)
    shown.append(str(caught.value))
    with caplog.at_level(logging.DEBUG):
        serializer = TensorSerializer(tmp_path / "m.tensors", signing_key=key)
        serializer.write_state_dict(W)
        with pytest.raises(TypeError) as caught:
            pickle.dumps(serializer)
        shown += [str(caught.value), repr(serializer)]
        serializer.close()
        with pytest.raises(AuthenticationError) as caught:
            opened(tmp_path / "m.tensors", public_key=OTHER.public_key)
        shown.append(str(caught.value))
    bad = tmp_path / "bad.pem"
    bad.write_text(seed.hex() + "00")
    with pytest.raises(ValueError, match="key file") as caught:
        SigningKey.from_file(bad)
    shown += [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in shown if seed.hex() in text or repr(seed) in text]
    assert pickle.loads(pickle.dumps(key.public_key)) == key.public_key
