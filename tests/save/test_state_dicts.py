"""write_state_dict and what comes back: nested mappings and sequences, flat dicts, lists, and what is refused."""

from __future__ import annotations

import collections
import io
import itertools
import re
import types

import numpy as np
import pytest
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, TensorSerializer, TensorType

STRUCTURES = {
    "flat": {"a": tensor(seed=1), "b.c": tensor(seed=2)},
    "nested": {"a": {"b": {"c": tensor()}}, "d": tensor(seed=1)},
    "list": [tensor(seed=1), tensor(seed=2)],
    "lists in lists": [[tensor(seed=1)], [tensor(seed=2), [tensor(seed=3)]]],
    "dict of lists": {"layers": [{"w": tensor(seed=i), "b": tensor((4,), seed=i)} for i in range(12)]},
    "list of dicts": [{"a": tensor()}, {"a": tensor(seed=1), "b": tensor(seed=2)}],
    "one tensor": {"a": tensor()},
    "one tensor in a list": [tensor()],
    "one deep tensor": {"a": [[{"b": [tensor()]}]]},
    "optimizer": {
        "state": {"0": {"step": torch.tensor(3.0), "exp_avg": tensor()}, "1": {"step": torch.tensor(4.0)}},
        "groups": [{"ids": torch.arange(3)}],
    },
}


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_structure_comes_back_from_tree(structure, lazy_load):
    data = state_dict_bytes(STRUCTURES[structure])
    assert_same(load(io.BytesIO(data), lazy_load=lazy_load, verify_hash=True), STRUCTURES[structure])


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
def test_mapping_access_shows_layers_as_proxies_with_integer_keys_for_lists(lazy_load):
    wanted = STRUCTURES["dict of lists"]
    deserializer = TensorDeserializer(io.BytesIO(state_dict_bytes(wanted)), device="cpu", lazy_load=lazy_load)
    layers = deserializer["layers"]
    assert isinstance(layers, types.MappingProxyType)
    assert list(layers) == list(range(12))
    assert isinstance(layers[3], types.MappingProxyType)
    assert list(layers[3]) == ["w", "b"]
    assert samples.same(layers[3]["w"], wanted["layers"][3]["w"])
    assert deserializer["layers"][3]["w"] is layers[3]["w"]
    assert deserializer["layers"] is not layers
    assert deserializer.tree()["layers"][3]["w"] is layers[3]["w"]
    assert layers == {i: dict(layer) for i, layer in enumerate(deserializer.tree()["layers"])}
    deserializer.close()


def test_the_order_is_depth_first_in_iteration_order_and_type_and_index_are_fixed():
    data = state_dict_bytes({"b": [tensor(), {"z": tensor(), "y": tensor()}], "a": tensor()})
    with TensorDeserializer(io.BytesIO(data), device="cpu") as deserializer:
        found = [(idx, kind, name) for idx, kind, name, _ in deserializer.read_tensors()]
    names = [("b", 0), ("b", 1, "z"), ("b", 1, "y"), "a"]
    assert found == [(0, TensorType.STATE_DICT, name) for name in names]
    assert all(type(name) in (str, tuple) for _, _, name in found)


def test_other_mappings_and_sequences_come_back_as_dicts_and_lists():
    one, two = tensor(seed=1), tensor(seed=2)
    pairs = {
        "tuple": ((one, two), [one, two]),
        "ordered": (collections.OrderedDict(z=one, a=two), {"z": one, "a": two}),
        "proxy": (types.MappingProxyType({"k": one}), {"k": one}),
        "user dict": (collections.UserDict(k=one), {"k": one}),
        "user list": (collections.UserList([one, two]), [one, two]),
        "named": (collections.namedtuple("Named", "x y")(one, two), [one, two]),
        "parameter": (torch.nn.Parameter(one), one),
    }
    found = load(io.BytesIO(state_dict_bytes({name: written for name, (written, _) in pairs.items()})))
    assert_same(found, {name: wanted for name, (_, wanted) in pairs.items()})
    assert all(type(found[name]) is type(wanted) for name, (_, wanted) in pairs.items() if name != "parameter")


def test_empty_containers_leave_no_trace_but_a_warning():
    structure = {"a": {}, "b": [], "c": {"d": [[], {}]}, "e": tensor(), "f": [(), tensor(seed=1)]}
    stream = samples.KeptBytesIO()
    with TensorSerializer(stream) as serializer, pytest.warns(UserWarning, match="f/0") as caught:
        serializer.write_state_dict(structure)
    (warning,) = caught
    assert "a, b, c/d/0, c/d/1, f/0" in str(warning.message)
    assert warning.filename == __file__
    assert_same(load(io.BytesIO(stream.getvalue())), {"e": tensor(), "f": [tensor(seed=1)]})


NO_TENSORS = [1.0, 3, None, "text", b"b", "", {1, 2}, np.ones(2), object(), iter([]), (x for x in ()), torch.float32]
NO_CONTAINERS = [tensor(), "text", b"", 3, None, iter([tensor()]), {tensor()}]
REFUSED = [
    *({"a": leaf} for leaf in NO_TENSORS),
    *([tensor(), [leaf]] for leaf in NO_TENSORS),
    *({"fine": tensor(), "inner": {key: tensor()}} for key in (0, 1.5, None, ("a",), b"a")),
    *NO_CONTAINERS,
]


