"""Safetensors files through TensorDeserializer: equal to the reference implementation, strict where it is in doubt."""

from __future__ import annotations

import io
import json
import random
import struct

import pytest
import reference_safetensors as ref
import samples
import torch
from samples import same, tensor

from tensorizer import _C, DecryptionParams, TensorDeserializer
from tensorizer.errors import CryptographyError, FormatError, MissingHashError, TruncatedError

st = pytest.importorskip("safetensors.torch")

NAMES = [
    "uint64",
    "int64",
    "float64",
    "complex64",
    "float32",
    "uint32",
    "int32",
    "bfloat16",
    "float16",
    "uint16",
    "int16",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "float4_e2m1fn_x2",
    "bool",
]
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def every_dtype():
    content = {}
    for dtype in DTYPES:
        content[f"layer.{dtype}"] = tensor((3, 4), dtype, seed=1)
        content[f"scalar.{dtype}"] = tensor((1,) if "float4" in str(dtype) else (), dtype, seed=2)
        content[f"empty.{dtype}"] = tensor((0, 2), dtype)
    return content


def saved(content, metadata=None):
    try:
        return st.save(content, metadata)
    except Exception as error:  # a dtype that this release of the reference lacks
        pytest.skip(f"safetensors cannot write this: {error}")


CONTENTS = {
    "all dtypes, scalars, empty tensors": every_dtype,
    "no tensors": dict,
    "names": lambda: {
        name: tensor((2,), seed=name) for name in ("", "é", '"\\\n\x01', "a.b", "\x1e[0]", "\U0001f600", "__x__")
    },
    "10,000 tensors": lambda: {f"t{i:05}": torch.tensor([float(i)]) for i in range(10_000)},
    "odd sizes": lambda: {
        "a": tensor((7,), torch.uint8),
        "b": tensor((3,), torch.float32),
        "c": tensor((5,), torch.int64),
    },
}


def assert_equal_to_reference(data, path, **options):
    path.write_bytes(data)
    wanted = st.load_file(path)
    with TensorDeserializer(path, device="cpu", **options) as found:
        assert list(found.keys()) == list(wanted)
        for name, value in wanted.items():
            assert same(found[name], value), name
            assert found[name].requires_grad == (value.is_floating_point() or value.is_complex())


@pytest.mark.parametrize("name", CONTENTS)
def test_every_file_of_the_reference_writer_loads_bit_by_bit(name, tmp_path):
    data = saved(CONTENTS[name](), {"format": "pt"})
    for options in ({}, {"lazy_load": True}, {"mmap": True}, {"num_readers": 1}):
        assert_equal_to_reference(data, tmp_path / "m.bin", **options)
    oracle = ref.read(data)
    index = _C.open_index(_C.PyFileSource(io.BytesIO(data), "m"), 0, False)
    assert index.names() == list(oracle.tensors)
    assert [index.container_dtype(i) for i in range(len(index))] == [t.dtype for t in oracle.tensors.values()]
    assert index.metadata() == {"format": "pt"}


