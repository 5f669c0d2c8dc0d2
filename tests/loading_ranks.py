"""Programs for ``fresh_process``: ranks that load one file."""

from __future__ import annotations

import functools
import io
import itertools
import sys
import time
from pathlib import Path
from typing import Optional

import pytest
import samples
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tensorizer.distributed as td
from tensorizer import AuthenticationError, DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer
from tensorizer.distributed import _exchange, _loading
from tensorizer.errors import CryptographyError, HashMismatchError, LoadError, StreamError
from tensorizer.torch import load_model, save_file, save_model

assert td.load, td.load_sharded  # imported now, once for all ranks

KEY = b"k" * 32
EXCHANGES = ("none", "all_gather")


def tensors_of(seed: int = 0) -> dict[str, torch.Tensor]:
    shapes = {
        "w": (37, 20),
        "b": (5,),
        "scalar": (),
        "none": (0, 3),
        "big": (300, 256),
        "one": (1, 7),
        "cube": (4, 6, 8),
        "row": (1, 1, 3000),
        "deep": (3, 2, 700),
    }
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.int64])
    return {name: samples.tensor(shape, dtype, (seed, name)) for (name, shape), dtype in zip(shapes.items(), dtypes)}


def same_everywhere(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert samples.same(found[name], tensor), name


def raised(kind: type, text: str, call, *arguments, **options) -> None:
    """Every rank raises it, long before any watchdog."""
    begin = time.monotonic()
    with pytest.raises(kind, match=text):
        call(*arguments, **options)
    assert time.monotonic() - begin < 60  # not until a time limit of gloo
    dist.barrier()


# ---- whole tensors ----


def load_whole(folder: Path) -> None:
    expected = tensors_of()
    samples.write_state_dict(folder / "plain", expected)
    samples.write_state_dict(folder / "secret", expected, encryption=EncryptionParams(KEY))
    save_file(expected, folder / "m.safetensors")
    key = DecryptionParams.from_key(KEY)
    nbytes = sum(t.numel() * t.element_size() for t in expected.values())

    def work(rank: int) -> None:
        ranks = dist.get_world_size()
        for exchange, slot in [("none", None), ("auto", None), ("all_gather", 16 << 20), ("all_gather", 1024)]:
            _exchange._SLOT_NBYTES = slot or 16 << 20
            for file, options in [("plain", {}), ("secret", {"encryption": key}), ("m.safetensors", {})]:
                found = td.load(folder / file, device="cpu", exchange=exchange, **options)
                same_everywhere(found, expected)
                report = found.report
                assert len(report.ranks) == ranks
                assert report.rank == rank
                if exchange == "all_gather" and file != "secret":
                    opened = TensorDeserializer(folder / file, device="cpu", lazy_load=True)
                    read = sum(part.bytes_read - opened.total_bytes_read for part in report.ranks)
                    opened.close()
                    assert nbytes <= read <= nbytes + ranks * 8192, (read, nbytes)
                    assert report.bytes_received <= nbytes
                    assert sum(part.bytes_received for part in report.ranks) == (ranks - 1) * nbytes
        for exchange in EXCHANGES:
            same_everywhere(td.load(folder / "plain", device="cpu", exchange=exchange, verify_hash=True), expected)
        half = td.load(folder / "plain", device="cpu", dtype=torch.float16, exchange="all_gather")
        assert samples.same(half["w"], expected["w"].half())
        pair = dist.new_group([0, 1])  # a part of the ranks
        if rank < 2:
            same_everywhere(td.load(folder / "plain", pair, "cpu", "all_gather"), expected)
        # an error of one rank is an error of all
        (folder / "other").write_bytes((folder / "plain").read_bytes())
        dist.barrier()
        mine = folder / ("other" if rank == 1 else "plain")
        raised(StreamError, "read different files", td.load, mine, device="cpu", exchange="all_gather")
        gone = folder / ("gone" if rank == 1 else "plain")
        raised(OSError, "gone", td.load, gone, device="cpu")
        wrong = DecryptionParams.from_key(b"x" * 32 if rank == 1 else KEY)
        for exchange in EXCHANGES:
            raised(CryptographyError, "", td.load, folder / "secret", None, "cpu", exchange, encryption=wrong)
        raised(ValueError, "exchange", td.load, folder / "plain", exchange="broadcast")
        raised(ValueError, "exchange", td.load, folder / "plain", exchange="none" if rank else "broadcast")
        raised(
            TypeError, "target: expected a Module or MutableMapping", td.load_sharded, 5, folder / "plain", device="cpu"
        )
        raised(TypeError, "plan: expected a Mapping", td.load_sharded, {}, folder / "plain", plan=7, device="cpu")

    for ranks in (2, 3):
        run_ranks(ranks, work)


def load_on_eight_ranks(folder: Path) -> None:
    """Whole, by rows and by columns, of which some ranks have none; each byte comes from storage once."""
    shapes = {"w": (64, 512), "uneven": (70, 300), "few": (5, 2048), "v": (3,), "none": (0, 8)}
    expected = {name: samples.tensor(shape, torch.float32, name).nan_to_num() for name, shape in shapes.items()}
    samples.write_state_dict(folder / "f", expected)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    with TensorDeserializer(folder / "f", device="cpu", lazy_load=True) as d:
        index = d.total_bytes_read

    def work(rank: int) -> None:
        ranks = dist.get_world_size()

        def read(report) -> int:
            assert len(report.ranks) == ranks
            return sum(part.bytes_read - index for part in report.ranks)

        mesh = init_device_mesh("cpu", (ranks,))
        for exchange in EXCHANGES:
            found = td.load(folder / "f", device="cpu", exchange=exchange)
            same_everywhere(found, expected)
            times = 1 if exchange == "all_gather" else ranks
            assert times * nbytes <= read(found.report) <= times * 1.05 * nbytes + ranks * 8192
            for dim in (0, 1):
                names = [name for name, tensor in expected.items() if tensor.numel() and tensor.dim() > dim]
                state = dict.fromkeys(names)
                report = td.load_sharded(state, folder / "f", mesh=mesh, plan={"*": Shard(dim)}, exchange=exchange)
                for name in names:
                    wanted = distribute_tensor(expected[name], mesh, [Shard(dim)])
                    assert samples.same(state[name].to_local(), wanted.to_local()), (name, exchange, dim)
                if dim == 0 or exchange == "all_gather":
                    assert read(report) <= 1.05 * nbytes + ranks * 8192

    for ranks in (4, 8):
        run_ranks(ranks, work)


def load_a_single_row(folder: Path) -> None:
    """Fused experts and position embeddings are tensors of few rows, or one, each larger than a window."""
    expected = {"few": torch.rand(2, 3, 50_000), "one": torch.rand(1, 1, 200_000)}
    samples.write_state_dict(folder / "f", expected)
    _exchange._SLOT_NBYTES = 1 << 16
    nbytes = sum(tensor.nbytes for tensor in expected.values())

    def work(rank: int) -> None:
        ranks = dist.get_world_size()
        found = td.load(folder / "f", device="cpu", exchange="all_gather")
        same_everywhere(found, expected)
        assert all(part.bytes_read <= nbytes / ranks + (1 << 16) + 8192 for part in found.report.ranks)
        state = {"few": None}
        td.load_sharded(state, folder / "f", plan={"few": Shard(2)}, device="cpu", exchange="all_gather")
        assert samples.same(state["few"], expected["few"].chunk(ranks, 2)[rank])

    run_ranks(3, work)


def fail_in_the_middle(folder: Path) -> None:
    expected = tensors_of()
    samples.write_state_dict(folder / "f", expected)
    _exchange._SLOT_NBYTES = 1024
    get_slices = _loading.get_slices

    def work(rank: int) -> None:
        for exchange, at in [("all_gather", 0), ("all_gather", 1), ("all_gather", 7), ("none", 0)]:
            calls = itertools.count()

            def failing(*arguments, at=at, calls=calls, **options):
                if rank == 1 and next(calls) == at:
                    raise StreamError("the cable is cut")
                return get_slices(*arguments, **options)

            _loading.get_slices = _exchange.get_slices = failing
            raised(StreamError, "the cable is cut", td.load, folder / "f", device="cpu", exchange=exchange)
        _loading.get_slices = _exchange.get_slices = get_slices
        same_everywhere(td.load(folder / "f", device="cpu", exchange="all_gather"), expected)
        differing = {"device": "cpu", "verify_hash": rank == 1}
        raised(ValueError, r"same on all ranks, found \[False, True\]", td.load, folder / "f", **differing)
        dtype = torch.float16 if rank else None
        raised(ValueError, "dtype: expected the same", td.load, folder / "f", None, "cpu", "all_gather", dtype=dtype)
        raised(ValueError, "same on all ranks", td.load_sharded, {"big": None}, folder / "f", strict=False, **differing)
        # a byte that is wrong in the file is found by whoever verifies it
        with TensorDeserializer(folder / "f", device="cpu", lazy_load=True) as d:
            offset = next(entry.data_offset for entry in d.entries() if entry.name == "big")
        dist.barrier()
        if rank == 0:
            with (folder / "f").open("r+b") as file:
                file.seek(offset + 5)
                byte = file.read(1)
                file.seek(offset + 5)
                file.write(bytes([byte[0] ^ 1]))
        dist.barrier()
        raised(HashMismatchError, "big", td.load, folder / "f", None, "cpu", "all_gather", verify_hash=True)

    run_ranks(2, work)


def load_what_is_signed(folder: Path) -> None:
    """A hash speaks for a whole tensor: a rank that wants a signature reads all that it gets itself."""
    expected = tensors_of()
    signer, other = SigningKey.generate(), SigningKey.generate()
    samples.write_state_dict(folder / "f", expected, signing_key=signer)
    changed = bytearray((folder / "f").read_bytes())
    with TensorDeserializer(folder / "f", device="cpu", lazy_load=True) as d:
        changed[next(entry.data_offset for entry in d.entries() if entry.name == "big")] ^= 1
    (folder / "changed").write_bytes(changed)

    def work(rank: int) -> None:
        for mine in (signer.public_key, signer.public_key if rank else None):
            asked = {"device": "cpu", "exchange": "all_gather", "public_key": mine}
            found = td.load(folder / "f", **asked)
            same_everywhere(found, expected)
            assert (found.report.exchange, found.report.bytes_received) == ("none", 0)
            rows = {"big": None}
            report = td.load_sharded(rows, folder / "f", plan={"big": Shard(0)}, **asked, strict=False)
            assert report.exchange == "none"
            assert samples.same(rows["big"], expected["big"].chunk(2)[rank])
            raised(HashMismatchError, "big", td.load, folder / "changed", **asked)
            raised(HashMismatchError, "big", td.load_sharded, {"big": None}, folder / "changed", **asked, strict=False)
        asked["public_key"] = other.public_key if rank else None
        raised(AuthenticationError, "", td.load, folder / "f", **asked)

    run_ranks(2, work)


# ---- parts ----


def load_parts(folder: Path) -> None:
    expected = {
        name: samples.tensor(shape, torch.float32, name).nan_to_num()
        for name, shape in {"w": (10, 6), "row": (8, 300), "few": (2, 4), "v": (7,), "s": ()}.items()
    }
    samples.write_state_dict(folder / "f", expected)

    def work(rank: int) -> None:
        ranks = dist.get_world_size()
        meshes = [(init_device_mesh("cpu", (ranks,)), [(Shard(0),), (Shard(1),), (Replicate(),)])]
        if ranks == 4:
            pairs = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(0), Shard(0))]
            meshes.append((init_device_mesh("cpu", (2, 2)), pairs))
        for exchange in EXCHANGES:
            for mesh, all_placements in meshes:
                for placements in all_placements:
                    fits = {
                        n: t for n, t in expected.items() if all(getattr(p, "dim", -1) < t.dim() for p in placements)
                    }
                    wanted = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in fits.items()}
                    in_place = {
                        name: distribute_tensor(t.new_zeros(t.shape), mesh, placements) for name, t in fits.items()
                    }
                    locals_ = {name: value.to_local() for name, value in in_place.items()}
                    report = td.load_sharded(in_place, folder / "f", exchange=exchange)
                    assert report.exchange == exchange
                    new = dict.fromkeys(fits)
                    td.load_sharded(new, folder / "f", mesh=mesh, plan={"*": placements}, exchange=exchange)
                    for name, value in wanted.items():
                        assert samples.same(in_place[name].to_local(), value.to_local()), (name, placements)
                        assert locals_[name].data_ptr() == in_place[name].to_local().data_ptr()
                        assert isinstance(new[name], DTensor)
                        assert new[name].placements == value.placements
                        assert samples.same(new[name].to_local(), value.to_local()), (name, placements)
                        assert samples.same(new[name].full_tensor(), expected[name])
            plain = dict.fromkeys(expected)
            td.load_sharded(plain, folder / "f", plan={"row": Shard(1), "w": Shard(0)}, exchange=exchange)
            columns = expected["row"].chunk(ranks, 1)
            assert samples.same(plain["row"], columns[rank].contiguous())
            assert samples.same(plain["v"], expected["v"])
            rows = -(-10 // ranks)
            assert samples.same(plain["w"], expected["w"][rank * rows : (rank + 1) * rows])
        own = {"row": None} if rank else {"w": None, "v": None}  # stages of a pipeline
        for exchange in EXCHANGES:
            mine = dict(own)
            td.load_sharded(mine, folder / "f", exchange=exchange)
            same_everywhere(mine, {name: expected[name] for name in own})
        mesh = meshes[0][0]
        partial = {"w": DTensor.from_local(torch.zeros(10, 6), mesh, [Partial()], run_check=False)}
        raised(ValueError, "expected Shard or Replicate", td.load_sharded, partial, folder / "f")
        raised(LoadError, "missing", td.load_sharded, {"x": None}, folder / "f")
        bad = {"w": torch.zeros(10, 6) if rank else torch.zeros(3, 3)}
        raised(LoadError, "expected the shape", td.load_sharded, bad, folder / "f")
        shards = {"w": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)])}
        raised(ValueError, "part cannot be verified", td.load_sharded, shards, folder / "f", verify_hash=True)

    for ranks in (3, 4):
        run_ranks(ranks, work)


