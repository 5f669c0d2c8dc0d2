"""tensorizer.utils: sizes, memory snapshots that know the container, and models without allocation."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import psutil
import pytest
import torch

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, utils
from tensorizer._system import cgroup
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from tensorizer.utils import (
    CPUMemoryUsage,
    GlobalGPUMemoryUsage,
    MemoryUsage,
    TorchGPUMemoryUsage,
    convert_bytes,
    get_device,
    get_gpu_name,
    get_mem_usage,
    no_init_or_tensor,
)

MIB = 1 << 20
GIB = 1 << 30


def test_the_public_names_are_those_of_the_specification():
    assert utils.__all__ == [
        "convert_bytes",
        "get_device",
        "GlobalGPUMemoryUsage",
        "TorchGPUMemoryUsage",
        "CPUMemoryUsage",
        "MemoryUsage",
        "get_mem_usage",
        "get_gpu_name",
        "no_init_or_tensor",
    ]


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "decimal", "binary"),
    [
        (0, "0.0 bytes", "0.0 bytes"),
        (999, "999.0 bytes", "999.0 bytes"),
        (1000, "1.0 KB", "1000.0 bytes"),
        (1024, "1.0 KB", "1.0 KiB"),
        (1536, "1.5 KB", "1.5 KiB"),
        (1536.5, "1.5 KB", "1.5 KiB"),
        (123456789, "123.5 MB", "117.7 MiB"),
        (10**18, "1000.0 PB", "888.2 PiB"),
        (10**21, "1000000.0 PB", "888178.4 PiB"),
        (-5000, "-5000.0 bytes", "-5000.0 bytes"),
    ],
)
def test_a_size_is_shown_in_the_first_unit_in_which_it_is_below_one_step(num, decimal, binary):
    assert convert_bytes(num) == decimal
    assert convert_bytes(num, decimal=False) == binary
    assert convert_bytes(num, False) == binary


@pytest.mark.parametrize("number", [Fraction, Decimal, np.int64, np.float64], ids=lambda kind: kind.__name__)
def test_a_size_may_be_any_kind_of_number(number):
    assert convert_bytes(number(1536)) == "1.5 KB"
    assert convert_bytes(number(999)) == "999.0 bytes"


# --- devices and memory --------------------------------------------------------------------------------------------


def test_the_default_device_is_cuda_only_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device() == torch.device("cpu")
    assert get_gpu_name() == "N/A"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_device() == torch.device("cuda")
    assert get_device().index is None


def test_snapshots_read_as_whole_mebibytes_with_thousands_separators():
    gpu = GlobalGPUMemoryUsage(total=3072 * MIB + 1, free=1024 * MIB, used=2048 * MIB + MIB - 1)
    assert str(gpu) == "GPU: (U: 2,048MiB F: 1,024MiB T: 3,072MiB)"
    held = TorchGPUMemoryUsage(reserved=MIB, reserved_max=2048 * MIB, used=3 * MIB, used_max=4 * MIB)
    assert str(held) == "TORCH: (R: 1MiB/2,048MiB, A: 3MiB/4MiB)"
    cpu = CPUMemoryUsage(maxrss=529 * MIB, free=19335 * MIB)
    assert str(cpu) == "CPU: (maxrss: 529MiB F: 19,335MiB)"
    assert str(MemoryUsage(cpu, None, None)) == str(cpu)
    assert str(MemoryUsage(cpu, gpu, held)) == f"{cpu} {gpu} {held}"
    assert MemoryUsage._fields == ("cpu", "gpu", "torch")


def test_there_are_gpu_snapshots_where_the_driver_gives_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert GlobalGPUMemoryUsage.now() is None
    assert TorchGPUMemoryUsage.now() is None
    usage = MemoryUsage.now()
    assert (usage.gpu, usage.torch) == (None, None)
    assert get_mem_usage().startswith("CPU: (maxrss: ")

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: asked.append(device) or (3 * GIB, 10 * GIB))
    assert GlobalGPUMemoryUsage.now("cuda:1") == (10 * GIB, 3 * GIB, 7 * GIB)
    assert asked == ["cuda:1"]

    def complain(device=None):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "mem_get_info", complain)
    assert MemoryUsage.now().gpu is None


def test_peak_memory_covers_this_process_and_free_memory_is_what_is_available():
    usage = CPUMemoryUsage.now()
    rss = psutil.Process().memory_info().rss
    assert usage.maxrss >= rss * 0.9
    assert 0 <= usage.free <= psutil.virtual_memory().total


def test_free_memory_is_bounded_by_what_the_container_leaves(monkeypatch):
    monkeypatch.setattr(cgroup, "memory_available", lambda: 123 * MIB)
    assert CPUMemoryUsage.now().free == 123 * MIB
    monkeypatch.setattr(cgroup, "memory_available", lambda: None)
    assert CPUMemoryUsage.now().free > 123 * MIB


# --- control groups ------------------------------------------------------------------------------------------------

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


HOST_PATH = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
V1_STAT = f"inactive_file 99\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}"
V2_STAT = f"anon {GIB}\ninactive_file {GIB}\nactive_file {MIB}\nslab_reclaimable 5"


def v1(folder, limit, usage, stat="") -> dict:
    folder = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": stat,
    }


def v2(folder, limit, usage, stat="") -> dict:
    folder = f"sys/fs/{folder}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage, f"{folder}/memory.stat": stat}


NESTED = {**v2("cgroup/outer", 2 * GIB, GIB + 7), **v2("cgroup/outer/inner", 8 * GIB, 100)}
GROUPS = {
    "v2, file cache counts as free": (
        "0::/app",
        V2_MOUNT,
        v2("cgroup/app", 4 * GIB, 3 * GIB, V2_STAT),
        2 * GIB + MIB + 5,
    ),
    "v2, max is no limit": ("0::/", V2_MOUNT, v2("cgroup", "max", 1000), None),
    "v2, the tightest group above counts": ("0::/outer/inner", V2_MOUNT, NESTED, GIB - 7),
    "v2, a group beside the mount": ("0::/../elsewhere", V2_MOUNT, v2("cgroup", GIB, 0), GIB),
    "v2, a group that is not mounted": ("0::/not/mounted/here", V2_MOUNT, v2("cgroup", GIB, 0), GIB),
    "v2, a blank in the mount point": ("0::/", V2_MOUNT.replace("cgroup ", "c\\040g ", 1), v2("c g", 5, 0), 5),
    "v2, usage over the limit leaves nothing": ("0::/", V2_MOUNT, v2("cgroup", 1000, 2000), 0),
    "v1, file cache is free": (
        "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc",
        V1_MOUNTS,
        v1("/docker/abc", GIB, GIB // 2, V1_STAT),
        GIB // 2 + 2 * MIB,
    ),
    "v1, the number for no limit": ("4:memory:/", V1_MOUNTS, v1("", 9223372036854771712, 1), None),
    "v1, a container that sees its host path": ("4:memory:/docker/abc", HOST_PATH, v1("", GIB, 0), GIB),
    "lines that say nothing": ("no colons\n0::/x", "short line\n1 2 3 - \n", {}, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_is_what_the_control_groups_leave(tmp_path, case):
    group, mounts, files, wanted = GROUPS[case]
    assert cgroup.memory_available(tmp_path) is None
    for path, text in {"proc/self/cgroup": group, "proc/self/mountinfo": mounts, **files}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cgroup.memory_available(tmp_path) == wanted


def test_the_real_system_gives_a_plausible_figure():
    memory = cgroup.memory_available()
    assert memory is None or memory >= 0


# --- no_init_or_tensor ---------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.linear = torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv2d(3, 4, 2)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("table", torch.arange(5))


def test_parameters_are_meta_and_buffers_are_real_inside_the_context():
    with no_init_or_tensor():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.table.tolist() == [0, 1, 2, 3, 4]


def test_it_calls_what_it_is_given_and_works_as_a_decorator():
    net = no_init_or_tensor(Net)
    assert isinstance(net, Net)
    assert net.linear.weight.is_meta
    assert not Net().linear.weight.is_meta
    decorated = no_init_or_tensor()(Net)
    for _ in range(2):
        assert decorated().linear.weight.is_meta


def test_as_a_decorator_it_is_active_while_coroutines_and_generators_run():
    @no_init_or_tensor()
    async def coroutine():
        await asyncio.sleep(0)
        return Net()

    @no_init_or_tensor()
    def generator():
        yield Net()
        yield Net()

    assert asyncio.run(coroutine()).linear.weight.is_meta
    for net in generator():
        assert net.linear.weight.is_meta
        assert not Net().linear.weight.is_meta


@pytest.mark.parametrize("wrong", [5, "text", [Net()]], ids=["int", "str", "list of a module"])
def test_anything_that_is_not_callable_is_refused(wrong):
    with pytest.raises(TypeError, match="callable"):
        no_init_or_tensor(wrong)


def test_an_explicit_device_and_an_ambient_one_are_overridden_in_either_nesting_order():
    with no_init_or_tensor():
        assert torch.empty(3, device="cpu").is_meta
        assert torch.empty((2, 3), dtype=torch.int8).dtype == torch.int8
        with torch.device("cpu"):
            assert torch.empty(3).is_meta
            assert torch.zeros(2).device.type == "cpu"
    with torch.device("cpu"), no_init_or_tensor():
        assert torch.nn.Linear(2, 2).weight.is_meta
        assert torch.ones(2).device.type == "cpu"


def test_memory_given_by_the_caller_is_still_used_and_pinning_is_dropped_with_the_memory():
    out = torch.zeros(3)
    with no_init_or_tensor():
        assert torch.empty(3, out=out) is out
        assert torch.empty(3, pin_memory=True).is_meta


def test_other_factories_stay_as_they_are():
    with no_init_or_tensor():
        assert not torch.zeros(2).is_meta
        assert not torch.arange(2).is_meta
        assert not torch.empty_like(torch.zeros(2)).is_meta
        assert not torch.Tensor(2).is_meta


def current_originals():
    quiet = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)
    return [torch.empty, *(module_class.__dict__["reset_parameters"] for module_class in quiet)]


def test_the_originals_are_back_afterwards_also_after_an_exception():
    before = current_originals()

    def fail():
        assert all(now is not then for now, then in zip(current_originals(), before))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        no_init_or_tensor(fail)
    assert current_originals() == before


def test_an_inner_use_has_no_effect_of_its_own():
    empty = torch.empty
    with no_init_or_tensor():
        with no_init_or_tensor():
            assert torch.empty(1).is_meta
        assert no_init_or_tensor(lambda: torch.empty(1)).is_meta
        assert torch.empty(1).is_meta
    assert torch.empty is empty


def test_initialisation_is_skipped_for_real_parameters_too():
    linear = torch.nn.Linear(3, 3)
    before = linear.weight.clone()
    with no_init_or_tensor():
        linear.reset_parameters()
    assert torch.equal(linear.weight, before)
    linear.reset_parameters()
    assert not torch.equal(linear.weight, before)


def test_device_contexts_work_after_a_first_one_around_a_use(fresh_process):
    result = fresh_process("""
        import torch
        from tensorizer.utils import no_init_or_tensor
        with torch.device("cpu"), no_init_or_tensor():
            torch.nn.Linear(2, 2)
        with torch.device("meta"):
            print(torch.nn.Linear(2, 2).weight.device)
    """)
    assert (result.returncode, result.stdout) == (0, "meta\n"), result.stderr


def test_other_threads_see_normal_behaviour():
    seen = []
    with no_init_or_tensor():
        thread = threading.Thread(target=lambda: seen.extend([torch.empty(2).is_meta, torch.nn.Linear(2, 2).weight]))
        thread.start()
        thread.join(30)
        assert torch.empty(2).is_meta
    assert seen[0] is False
    assert not seen[1].is_meta
    assert seen[1].abs().sum() > 0


def test_overlapping_contexts_of_two_threads_restore_once_both_are_over():
    empty = torch.empty
    entered, leave = threading.Event(), threading.Event()

    def stay_inside():
        with no_init_or_tensor():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=stay_inside)
    with no_init_or_tensor():
        thread.start()
        assert entered.wait(30)
    try:
        assert torch.empty is not empty
        assert not torch.empty(1).is_meta
    finally:
        leave.set()
        thread.join(30)
    assert torch.empty is empty


def test_tasks_are_separate():
    async def inside(started, may_end):
        with no_init_or_tensor():
            started.set()
            await may_end.wait()
            return torch.empty(1).is_meta

    async def main():
        started, may_end = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(started, may_end))
        await started.wait()
        outside = torch.empty(1).is_meta
        may_end.set()
        return outside, await task

    assert asyncio.run(main()) == (False, True)


def test_the_package_itself_loads_and_saves_inside_the_context_as_outside(tmp_path):
    path, saved = str(tmp_path / "a.tensors"), str(tmp_path / "b.pt")
    tensors = {
        "matrix": torch.arange(12.0).reshape(3, 4),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "meta": torch.zeros(2, device="meta"),
    }
    wanted = {**tensors, "meta": torch.zeros(2)}
    key = EncryptionParams.random()
    for encryption, decryption in ((None, None), (key, DecryptionParams.from_key(key.key))):
        with no_init_or_tensor():
            with TensorSerializer(path, encryption=encryption) as serializer:
                serializer.write_state_dict(tensors)
            for settings in ({}, {"lazy_load": True}, {"verify_hash": True}, {"dtype": torch.float16}):
                with TensorDeserializer(path, device="cpu", encryption=decryption, **settings) as file:
                    found = {name: file[name] for name in file}
                for name, tensor in wanted.items():
                    assert not found[name].is_meta
                    assert torch.equal(found[name], tensor.to(settings.get("dtype", tensor.dtype))), (name, settings)
            with TensorDeserializer(path, device="cpu", encryption=decryption, lazy_load=True) as file:
                part = file.get_slice("matrix")
                for index in ((slice(1, 3), 2), ([2, 0],), (..., slice(0, 0))):
                    assert torch.equal(part[index], tensors["matrix"][index])
    with tensorizer_saving(), tensorizer_loading(device="cpu"):
        no_init_or_tensor(lambda: torch.save(tensors["matrix"], saved))
        assert torch.equal(torch.load(saved), tensors["matrix"])