def test_metadata_absent_and_empty_and_of_many_pairs():
    for metadata in (None, {}, {"a": "1", "b\n": "é"}):
        data = saved({"w": torch.ones(2)}, metadata)
        with TensorDeserializer(io.BytesIO(data), device="cpu") as found:
            assert found.metadata == (metadata or {})
            assert found.format == "safetensors"
    null = ref.build('{"__metadata__":null,"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\1")
    with TensorDeserializer(io.BytesIO(null), device="cpu") as found:
        assert (found.metadata, found["w"].item()) == ({}, 1)


def test_the_format_is_told_by_content_and_may_begin_in_the_middle_of_a_file(tmp_path):
    data = saved({"w": torch.arange(5)})
    (tmp_path / "model.tensors").write_bytes(data)
    with TensorDeserializer(tmp_path / "model.tensors", device="cpu") as found:
        assert found.format == "safetensors"
    tensors = samples.state_dict_bytes({"w": torch.arange(5)})
    (tmp_path / "model.safetensors").write_bytes(tensors)
    with TensorDeserializer(tmp_path / "model.safetensors", device="cpu") as found:
        assert found.format == "tensors"
    inside = io.BytesIO(b"x" * 100 + data)
    inside.seek(100)
    with TensorDeserializer(inside, device="cpu") as found:
        assert torch.equal(found["w"], torch.arange(5))


def test_order_is_that_of_the_payloads():
    header = {"b": ("U8", [1], 2, 3), "a": ("U8", [2], 0, 2), "e2": ("U8", [0], 2, 2), "e1": ("U8", [0], 2, 2)}
    rows = {n: {"dtype": d, "shape": s, "data_offsets": [i, j]} for n, (d, s, i, j) in header.items()}
    with TensorDeserializer(io.BytesIO(ref.build(rows, b"\1\2\3")), device="cpu") as found:
        assert list(found) == ["a", "e2", "e1", "b"]
        assert found["b"].item() == 3


def test_mmap_views_aligned_tensors_and_copies_only_the_others(tmp_path):
    content = {"a": tensor((64, 1024), torch.uint8, seed=1), "b": tensor((64, 1024), torch.float64, seed=2)}
    rows, payload = {}, b""
    for name, dtype in (("a", "U8"), ("b", "F64")):
        data = samples.raw(content[name])
        rows[name] = {"dtype": dtype, "shape": [64, 1024], "data_offsets": [len(payload), len(payload) + len(data)]}
        payload += data
    for pad in range(8):
        header = json.dumps(rows).encode()
        header += b" " * (-len(header) % 8 + pad)
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(ref.build(header, payload))
        with TensorDeserializer(path, device="cpu", mmap=True) as found:
            for name, value in content.items():
                assert same(found[name], value)
            copied = found._open_file.bytes_read
        # What is read beyond the header is the tensor that is not aligned.
        expected = 0
        with TensorDeserializer(path, device="cpu", mmap=True, lazy_load=True) as found:
            before = found._open_file.bytes_read
            found.tree()
            expected = found._open_file.bytes_read - before
        assert expected == (0 if pad == 0 else content["b"].numel() * 8), (pad, copied)


# --- what is refused --------------------------------------------------------------------------------------------------

U8 = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def one(body, payload=b"\0"):
    return ref.build('{"w":' + body + "}", payload)


def offsets(begin, end, payload=b"\0" * 8):
    return one(f'{{"dtype":"U8","shape":[4],"data_offsets":[{begin},{end}]}}', payload)


GOOD = ref.build('{"w":' + U8 + "}", b"\7")
REFUSED = {  # name: bytes, words of the message
    "length of 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "at most 100000000"),
    "length of 2^64 - 1": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "at most 100000000"),
    "one byte more": (GOOD + b"\0", f"byte {len(GOOD)}, it ends at byte {len(GOOD) + 1}"),
    "gap": (offsets(4, 8), "begins at 4, expected 0"),
    "overlap": (
        ref.build(f'{{"a":{U8},"b":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}', b"\0\0"),
        "expected 1",
    ),
    "end before begin": (offsets(4, 0), "before it begins"),
    "too few bytes for the shape": (one('{"dtype":"F32","shape":[1],"data_offsets":[0,1]}'), "want 4 bytes"),
    "half a byte": (one('{"dtype":"F4","shape":[3],"data_offsets":[0,1]}'), "whole bytes"),
    "shape of 2^64 elements": (one('{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,1]}'), "too large"),
    "shape of 2^65 and a zero": (
        one('{"dtype":"U8","shape":[36893488147419103232,0],"data_offsets":[0,0]}', b""),
        "2^64 or more",
    ),
    "offsets of 2^63": (offsets(0, 1 << 63), "want 4 bytes"),
    "the same name twice": (ref.build(f'{{"w":{U8},"w":{U8}}}', b"\0"), "occurs twice"),
    "the same name twice, once escaped": (ref.build(f'{{"w":{U8},"\\u0077":{U8}}}', b"\0"), "occurs twice"),
    "metadata twice": (ref.build(f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{U8}}}', b"\0"), "occurs twice"),
    "metadata key twice": (ref.build('{"__metadata__":{"a":"","a":""}}'), "occurs twice"),
    "metadata of a number": (ref.build('{"__metadata__":{"a":1}}'), "__metadata__"),
    "metadata that is a list": (ref.build('{"__metadata__":[]}'), "__metadata__"),
    "tensor as an array": (one('["U8",[1],[0,1]]'), "tensor 'w': expected '{'"),
    "member twice": (one('{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}'), "occurs twice"),
    "no dtype": (one('{"shape":[1],"data_offsets":[0,1]}'), "no dtype"),
    "no shape": (one('{"dtype":"U8","data_offsets":[0,1]}'), "no shape"),
    "no offsets": (one('{"dtype":"U8","shape":[1]}'), "no data_offsets"),
    "three offsets": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}'), "two numbers"),
    "no header text": (ref.build("   "), "expected '{'"),
    "an array": (ref.build("[]"), "expected '{'"),
    "something behind the object": (ref.build("{}{}"), "follows the end"),
    "a comma too many": (one(U8[:-1] + ",}"), "a name"),
    "a comment": (ref.build("{}//"), "follows the end"),
    "not UTF-8": (ref.build(b'{"\xff":' + U8.encode() + b"}", b"\0"), "UTF-8"),
    "a lone surrogate": (ref.build(f'{{"\\ud800":{U8}}}', b"\0"), "surrogate"),
    "a raw control character": (ref.build(b'{"\n":' + U8.encode() + b"}", b"\0"), "control character"),
    "braces": (ref.build("{" * 1000), "expected"),
    "brackets in a member": (one('{"x":' + "[" * 100_000 + "}"), "deeper"),
    "NUL bytes": (ref.build(b"{}\0\0"), "follows the end"),
}
for _number in ("-0", "-1", "1.0", "1e0", '"1"', "01", "+1", "null", "18446744073709551616", "NaN", "0x1"):
    REFUSED[f"offset {_number}"] = (offsets(0, _number), "data_offsets")
    REFUSED[f"dimension {_number}"] = (one(f'{{"dtype":"U8","shape":[{_number}],"data_offsets":[0,1]}}'), "shape")