def load_names_of_one_tensor(folder: Path) -> None:
    """Names that share a tensor in the file get it all, whole and in other parts, however the bytes come."""
    shared = torch.arange(1.0, 9.0).reshape(4, 2)
    save_file({"embed": shared, "head": shared, "other": shared + 1}, folder / "m.tensors")

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for exchange in ("none", "all_gather", "auto"):
            whole: dict = {"embed": None, "head": None, "other": None}
            td.load_sharded(whole, folder / "m.tensors", device="cpu", exchange=exchange)
            assert all(torch.equal(whole[name], shared + (name == "other")) for name in whole), (exchange, whole)
            parts: dict = {"embed": None, "head": None}
            plan = {"head": Shard(0), "embed": Replicate()}
            td.load_sharded(parts, folder / "m.tensors", mesh=mesh, plan=plan, device="cpu", exchange=exchange)
            assert all(torch.equal(found.full_tensor(), shared) for found in parts.values()), exchange

    run_ranks(2, work)


def read_only_the_shards(folder: Path) -> None:
    tensors = {f"t{i}": samples.tensor((512, 64 * (i + 1)), torch.float32, i) for i in range(4)}
    samples.write_state_dict(folder / "f", tensors)
    nbytes = sum(t.numel() * 4 for t in tensors.values())

    def work(rank: int) -> None:
        with TensorDeserializer(folder / "f", device="cpu", lazy_load=True) as d:
            index = d.total_bytes_read
        for exchange, dim in [("none", 0), ("none", 1), ("all_gather", 1)]:
            report = td.load_sharded(dict.fromkeys(tensors), folder / "f", plan={"*": Shard(dim)}, exchange=exchange)
            read = sum(part.bytes_read - index for part in report.ranks)
            least = 1.0 if dim == 0 or exchange == "all_gather" else 0.99
            assert least * nbytes <= read, (exchange, dim, read, nbytes)
            if dim == 0 or exchange == "all_gather":
                assert read <= 1.05 * nbytes, (exchange, dim, read, nbytes)

    run_ranks(2, work)


