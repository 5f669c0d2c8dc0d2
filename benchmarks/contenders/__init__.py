"""Everybody who takes part, in the order of the tables. A new contender is one file here and one line below."""

from __future__ import annotations

from benchmarks.contender import Contender
from benchmarks.contenders.bare_python import BarePython
from benchmarks.contenders.boto3_transfer import Boto3
from benchmarks.contenders.curl_program import Curl
from benchmarks.contenders.fastsafetensors_file import Fastsafetensors
from benchmarks.contenders.link import Link
from benchmarks.contenders.machine import Machine
from benchmarks.contenders.ours import Ours
from benchmarks.contenders.ours_kernel import KERNELS, OursKernel, OursLibsodium
from benchmarks.contenders.ours_read import OursRead
from benchmarks.contenders.ours_safetensors import OursSafetensors
from benchmarks.contenders.ours_wheel import OursWheel
from benchmarks.contenders.reference import Reference, ReferenceReaders
from benchmarks.contenders.runai_streamer import RunaiStreamer
from benchmarks.contenders.safetensors_file import Safetensors
from benchmarks.contenders.sockets import Sockets
from benchmarks.contenders.sodium import Sodium
from benchmarks.contenders.torch_dcp import HuggingFaceDcp, TorchDcp, TorchDcpThreads
from benchmarks.contenders.torch_file import Torch
from benchmarks.contenders.transformers_model import Transformers

CONTENDERS: tuple[Contender, ...] = (
    Ours(),
    OursSafetensors(),
    OursRead(),
    OursWheel(),
    *(OursKernel(kernel) for kernel in KERNELS),
    OursLibsodium(),
    Reference(),
    ReferenceReaders(),
    Safetensors(),
    Torch(),
    Fastsafetensors(),
    Transformers(),
    TorchDcp(),
    TorchDcpThreads(),
    HuggingFaceDcp(),
    RunaiStreamer(),
    Curl(),
    Boto3(),
    BarePython(),
    Machine(),
    Sodium(),
    Link(),
    Sockets(),
)


def contender(name: str) -> Contender:
    """The contender of that name; ``KeyError`` lists those there are."""
    for candidate in CONTENDERS:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no contender {name!r}; there are: {', '.join(c.name for c in CONTENDERS)}")