@pytest.mark.parametrize("structure", REFUSED, ids=lambda structure: re.sub(r" at 0x\w+", "", repr(structure))[:40])
def test_a_structure_of_anything_but_tensors_under_strings_is_a_type_error(structure):
    with TensorSerializer(io.BytesIO()) as serializer, pytest.raises(TypeError):
        serializer.write_state_dict(structure)


def test_a_structure_that_contains_itself_is_an_error_and_not_a_hang():
    knot: dict = {"a": tensor()}
    knot["self"] = knot
    with TensorSerializer(io.BytesIO()) as serializer, pytest.raises((ValueError, TypeError)):
        serializer.write_state_dict(knot)


def test_a_structure_may_be_deeper_than_the_recursion_limit():
    depth = 3000
    structure: dict = {"leaf": tensor()}
    for _ in range(depth):
        structure = {"d": structure}
    data = state_dict_bytes(structure)
    with TensorDeserializer(io.BytesIO(data), device="cpu") as deserializer:
        ((_, _, name, found),) = deserializer.read_tensors()
    assert name == ("d",) * depth + ("leaf",)
    assert samples.same(found, tensor())


def test_a_state_dict_of_a_module_goes_back_into_the_module():
    model = samples.net(seed=1)
    data = state_dict_bytes(model.state_dict())
    target = samples.net(seed=2)
    with TensorDeserializer(io.BytesIO(data), device="cpu") as deserializer:
        assert list(deserializer) == list(model.state_dict())
        target.load_state_dict(deserializer)
    assert_same(dict(target.state_dict()), dict(model.state_dict()))


# --- tree -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def nested(request):
    structure = {
        "m": {"layers": [{"w": tensor(seed=i), "b": tensor((2,), seed=i)} for i in range(4)], "x": tensor(seed=9)},
        "n": tensor(seed=10),
    }
    stream = io.BytesIO(state_dict_bytes(structure))
    with TensorDeserializer(stream, device="cpu", lazy_load=request.param) as deserializer:
        yield deserializer, structure


def test_tree_takes_a_prefix(nested):
    deserializer, structure = nested
    assert_same(deserializer.tree(("m",)), structure["m"])
    assert_same(deserializer.tree(["m", "layers"]), structure["m"]["layers"])
    assert_same(deserializer.tree(iter(("m", "layers", 2))), structure["m"]["layers"][2])
    assert_same(deserializer.tree(("m", "layers", 2, "w")), structure["m"]["layers"][2]["w"])
    assert_same(deserializer.tree(()), structure)
    assert_same(deserializer.tree(None), structure)
    assert deserializer.tree(("n",)) is deserializer["n"]


def test_a_prefix_that_matches_nothing_gives_the_default_and_a_bare_key_is_a_type_error(nested):
    deserializer, _ = nested
    marker = object()
    for prefix in (("q",), ("m", "q"), ("m", "layers", 9), ("m", "layers", "0"), ("n", "q"), (0,)):
        assert deserializer.tree(prefix) is None
        assert deserializer.tree(prefix, default=marker) is marker
    for bare in ("m", 3):
        with pytest.raises(TypeError):
            deserializer.tree(bare)


def test_tree_filters_by_full_path_and_closes_up_lists(nested):
    deserializer, structure = nested
    seen = []

    def keep(path):
        seen.append(path)
        return path[-1] == "w" and path[2] % 2 == 1

    found = deserializer.tree(("m", "layers"), filter_func=keep)
    layers = structure["m"]["layers"]
    assert_same(found, [{"w": layers[1]["w"]}, {"w": layers[3]["w"]}])
    assert seen == [("m", "layers", i, key) for i, key in itertools.product(range(4), ("w", "b"))]
    assert deserializer.tree(("m", "layers"), filter_func=lambda path: False, default="nothing") == "nothing"


def test_tree_gives_fresh_containers_and_the_same_tensors(nested):
    deserializer, _ = nested
    one, two = deserializer.tree(), deserializer.tree()
    assert one is not two
    assert one["m"] is not two["m"]
    assert type(one) is dict
    assert type(one["m"]["layers"]) is list
    assert one["m"]["x"] is two["m"]["x"]
    assert one["n"] is deserializer["n"]


def test_parts_may_be_loaded_in_any_order(nested):
    deserializer, structure = nested
    assert_same(deserializer.tree(("m", "x")), structure["m"]["x"])
    assert_same(deserializer["n"], structure["n"])
    assert_same(deserializer.tree(("m", "layers", 0)), structure["m"]["layers"][0])
    assert_same(deserializer["m"]["layers"][0]["w"], structure["m"]["layers"][0]["w"])
    assert_same(deserializer.tree(), structure)


def test_what_the_filter_removed_leaves_the_numbers_of_lists_and_no_error_for_an_emptied_branch():
    data = state_dict_bytes({"a": {"b": tensor()}, "c": [tensor(seed=i) for i in range(4)]})
    wanted = {("c", 0), ("c", 2), ("c", 3)}
    with TensorDeserializer(io.BytesIO(data), device="cpu", filter_func=wanted.__contains__) as deserializer:
        assert list(deserializer["c"]) == [0, 2, 3]
        assert_same(deserializer.tree(), {"c": [tensor(seed=0), tensor(seed=2), tensor(seed=3)]})
        assert samples.same(deserializer["c"][2], tensor(seed=2))
        assert len(deserializer.get("a", {})) == 0
        for missing in (lambda: deserializer["a"]["b"], lambda: deserializer["c"][1]):
            with pytest.raises(KeyError):
                missing()