# ---- modules ----


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 48)
        self.down = torch.nn.Linear(48, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def load_modules(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    reference = Model()
    samples.write_module(folder / "m", reference)
    x = torch.arange(6).reshape(2, 3)
    expected = reference(x).detach()

    def sharded(model, mesh, tensor_parallel, fsdp):
        if tensor_parallel:
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for tensor_parallel, fsdp in [(False, True), (True, False), (True, True)]:
            for on_meta in (True, False):
                torch.manual_seed(4)
                with torch.device("meta" if on_meta else "cpu"):
                    model = Model()
                sharded(model, mesh, tensor_parallel, fsdp)
                for exchange in EXCHANGES:
                    report = td.load_sharded(model, folder / "m", exchange=exchange, device="cpu")
                    assert not report.missing
                    assert not report.unexpected
                    for name, value in model.state_dict().items():
                        full = value.full_tensor() if isinstance(value, DTensor) else value
                        assert samples.same(full.detach(), reference.state_dict()[name]), name
                found = model(x)
                assert torch.allclose(found, expected, atol=1e-5), (tensor_parallel, fsdp, on_meta)
                assert all(p.requires_grad for p in model.parameters())
        older = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
        td.load_sharded(older, folder / "m", device="cpu")
        for name, value in older.state_dict().items():  # which are copies
            assert samples.same(value, reference.state_dict()[name]), name

    run_ranks(4, work)


def give_whole_tensors(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    samples.write_module(folder / "m", model)
    save_model(model, folder / "f")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def load_into_module() -> None:
        TensorDeserializer(folder / "m", device="cpu").load_into_module(model)

    def work(rank: int) -> None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        for load in (load_into_module, lambda: load_model(model, folder / "f")):
            with pytest.raises(NotImplementedError, match=r"'embed\.weight' is a DTensor .*load_sharded"):
                load()
        for name, parameter in model.named_parameters():
            assert samples.same(parameter.full_tensor().detach(), before[name])

    run_ranks(2, work)


class Turned(torch.nn.Module):
    """A buffer that state dicts leave out, one with an empty place, and two names of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.embed.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.embed.register_buffer("none", None, persistent=False)
        self.head = torch.nn.Linear(4, 8)
        self.head.weight = self.embed.weight
        self.head.weight.requires_grad_(False)


def load_what_state_dicts_call_otherwise(folder: Path) -> None:
    torch.manual_seed(5)
    bare, reference = torch.nn.Linear(6, 4), Turned()
    reference.embed.angles += 1
    samples.write_module(folder / "bare", bare)
    samples.write_module(folder / "module", reference)
    state = reference.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    samples.write_state_dict(folder / "state", kept)
    for left_out in ("embed.weight", "head.weight"):  # as hubs have tied models
        hub = {name: tensor for name, tensor in kept.items() if name != left_out}
        save_file(hub, folder / f"{left_out}.safetensors")
    differing = {**kept, "head.weight": kept["head.weight"].index_fill(0, torch.tensor([7]), 3.0)}  # the last row alone
    samples.write_state_dict(folder / "differing", differing)
    samples.write_state_dict(folder / "shapes", {**kept, "head.weight": torch.zeros(9, 4)})

    def made(kind, on_meta: bool):
        with torch.device("meta" if on_meta else "cpu"):
            return kind()

    def check(exchange: str, on_meta: bool) -> None:
        load = functools.partial(td.load_sharded, exchange=exchange, device="cpu")
        model = made(lambda: torch.nn.Linear(6, 4), on_meta)
        report = load(model, folder / "bare")
        assert (report.missing, report.unexpected) == ((), ())
        same_everywhere(model.state_dict(), bare.state_dict())
        for file in ("module", "state", "embed.weight.safetensors", "head.weight.safetensors"):
            model = made(Turned, on_meta)
            angles = model.embed.angles
            report = load(model, folder / file)
            assert (report.missing, report.unexpected) == ((), ()), file
            same_everywhere(model.state_dict(), state)
            assert model.head.weight is model.embed.weight, file
            assert isinstance(model.head.weight, torch.nn.Parameter)
            assert not model.head.weight.requires_grad
            assert model.head.bias.requires_grad
            if file == "module":
                assert samples.same(model.embed.angles, reference.embed.angles)
                assert "embed.angles" not in model.state_dict()
            else:
                assert model.embed.angles is angles
            assert model.embed.none is None
        model = made(Turned, on_meta)
        raised(LoadError, "conflicting values for 'head.weight'", load, model, folder / "differing")
        load(model, folder / "differing", strict=False)
        assert samples.same(model.head.weight.detach(), state["embed.weight"])

    def work(rank: int) -> None:
        for exchange, on_meta in itertools.product(EXCHANGES, (True, False)):
            check(exchange, on_meta)
        # a plan may name any of the names of a tensor
        mesh = init_device_mesh("cpu", (2,))
        for name in ("embed.weight", "head.weight"):
            model = made(Turned, True)
            td.load_sharded(model, folder / "head.weight.safetensors", mesh=mesh, plan={name: Shard(0)}, device="cpu")
            assert model.head.weight is model.embed.weight
            assert samples.same(model.head.weight.to_local().detach(), state[name][4 * rank : 4 * rank + 4])
            model = made(Turned, True)
            load = functools.partial(td.load_sharded, model, mesh=mesh, plan={name: Shard(0)}, device="cpu")
            text = "conflicting values for 'head.weight', which is one tensor with 'embed.weight'"
            raised(LoadError, text, load, folder / "differing")  # one rank has the row that differs
            raised(LoadError, "expected the shape .*8, 4.*got .*9, 4", load, folder / "shapes")
            load(folder / "differing", strict=False)
            assert samples.same(model.head.weight.to_local().detach(), state["embed.weight"][4 * rank : 4 * rank + 4])
        # values of a mapping are what is replaced: one value for two names is not one tensor
        place = torch.empty(0)
        found = {"weight": place, "bias": place}
        plan = {"weight": Shard(0), "bias": Replicate()}
        td.load_sharded(found, folder / "bare", plan=plan, device="cpu")
        assert samples.same(found["weight"], bare.weight.detach()[2 * rank : 2 * rank + 2])
        assert samples.same(found["bias"], bare.bias.detach())
        raised(LoadError, "missing in the file: 'x'.*unexpected: 'weight'", td.load_sharded, Named(), folder / "bare")

    run_ranks(2, work)


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(2))
        self.bias = torch.nn.Parameter(torch.zeros(4))


def verify_what_is_converted(folder: Path) -> None:
    """Where one rank converts, all raise, and nothing is filled."""
    expected = {"w": torch.arange(4.0), "v": torch.ones(3)}
    save_file(expected, folder / "m.tensors")

    def work(rank: int) -> None:
        for exchange in EXCHANGES:
            load = functools.partial(td.load_sharded, exchange=exchange, device="cpu", verify_hash=True)
            state = {"w": torch.zeros(4, dtype=torch.float16 if rank else torch.float32), "v": torch.zeros(3)}
            mine = dict(state)
            text = "converted tensors have no stored hash: 'w' .*expected torch.float16, got torch.float32"
            raised(ValueError, text, load, mine, folder / "m.tensors")
            assert all(mine[name] is value for name, value in state.items())
            model = Pair(torch.float16 if rank else torch.float32)
            raised(ValueError, text, load, model, folder / "m.tensors")
            assert not any(value.any() for value in model.state_dict().values())
            load(dict.fromkeys(expected), folder / "m.tensors")
            load(Pair(torch.float32), folder / "m.tensors")

    run_ranks(2, work)


class Pair(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(4, dtype=dtype))
        self.register_buffer("v", torch.zeros(3))


class Stateful(torch.nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(5.0)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


def load_parts_of_extra_state(folder: Path) -> None:
    model = torch.nn.Sequential(Stateful(), torch.nn.Linear(2, 2))
    wanted = torch.arange(5.0).chunk(2)
    for file in ("m.tensors", "m.safetensors"):
        save_model(model, folder / file)

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for file, exchange in itertools.product(("m.tensors", "m.safetensors"), EXCHANGES):
            load = functools.partial(td.load_sharded, file=folder / file, exchange=exchange, device="cpu")
            name = "0._extra_state"
            plain = {name: None, "1.bias": None}
            load(plain, plan={name: Shard(0)})
            assert samples.same(plain[name], wanted[rank])
            new = {name: None, "1.bias": None}
            load(new, mesh=mesh, plan={name: Shard(0)})
            assert samples.same(new[name].to_local(), wanted[rank])
            in_place = {name: distribute_tensor(torch.zeros(5), mesh, [Shard(0)])}
            local = in_place[name].to_local()
            load(in_place)
            assert samples.same(local, wanted[rank])
            wrong = {name: distribute_tensor(torch.zeros(6), mesh, [Shard(0)])}
            raised(LoadError, f"{file}.*expected the shape .6., got .5.", load, wrong)

    run_ranks(2, work)


class FailingFile(io.RawIOBase):
    """A file whose read number `fails_at` fails."""

    def __init__(self, path: Path, fails_at: Optional[int]) -> None:
        self.file, self.left = path.open("rb"), fails_at
        self.has_failed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer) -> int:
        if self.left == 0:
            self.has_failed = True
            raise OSError("this disk is broken")
        if self.left is not None:
            self.left -= 1
        return self.file.readinto(buffer)

    def close(self) -> None:
        self.file.close()
        super().close()


def fail_at_every_read_of_one_rank(folder: Path) -> None:
    """Also where shapes are in record headers alone, as of scalars in files of data version 1."""
    state = {**tensors_of(), "meta": torch.zeros((), device="meta"), "tied": tensors_of()["w"]}
    path = samples.write_state_dict(folder / "f.tensors", state)

    def work(rank: int) -> None:
        def whole(exchange: str, file: FailingFile) -> None:
            td.load(file, exchange=exchange, device="cpu")

        def sharded(exchange: str, file: FailingFile) -> None:
            target = {"w": None, "big": None, "tied": None, "scalar": None}
            td.load_sharded(target, file, exchange=exchange, plan={"w": Shard(0), "big": Shard(1)}, device="cpu")

        def verified(exchange: str, file: FailingFile) -> None:
            td.load(file, exchange=exchange, device="cpu", verify_hash=True)

        for load, exchange in itertools.product((whole, sharded, verified), EXCHANGES):
            for fails_at in itertools.count():
                file = FailingFile(path, fails_at if rank == 1 else None)
                failed = [False, False]
                try:
                    load(exchange, file)
                except OSError as error:
                    names_it = rank == 1 or "rank 1" in str(error)
                    failed[rank] = names_it and "this disk is broken" in str(error)
                every = [None, None]
                dist.all_gather_object(every, (failed[rank], file.has_failed))
                (first, _), (second, broke) = every
                assert first == second == broke, (load.__name__, exchange, fails_at, every)
                if not broke:
                    break
            assert fails_at > 3

    run_ranks(2, work)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
