"""EncryptionParams, DecryptionParams and the key functions of the extension, without any file."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorizer import _C
from tensorizer import _crypto as kernels
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import CryptographyError

KEY = bytes(range(32))
SALT = bytes(16)
VECTOR = "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662"

OpsLimit = EncryptionParams.OpsLimit
MemLimit = EncryptionParams.MemLimit


def cheap(source: str | bytes = "test", **kwargs: object) -> EncryptionParams:
    return EncryptionParams.from_string(source, 1, 8192, **{"salt": SALT, **kwargs})  # type: ignore[arg-type]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path


# --- a key given directly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_key_may_be_any_bytes_like_object_and_comes_back_as_bytes(kind: type) -> None:
    params = EncryptionParams(kind(KEY))
    assert params.key == KEY
    assert type(params.key) is bytes
    assert EncryptionParams(key=KEY).key == KEY


def test_a_later_change_of_the_callers_buffer_does_not_change_the_key() -> None:
    buffer = bytearray(KEY)
    params = EncryptionParams(buffer)
    buffer[:] = bytes(32)
    assert params.key == KEY


def test_a_strided_view_is_read_in_its_own_order() -> None:
    assert EncryptionParams(memoryview(KEY)[::-1]).key == KEY[::-1]


@pytest.mark.parametrize("key", ["k" * 32, None, 32, list(KEY)])
def test_a_key_of_another_type_is_a_type_error(key: object) -> None:
    with pytest.raises(TypeError, match="encryption key"):
        EncryptionParams(key)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, 1, 31, 33, 64])
def test_a_key_of_another_length_is_a_value_error_that_says_both_lengths(nbytes: int) -> None:
    with pytest.raises(ValueError, match=rf"32 bytes, got {nbytes}"):
        EncryptionParams(bytes(nbytes))


def test_a_direct_or_random_key_has_no_salt() -> None:
    for params in (EncryptionParams(KEY), EncryptionParams.random()):
        assert params.derivation is None
        with pytest.raises(ValueError, match="no salt"):
            _ = params.salt


def test_random_keys_have_32_bytes_and_differ() -> None:
    keys = {EncryptionParams.random().key for _ in range(8)}
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 8


# --- a key derived from a passphrase ---------------------------------------------------------------------------


def test_the_derived_key_is_the_published_one() -> None:
    assert EncryptionParams.from_string("test", 1, 8192, salt=SALT).key.hex() == VECTOR


def test_text_and_its_encoding_give_the_same_key() -> None:
    assert cheap("pässword") == cheap("pässword".encode())
    assert cheap("pässword", encoding="latin-1") == cheap("pässword".encode("latin-1"))
    assert cheap("pässword") != cheap("pässword", encoding="latin-1")


def test_the_passphrase_is_used_as_it_is() -> None:
    keys = {cheap(source).key for source in ("a", "a ", "a\n", "a\0", "A")}
    assert len(keys) == 5


def test_derived_parameters_say_what_a_file_must_store() -> None:
    params = EncryptionParams.from_string("test", 2, 9000, salt=bytes(range(16)))
    assert params.derivation == (2, 9000, bytes(range(16)))
    assert params.salt == bytes(range(16))


def test_the_default_limits_are_moderate_and_the_default_salt_is_random() -> None:
    a = EncryptionParams.from_string("test", OpsLimit.MIN, MemLimit.MIN)
    b = EncryptionParams.from_string("test", OpsLimit.MIN, MemLimit.MIN)
    assert a.salt != b.salt
    assert a.key != b.key
    defaults = inspect.signature(EncryptionParams.from_string).parameters
    assert [defaults[name].default for name in ("opslimit", "memlimit", "salt")] == [None, None, None]
    ops, mem, _ = EncryptionParams.from_string("test", memlimit=8192).derivation or (0, 0, b"")
    assert (ops, mem) == (OpsLimit.MODERATE, 8192)
    ops, mem, _ = EncryptionParams.from_string("test", 1).derivation or (0, 0, b"")
    assert (ops, mem) == (1, MemLimit.MODERATE)


@pytest.mark.parametrize("salt", [bytes(16), bytearray(16), memoryview(bytes(16)), "\0" * 16])
def test_a_salt_may_be_bytes_like_or_text(salt: object) -> None:
    assert cheap(salt=salt).key.hex() == VECTOR


@pytest.mark.parametrize("salt", [b"", bytes(15), bytes(17), "", "ä" * 15])
def test_a_salt_of_another_length_is_a_value_error(salt: object) -> None:
    with pytest.raises(ValueError, match="salt: expected 16 bytes"):
        cheap(salt=salt)


def test_a_salt_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="salt"):
        cheap(salt=16)


@pytest.mark.parametrize("source", ["", b""])
def test_an_empty_passphrase_is_a_value_error(source: object) -> None:
    with pytest.raises(ValueError, match="empty"):
        EncryptionParams.from_string(source, 1, 8192)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        DecryptionParams.from_string(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [bytearray(b"x"), memoryview(b"x"), 1, ["x"], None, 0, []])
def test_a_passphrase_of_another_type_is_a_type_error(source: object) -> None:
    with pytest.raises(TypeError, match="passphrase"):
        EncryptionParams.from_string(source, 1, 8192)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="passphrase"):
        DecryptionParams.from_string(source)  # type: ignore[arg-type]


def test_the_enums_are_the_presets_of_libsodium() -> None:
    presets = _C.testing.derivation_presets()
    assert {limit.name: int(limit) for limit in OpsLimit} == presets["OpsLimit"]
    assert {limit.name: int(limit) for limit in MemLimit} == presets["MemLimit"]


@pytest.mark.parametrize("value", [MemLimit.MIN, 1.0, "1", b"1"])
def test_an_opslimit_of_another_type_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="opslimit"):
        EncryptionParams.from_string("x", value, 8192)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [OpsLimit.MIN, 8192.0, "8192"])
def test_a_memlimit_of_another_type_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="memlimit"):
        EncryptionParams.from_string("x", 1, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 0, 4294967296, 2**64, 2**80])
def test_an_opslimit_out_of_range_is_a_value_error(value: int) -> None:
    with pytest.raises(ValueError, match="opslimit: expected 1 to 4294967295"):
        EncryptionParams.from_string("x", value, 8192)


@pytest.mark.parametrize("value", [-1, 0, 8191, 4398046510081, 2**64])
def test_a_memlimit_out_of_range_is_a_value_error(value: int) -> None:
    with pytest.raises(ValueError, match="memlimit: expected 8192 to 4398046510080"):
        EncryptionParams.from_string("x", 1, value)


def test_too_little_memory_is_a_cryptography_error() -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this system promises any amount of memory")
    with pytest.raises(CryptographyError, match="not enough memory"):
        EncryptionParams.from_string("x", 1, 4398046510080)


@settings(deadline=None, max_examples=30)
@given(
    st.binary(min_size=1, max_size=200),
    st.integers(1, 3),
    st.integers(8192, 40000),
    st.binary(min_size=16, max_size=16),
)
def test_derivation_is_a_function_of_its_arguments(source: bytes, ops: int, mem: int, salt: bytes) -> None:
    a = EncryptionParams.from_string(source, ops, mem, salt)
    assert a == EncryptionParams.from_string(source, ops, mem, salt)
    assert _C.derive_key(source, ops, mem, 2, salt).export() == a.key


# --- keys for reading ------------------------------------------------------------------------------------------


def test_empty_decryption_params_hold_nothing() -> None:
    params = DecryptionParams()
    assert params.key is None
    assert params.source is None
    with pytest.raises(TypeError):
        DecryptionParams(KEY)  # type: ignore[call-arg]


def test_a_decryption_key_or_passphrase_is_kept_as_bytes() -> None:
    for kind in (bytes, bytearray, memoryview):
        params = DecryptionParams.from_key(kind(KEY))
        assert (params.key, params.source) == (KEY, None)
    params = DecryptionParams.from_string("é", encoding="latin-1")
    assert (params.key, params.source) == (None, b"\xe9")
    assert DecryptionParams.from_string(b"\0x").source == b"\0x"


@pytest.mark.parametrize("key", [b"", bytearray(), memoryview(b""), None, "", bytes(31), bytes(33)])
def test_an_empty_or_wrongly_sized_decryption_key_is_a_value_error(key: object) -> None:
    with pytest.raises(ValueError, match="decryption key"):
        DecryptionParams.from_key(key)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["k" * 32, list(KEY), 32])
def test_a_decryption_key_of_another_type_is_a_type_error(key: object) -> None:
    with pytest.raises(TypeError, match="decryption key"):
        DecryptionParams.from_key(key)  # type: ignore[arg-type]


def test_derivation_limits_have_documented_defaults_and_can_be_set() -> None:
    params = DecryptionParams.from_string("x")
    assert (params.max_opslimit, params.max_memlimit, params.max_derivations) == (16, 4 << 30, 16)
    params = DecryptionParams.from_string("x", max_opslimit=2, max_memlimit=1 << 20, max_derivations=1)
    assert (params.max_opslimit, params.max_memlimit, params.max_derivations) == (2, 1 << 20, 1)
    assert DecryptionParams.from_string("x", max_memlimit=2**70).max_memlimit == 2**64 - 1


@pytest.mark.parametrize("name", ["max_opslimit", "max_memlimit", "max_derivations"])
def test_derivation_limits_are_checked(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DecryptionParams.from_string("x", **{name: 1.5})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        DecryptionParams.from_string("x", **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        DecryptionParams.from_string("x", 1)  # type: ignore[misc]


# --- files and providers ---------------------------------------------------------------------------------------


def test_a_key_file_of_32_bytes_is_a_key(key_file: Path) -> None:
    assert EncryptionParams.from_file(key_file) == EncryptionParams(KEY)
    assert DecryptionParams.from_file(str(key_file)) == DecryptionParams.from_key(KEY)


@pytest.mark.parametrize(("nbytes", "found"), [(0, "0"), (31, "31"), (33, "more"), (1 << 20, "more")])
def test_a_key_file_of_another_size_is_a_value_error_naming_it(tmp_path: Path, nbytes: int, found: str) -> None:
    path = tmp_path / "some.key"
    path.write_bytes(b"\xab" * nbytes)
    for params in (EncryptionParams, DecryptionParams):
        with pytest.raises(ValueError, match=rf"some\.key.*32 bytes, got {found}$"):
            params.from_file(path)


def test_a_missing_key_file_is_the_error_of_opening_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EncryptionParams.from_file(tmp_path / "none")


@pytest.mark.parametrize("params", [EncryptionParams, DecryptionParams])
def test_a_provider_is_called_once_and_not_before_the_key_is_needed(params: type) -> None:
    calls = []
    made = params.from_provider(lambda: calls.append(1) or bytearray(KEY))
    repr(made), made == made, made == params.from_provider(bytes)
    assert calls == []
    assert [made.key, made.key, made.key] == [KEY] * 3
    assert calls == [1]


def test_a_provider_is_called_once_when_many_threads_need_the_key() -> None:
    calls, ready = [], threading.Barrier(8)

    def provide() -> bytes:
        calls.append(1)
        return KEY

    params = DecryptionParams.from_provider(provide)
    found: list[object] = []

    def need() -> None:
        ready.wait()
        found.append(params.key)

    threads = [threading.Thread(target=need) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [KEY] * 8
    assert calls == [1]


def test_what_a_provider_raises_reaches_the_caller_and_it_is_asked_again() -> None:
    answers = iter([ConnectionError("key service is down"), KEY])

    def provide() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    params = EncryptionParams.from_provider(provide)
    with pytest.raises(ConnectionError, match="down"):
        _ = params.key
    assert params.key == KEY


def test_a_provider_that_returns_no_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="provider returned: expected 32 bytes, got 5"):
        _ = EncryptionParams.from_provider(lambda: b"short").key
    with pytest.raises(TypeError, match="provider returned"):
        _ = DecryptionParams.from_provider(lambda: "k" * 32).key  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="callable"):
        EncryptionParams.from_provider(KEY)  # type: ignore[arg-type]


# --- as values -------------------------------------------------------------------------------------------------


def all_params() -> list[EncryptionParams | DecryptionParams]:
    return [
        EncryptionParams(KEY),
        EncryptionParams(bytes(32)),
        cheap("test"),
        cheap("Test"),
        EncryptionParams(cheap("test").key),
        DecryptionParams(),
        DecryptionParams.from_key(KEY),
        DecryptionParams.from_key(bytes(32)),
        DecryptionParams.from_string("test"),
        DecryptionParams.from_string("Test"),
        DecryptionParams.from_string("test", max_opslimit=3),
        DecryptionParams.from_string("test", max_derivations=3),
    ]


def test_parameters_are_equal_exactly_when_everything_they_hold_is_equal() -> None:
    for i, a in enumerate(all_params()):
        for j, b in enumerate(all_params()):
            assert (a == b) == (i == j), (i, j)
            assert (a != b) == (i != j), (i, j)
    assert EncryptionParams(KEY) != KEY
    assert DecryptionParams() != None  # noqa: E711


def test_parameters_are_unhashable_slotted_and_immutable() -> None:
    for params in all_params():
        with pytest.raises(TypeError, match="unhashable"):
            hash(params)
        assert not hasattr(params, "__dict__")
        with pytest.raises(AttributeError):
            params.anything = 1  # type: ignore[union-attr]
        with pytest.raises(AttributeError, match="immutable"):
            params._key = None  # type: ignore[assignment]
        with pytest.raises(AttributeError, match="immutable"):
            del params._key


def test_no_text_about_parameters_contains_a_secret() -> None:
    secrets = [KEY.hex(), repr(KEY), "hunter2", VECTOR, repr(bytes.fromhex(VECTOR))]
    shown = [
        *all_params(),
        EncryptionParams.from_string("hunter2", 1, 8192, SALT),
        DecryptionParams.from_string("hunter2"),
        EncryptionParams.from_provider(lambda: KEY),
        _C.SecretKey(KEY),
    ]
    for params in shown:
        for text in (repr(params), str(params), f"{params}"):
            assert not any(secret in text for secret in secrets), text
    assert repr(cheap()) == "EncryptionParams(key=<hidden>, opslimit=1, memlimit=8192)"
    assert repr(DecryptionParams()) == "DecryptionParams()"


def test_errors_do_not_quote_the_secret() -> None:
    with pytest.raises(ValueError, match="ascii") as caught:
        EncryptionParams.from_string("hünter2", 1, 8192, encoding="ascii")
    chain: BaseException | None = caught.value
    while chain is not None:
        assert "nter2" not in str(chain)
        assert not isinstance(chain, UnicodeEncodeError)
        chain = chain.__context__
    with pytest.raises(ValueError, match="33") as caught:
        EncryptionParams(b"s3cret" + bytes(27))
    assert "s3cret" not in str(caught.value)


def test_copies_and_pickles_are_equal() -> None:
    for params in all_params():
        assert copy.copy(params) == params
        assert copy.deepcopy(params) == params
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(params, protocol)) == params
    provided = pickle.loads(pickle.dumps(EncryptionParams.from_provider(bytes)))
    with pytest.raises(ValueError, match="got 0"):
        _ = provided.key
    assert pickle.loads(pickle.dumps(OpsLimit.SENSITIVE)) is OpsLimit.SENSITIVE


def test_guarded_keys_cannot_be_pickled_by_accident() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(_C.SecretKey(KEY))


# --- the extension ---------------------------------------------------------------------------------------------


def test_derive_key_refuses_what_a_hostile_file_may_ask_for() -> None:
    with pytest.raises(CryptographyError, match="memlimit 4398046510080 is above the limit of 4294967296"):
        _C.derive_key(b"x", 1, 4398046510080, 2, SALT, max_memlimit=_C.DEFAULT_MAX_MEMLIMIT)
    with pytest.raises(CryptographyError, match="opslimit 4294967295 is above the limit of 16"):
        _C.derive_key(b"x", 4294967295, 8192, 2, SALT, max_opslimit=_C.DEFAULT_MAX_OPSLIMIT)
    with pytest.raises(CryptographyError, match="algorithm 1"):
        _C.derive_key(b"x", 1, 8192, 1, SALT)
    with pytest.raises(ValueError, match="opslimit"):
        _C.derive_key(b"x", 0, 8192, 2, SALT)
    with pytest.raises(ValueError, match="salt"):
        _C.derive_key(b"x", 1, 8192, 2, bytes(15))


def test_other_threads_run_while_a_key_is_derived() -> None:
    stop, turns = threading.Event(), [0]

    def spin() -> None:
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=spin)
    thread.start()
    before = turns[0]
    _C.derive_key(b"x", 1, 64 << 20, 2, SALT)
    counted = turns[0] - before
    stop.set()
    thread.join()
    assert counted > 10


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=3000), st.binary(min_size=24, max_size=24), st.binary(min_size=32, max_size=32))
def test_every_kernel_seals_alike_and_opens_what_it_sealed(plain: bytes, nonce: bytes, key: bytes) -> None:
    secret, sealed = _C.SecretKey(key), set()
    best = _C.active_kernel()
    try:
        for kernel in _C.available_kernels():
            assert _C.select_kernel(kernel)
            cipher, mac = _C.testing.seal(plain, nonce, secret)
            assert _C.testing.open(cipher, mac, nonce, secret) == plain
            assert _C.testing.open(cipher, bytes([mac[0] ^ 1]) + mac[1:], nonce, secret) is None
            sealed.add((cipher, mac))
    finally:
        _C.select_kernel(best)
    assert len(sealed) == 1


def test_nonces_count_as_one_little_endian_number() -> None:
    for nonce, n in ((bytes(24), 0), (b"\xff" * 24, 1), (b"\xff" * 9 + bytes(15), 2**64 - 1), (bytes(range(24)), 300)):
        total = (int.from_bytes(nonce, "little") + n) % 2**192
        assert _C.testing.nonce_plus(nonce, n) == total.to_bytes(24, "little")


def test_encryption_is_available_here() -> None:
    assert kernels.available is True
    assert kernels.CryptographyError is CryptographyError


def test_without_libsodium_every_way_to_a_key_is_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
    monkeypatch.setattr(kernels, "available", False)
    ways = [
        lambda: EncryptionParams(KEY),
        EncryptionParams.random,
        lambda: EncryptionParams.from_string("x", 1, 8192),
        lambda: EncryptionParams.from_file(key_file),
        lambda: EncryptionParams.from_provider(bytes),
        lambda: DecryptionParams.from_key(KEY),
        lambda: DecryptionParams.from_string("x"),
        lambda: DecryptionParams.from_file(key_file),
        lambda: DecryptionParams.from_provider(bytes),
    ]
    for way in ways:
        with pytest.raises(RuntimeError, match="libsodium"):
            way()