def test_every_refused_input_has_the_error_that_says_why():
    for name, (data, words) in REFUSED.items():
        with pytest.raises(FormatError) as caught:
            TensorDeserializer(io.BytesIO(data), device="cpu")
        assert words in str(caught.value), name
        with pytest.raises(ref.BadFile):
            ref.read(data)


def test_what_the_reference_accepts_is_accepted():
    accepted = {
        "blanks around": ref.build(f' \t\r\n{{\n "w" : {U8} }}\n  ', b"\7"),
        "unknown members": one(
            '{"x":[{"y":[1.5e-3,-0,true,null]}],"dtype":"U8","shape":[1],"data_offsets":[0,1]}', b"\7"
        ),
        "escapes": ref.build(f'{{"\\u0077":{U8}}}', b"\7"),
        "127 containers in a member": one('{"x":' + "[" * 125 + "]" * 125 + "," + U8[1:], b"\7"),
    }
    for name, data in accepted.items():
        with TensorDeserializer(io.BytesIO(data), device="cpu") as found:
            assert found["w"].item() == 7, name
        assert ref.read(data).tensors["w"].data == b"\7"
        assert st.load(data)["w"].item() == 7, name


def test_a_file_cut_anywhere_says_so_with_both_sizes(tmp_path):
    data = saved({"w": torch.arange(40), "v": torch.ones(3)}, {"k": "v"})
    for nbytes in range(1, len(data)):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(data[:nbytes])
        with pytest.raises(TruncatedError) as caught:
            TensorDeserializer(path, device="cpu")
        assert str(nbytes) in str(caught.value)


def test_errors_cut_long_names_of_tensors_and_show_no_control_characters():
    name = "\\u001b[31m" + "n" * 100_000
    for body in ("3", '{"dtype":"U8" 3', '{"dtype":"U8","dtype":"U8"}', "{}"):
        with pytest.raises(FormatError) as caught:
            TensorDeserializer(io.BytesIO(ref.build(f'{{"{name}":{body}}}')), device="cpu")
        assert len(str(caught.value)) < 400
        assert "\x1b" not in str(caught.value)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
    path = tmp_path / "model.safetensors"
    path.write_text(pointer)
    with pytest.raises(FormatError, match="git-lfs pointer") as caught:
        TensorDeserializer(path, device="cpu")
    assert "sha256:4d7a214614ab2935c943f9e0ff69d22e" in str(caught.value)
    assert "12345" in str(caught.value)


def test_unknown_types_open_and_list_and_only_loading_them_fails():
    rows = {
        "known": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "newer": {"dtype": "F9_X", "shape": [4], "data_offsets": [2, 5]},
        "none": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [5, 8]},
        "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [8, 11]},
        "i4": {"dtype": "i4", "shape": [1], "data_offsets": [11, 15]},
    }
    data = ref.build(rows, bytes(range(15)))
    with TensorDeserializer(io.BytesIO(data), device="cpu", lazy_load=True) as found:
        assert list(found) == list(rows)
        assert [entry.shape for entry in found.entries()] == [tuple(row["shape"]) for row in rows.values()]
        assert found["known"].tolist() == [0, 1]
        for name, words in (("newer", "not known"), ("none", "no tensor"), ("odd", "even"), ("i4", "not known")):
            with pytest.raises(FormatError, match=words) as caught:
                found[name]
            assert repr(name) in str(caught.value)
    with TensorDeserializer(io.BytesIO(data), device="cpu", filter_func="known".__eq__) as found:
        assert list(found) == ["known"]


