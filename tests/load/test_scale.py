"""The simulation behind docs/scale.md: it runs, its numbers add up, and its requests are those that are really made."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from paths import ROOT
from servers.s3_recorder import S3Recorder
from torch_versions import has_checkpoints

import tensorizer.distributed as td
from tensorizer._io.http_options import most_connections

sys.path.append(str(ROOT))

from benchmarks import scale

MIB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized"),
    has_checkpoints,
]


def test_the_program_prints_what_the_document_says_from_costs_that_it_measured(capsys):
    assert scale.main(["--measured-tensors", "20", "--ranks", "8", "64", "--nbytes", "1e12", "--tensors", "100"]) == 0
    text = capsys.readouterr().out
    names = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    written = re.findall(r"^\| ([^|]+?) \|", scale.DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == written
    assert len(names) > 30
    assert "| 8 ranks | 64 ranks |" in text


def test_every_byte_is_transferred_once_and_bounds_are_kept():
    links = scale.Links(ranks_per_node=4, connection=100.0, latency=0.0, node=1000.0, store=1e9, reads=1e9)
    stream = scale.Stream(connections=4, request=10.0, per_second=1e9)
    assert stream.rate(links) == 400
    done, bound = scale.transfer([1000.0] * 8, stream, links)  # 4 ranks of 400 share 1000
    assert bound == "link of the node"
    assert done == pytest.approx([4.0] * 8)
    done, bound = scale.transfer([1000.0] * 2, stream, links)
    assert (bound, done) == ("connections", [2.5, 2.5])
    done, _ = scale.transfer([1000.0] * 4, stream, links, {3: 0.1})
    assert done[:3] == pytest.approx([4.0] * 3)
    assert done[3] == pytest.approx(4.0 + (1000 - 4 * 25) / 40)
    done, bound = scale.transfer([1000.0] * 2, dataclasses.replace(stream, per_second=10), links)
    assert (bound, done) == ("requests of the store", [20.0, 20.0])
    assert scale.transfer([0.0, 5.0], stream, links)[0][0] == 0.0


def test_outcomes_grow_with_what_they_are_made_of():
    costs = scale.measured(20)
    assert all(value > 0 for value in dataclasses.astuple(costs))
    links = scale.Links()
    few, many = (scale.simulated(ranks, 10**12, 100, costs, links) for ranks in (8, 1024))
    for outcome in (few, many):
        assert outcome.nbytes_of_rank * outcome.ranks >= 10**12
        assert outcome.boxes == 100 * outcome.ranks
        assert outcome.connections_of_node <= 64
        assert outcome.slow_save > outcome.saved > outcome.told_of_dead
        assert min(*outcome.save.values(), *outcome.load.values()) > 0
    assert many.save["writing"] < few.save["writing"]
    assert many.marker == pytest.approx(128 * few.marker, rel=0.01)
    with scale.ranks_of_a_node(16):
        assert most_connections() == 4
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_requests_are_those_of_a_real_save_and_a_real_load(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for nbytes in (MIB, 40 * MIB):
        with S3Recorder() as store:
            options = {"stream_options": store.arguments}
            state = {"w": torch.zeros(nbytes // 4)}
            for _ in range(2):
                before = len(store.requests)
                dcp.save(state, storage_writer=td.TensorizerWriter("s3://b/c", **options), no_dist=True)
            made = collections.Counter(request.operation for request in store.requests[before:])
            (size,) = (len(content) for name, content in store.objects.items() if str(name).endswith(".tensors"))
            uploads = sum(made.values()) - made["GetObject"] - made["ListObjectsV2"] - made["DeleteObject"]
            assert uploads == scale.upload_requests(size) + 1  # and the marker
            assert [made[name] for name in ("GetObject", "ListObjectsV2", "DeleteObject")] == [0, 2, 1]
            before = len(store.requests)
            dcp.load(state, storage_reader=td.TensorizerReader("s3://b/c", **options), no_dist=True)
            reads = len(store.requests) - before
            assert abs(reads - 1 - scale.download_requests(size)) <= 1  # units begin at a tensor
