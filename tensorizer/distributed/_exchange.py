"""Ranks that read 1/N of the bytes each and gather them in windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from tensorizer._format.names import Name
from tensorizer._load.open_file import OpenFile
from tensorizer._load.parts import get_slice, get_slices
from tensorizer._system.devices import empty
from tensorizer.distributed._boxes import Box, slices_of
from tensorizer.distributed._ranks import Ranks, caught

# What one rank reads of a window. With N ranks N + 2 times as much memory is used on the device of the exchange.
_SLOT_NBYTES = 16 << 20
# Behind the data of a slot: whether its rank has failed.
_FLAG_NBYTES = 64
_ALIGNMENT = 64


class Part(NamedTuple):
    """Where a rank wants which part of a tensor."""

    box: Box
    into: torch.Tensor


class _Block(NamedTuple):
    """A part of a tensor that is one run of bytes in the file, in a slot."""

    name: Name
    box: Box
    dtype: torch.dtype
    at: int  # in the slot
    nbytes: int


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple((0, size) for size in shape)


def gather_into(
    ranks: Ranks, file: OpenFile, names: Sequence[Name], wanted: dict[Name, Part], device: torch.device
) -> int:
    """Collective: brings tensors from the file to where all ranks want them; every byte is read by one of them.

    Reads the next window while the one before is gathered.

    Args:
        ranks: All of them call this with the same `names`, of tensors with data.
        file: Open, the same on every rank.
        names: What any rank wants, in the order of the file.
        wanted: What this rank wants.
        device: Where its parts go.

    Returns:
        Bytes of tensors that came from other ranks.

    Raises:
        Exception: A rank could not read; on all ranks.
    """
    group, where = ranks.gathers_on(device)
    # Sizes may be in record headers, which have to be read, and there may be no memory for a slot.
    with ranks.together():
        total = sum(get_slice(file, name).nbytes for name in names)
        slot = -(-min(_SLOT_NBYTES, -(-total // ranks.size)) // _ALIGNMENT) * _ALIGNMENT
        windows = _windows(_slots(file, names, slot), ranks.size)
        parts = [torch.zeros(slot + _FLAG_NBYTES, dtype=torch.uint8, device=where) for _ in range(2)]
        gathered = empty((ranks.size, slot + _FLAG_NBYTES), dtype=torch.uint8, device=where)
    errors: list[BaseException] = []
    received = 0
    window, number = next(windows, []), 0
    if window:
        errors = _read(file, window[ranks.rank], parts[0])
    while window:
        work = dist.all_gather(list(gathered), parts[number % 2], group=group, async_op=True)
        following = next(windows, [])
        late = []
        if following and not errors:
            late = _read(file, following[ranks.rank], parts[(number + 1) % 2])
        work.wait()
        if bool(gathered[:, -_FLAG_NBYTES].any()):
            break
        with caught() as undelivered:
            for rank, blocks in enumerate(window):
                for block in blocks:
                    _deliver(block, gathered[rank], wanted)
                    received += block.nbytes if rank != ranks.rank and block.name in wanted else 0
        if undelivered:  # told to the others with the next window
            parts[(number + 1) % 2][-_FLAG_NBYTES] = 1
        errors += [*late, *undelivered]
        window, number = following, number + 1
    ranks.agree(errors)
    return received


def _slots(file: OpenFile, names: Sequence[Name], nbytes: int) -> Iterator[list[_Block]]:
    """All tensors, in the order of the file, in slots of at most `nbytes`."""
    blocks: list[_Block] = []
    used = 0
    for name in names:
        part = get_slice(file, name)
        shape = tuple(part.shape) or (1,)
        cut, row_nbytes = _cut(shape, part.nbytes, nbytes)
        for before in itertools.product(*map(range, shape[:cut])):
            begin = 0
            while begin < shape[cut]:
                at = -(-used // _ALIGNMENT) * _ALIGNMENT
                count = min(shape[cut] - begin, max(0, nbytes - at) // row_nbytes)
                if count == 0:
                    yield blocks
                    blocks, used = [], 0
                    continue
                box = (*((i, i + 1) for i in before), (begin, begin + count), *whole(shape[cut + 1 :]))
                blocks.append(_Block(name, box[: part.ndim], part.dtype, at, count * row_nbytes))
                used = at + count * row_nbytes
                begin += count
    if blocks:
        yield blocks


def _cut(shape: Sequence[int], nbytes: int, room: int) -> tuple[int, int]:
    """The first dimension of which one row fits into `room` bytes, and the bytes of such a row."""
    dim, row_nbytes = 0, nbytes // shape[0]
    while row_nbytes > room:
        dim += 1
        row_nbytes //= shape[dim]
    return dim, row_nbytes


def _windows(slots: Iterator[list[_Block]], size: int) -> Iterator[list[list[_Block]]]:
    """One slot for each rank at a time; the last ones may be empty."""
    while window := list(itertools.islice(slots, size)):
        yield window + [[] for _ in range(size - len(window))]


def _view(block: _Block, slot: torch.Tensor) -> torch.Tensor:
    shape = [end - begin for begin, end in block.box]
    return slot[block.at : block.at + block.nbytes].view(block.dtype).view(shape)


def _read(file: OpenFile, blocks: list[_Block], slot: torch.Tensor) -> list[BaseException]:
    """Reads this rank's blocks; an error is marked in the slot, for the others, and returned."""
    slot[-_FLAG_NBYTES] = 0
    with caught() as errors:
        while blocks:
            once = {block.name: block for block in reversed(blocks)}  # a call takes one part of each tensor
            boxes = {name: slices_of(block.box) for name, block in once.items()}
            out = {name: _view(block, slot) for name, block in once.items()}
            get_slices(file, boxes, out=out, verify_hash=False)
            blocks = [block for block in blocks if once[block.name] is not block]
    if errors:
        slot[-_FLAG_NBYTES] = 1
    return errors


def _deliver(block: _Block, slot: torch.Tensor, wanted: dict[Name, Part]) -> None:
    """Copies what this rank wants of a block."""
    part = wanted.get(block.name)
    if part is None:
        return
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block.box, part.box)]
    if all(begin < end for begin, end in common):
        there, here = (
            tuple(slice(begin - a, end - a) for (begin, end), (a, _) in zip(common, box))
            for box in (part.box, block.box)
        )
        part.into[there].copy_(_view(block, slot)[here])