def test_a_key_for_a_safetensors_file_is_refused():
    with pytest.raises(CryptographyError, match="not encrypted"):
        TensorDeserializer(io.BytesIO(GOOD), device="cpu", encryption=DecryptionParams.from_key(bytes(32)))


def test_files_without_digests_say_that_they_store_none():
    index = _C.open_index(_C.PyFileSource(io.BytesIO(GOOD), "m"), 0, False)
    assert not index.stores_hashes
    with pytest.raises(MissingHashError, match="'w'"):
        TensorDeserializer(io.BytesIO(GOOD), device="cpu", verify_hash=True)
    with TensorDeserializer(io.BytesIO(GOOD), device="cpu", verify_hash=True, allow_missing_hashes=True) as found:
        assert found["w"].item() == 7
    other = io.BytesIO(samples.state_dict_bytes({"w": torch.ones(1)}))
    assert _C.open_index(_C.PyFileSource(other, "m"), 0, False).stores_hashes


def test_flipped_headers_are_judged_as_the_oracle_judges_them():
    generator = random.Random(5)
    base = bytearray(saved({"a.b": torch.ones(2), "c": torch.zeros(3, 1)}, {"k": "v"}))
    (nbytes,) = struct.unpack_from("<Q", base)
    for _ in range(3000):
        data = bytearray(base)
        for _ in range(generator.randint(1, 3)):
            data[generator.randrange(8, 8 + nbytes)] = generator.choice(b'{}[]",:0123456789\\ eU8F\n\xc3')
        data = bytes(data)
        try:
            wanted = ref.read(data)
        except ref.BadFile:
            with pytest.raises(FormatError):
                TensorDeserializer(io.BytesIO(data), device="cpu", lazy_load=True)
            continue
        with TensorDeserializer(io.BytesIO(data), device="cpu", lazy_load=True) as found:
            names = list(wanted.tensors)
            assert list(found)[: len(names)] == names  # aliases come behind
            assert found.metadata == (wanted.metadata or {})


def test_headers_of_99_mb_are_refused_quickly_and_in_memory_of_their_own_size(tmp_path, fresh_process):
    nbytes = 99_000_000
    for text in (b"{" * nbytes, b'{"a":' + b"[" * (nbytes - 5), b'{"' + b"a" * (nbytes - 2)):
        path = tmp_path / "hostile.safetensors"
        path.write_bytes(ref.build(text))
        program = (
            "import sys, resource, tensorizer, torch\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "try:\n    tensorizer.TensorDeserializer(sys.argv[1], device='cpu')\n"
            "except tensorizer.errors.FormatError: pass\n"
            "else: raise SystemExit('was read')\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        )
        result = fresh_process(program, path)
        assert result.returncode == 0, result.stderr
        assert int(result.stdout) < 2.2 * nbytes / 1024


# --- ties that only metadata tells of ---------------------------------------------------------------------------------


def test_names_that_a_saver_of_modules_dropped_share_the_tensor_it_kept():
    model = samples.net()
    state = {name: value for name, value in model.state_dict().items() if name not in ("head.weight",)}
    state = {name: value.clone() for name, value in state.items()}
    data = st.save(state, {"head.weight": "embed.weight", "format": "pt", "note": "embed.weight"})
    with TensorDeserializer(io.BytesIO(data), device="cpu") as found:
        assert found.ties == {"head.weight": "embed.weight"}
        assert found["head.weight"] is found["embed.weight"]
        assert "note" not in found
        assert list(found)[-1] == "head.weight"
    with TensorDeserializer(io.BytesIO(data), device="cpu", filter_func="head.weight".__eq__) as found:
        assert list(found) == ["head.weight"]
        assert same(found["head.weight"], model.embed.weight)


def test_metadata_that_only_looks_like_a_tie_is_none():
    content = {"a.weight": torch.ones(2), "b.weight": torch.zeros(2)}
    for key, value in (
        ("b.weight", "a.weight"),  # both are there
        ("c.weight", "x.weight"),  # the target is not
        ("best layer", "a.weight"),
        ("author", "a.weight"),
        ("c..weight", "a.weight"),
        ("", "a.weight"),
    ):
        with TensorDeserializer(io.BytesIO(st.save(content, {key: value})), device="cpu") as found:
            assert found.ties == {}
            assert len(found) == 2


def test_twenty_thousand_empty_tensors_at_one_offset_keep_the_order_of_the_header():
    rows = {f"n{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    with TensorDeserializer(io.BytesIO(ref.build(rows)), device="cpu", lazy_load=True) as found:
        assert list(found) == list(rows)
