"""The benchmark measures what it says: data, memory figures, ratios, and one run from end to end."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

sys.path.append(str(ROOT))

from benchmarks import memory, models, report
from benchmarks.__main__ import size
from benchmarks.case import Case, Goal, Stage, Unavailable
from benchmarks.cases import CASES, GPU_CASES, cases, names
from benchmarks.cases.encrypted import thread_counts
from benchmarks.contender import S3Place
from benchmarks.contenders import CONTENDERS, contender
from benchmarks.markdown import document
from benchmarks.runner import CaseResult, Result, Runner
from benchmarks.servers import services

MIB = 1 << 20


class TestData:
    @pytest.mark.parametrize(("text", "nbytes"), [("2GB", 2 * 10**9), ("64MiB", 64 << 20), ("1.5kb", 1500), ("7", 7)])
    def test_a_size_is_read_with_its_unit(self, text: str, nbytes: int) -> None:
        assert size(text) == nbytes

    @pytest.mark.parametrize("text", ["", "GB", "2 apples", "-1MB"])
    def test_what_is_no_size_is_refused(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError, match="expected a size"):
            size(text)

    @pytest.mark.parametrize("nbytes", [64 * 10**6, 2 * 10**9, 8 * 10**9])
    def test_the_large_model_is_as_large_as_asked_for(self, nbytes: int) -> None:
        total = sum(2 * torch.Size(shape).numel() for _, shape in models.llm_shapes(nbytes))
        assert total == pytest.approx(nbytes, rel=0.05)

    def test_the_large_model_has_a_matrix_of_23_megabytes(self) -> None:
        shapes = dict(models.llm_shapes(2 * 10**9))
        assert 2 * torch.Size(shapes["model.layers.3.mlp.up_proj.weight"]).numel() == pytest.approx(23e6, rel=0.01)

    def test_the_many_tensors_are_18867_and_200_megabytes(self) -> None:
        shapes = dict(models.many_shapes(200 * 10**6))
        assert len(shapes) == 18_867
        assert sum(2 * torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(200e6, rel=0.01)

    def test_data_are_made_once_and_their_manifest_is_true(self, tmp_path: Path) -> None:
        manifest = models.make("tiny", MIB, tmp_path)
        state = models.read_base(tmp_path)
        assert manifest.checksum == models.checksum(state) != 0
        assert (manifest.tensors, manifest.nbytes) == (len(state), sum(t.nbytes for t in state.values()))
        written = (tmp_path / "base.pt").stat().st_mtime_ns
        assert models.make("tiny", MIB, tmp_path) == manifest
        assert (tmp_path / "base.pt").stat().st_mtime_ns == written

    def test_the_checksum_notices_one_changed_bit(self) -> None:
        state = {"a": torch.zeros(8, dtype=torch.float16)}
        before = models.checksum(state)
        state["a"].view(torch.int16)[3] ^= 1
        assert models.checksum(state) != before


class TestMemory:
    def test_the_page_cache_is_warmed_and_dropped(self) -> None:
        path = ROOT / "build" / "page-cache-test"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(range(256)) * (4 * MIB // 256))
        try:
            memory.drop_page_cache(path)
            assert memory.cached_share(path) <= 0.01
            memory.warm_page_cache(path)
            assert memory.cached_share(path) == 1.0
        finally:
            path.unlink()

    def test_the_sampler_sees_memory_that_is_gone_again(self) -> None:
        sampler = memory.PeakSampler()
        before = sampler.start()
        for _ in range(3):
            # From the system: what malloc gives may be memory that this process has kept.
            with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
                block[::4096] = bytes(len(block) // 4096 * [1])
        peak = sampler.stop()
        assert 60 * MIB < peak.owned - before.owned < 100 * MIB


def outcome(unit: str, goal: Goal, **medians: float) -> CaseResult:
    case = Case("x", "a case", "load", lambda bench: 0.0, unit=unit, limit="machine", goals=(goal,))
    return CaseResult(case, 10**9, [Result(contender(name), [value]) for name, value in medians.items()])


class TestReport:
    def test_ratios_compare_medians_so_that_above_one_is_better(self) -> None:
        found = outcome("GB/s", Goal("reference", at_least=4), ours=0.1, reference=0.5, machine=0.08)
        ours = found.of("ours")
        assert ours is not None
        assert report.ratio(found, ours, "reference") == pytest.approx(5.0)
        assert report.ratio(found, ours, "machine") == pytest.approx(0.8)
        assert report.shown(found.case, 0.1, found.nbytes) == pytest.approx(10.0)

    @pytest.mark.parametrize(
        ("unit", "goal", "ours", "met"),
        [
            ("GB/s", Goal("reference", at_least=4), 0.1, True),
            ("GB/s", Goal("reference", at_least=6), 0.1, False),
            ("ms", Goal(at_most=100), 0.1, True),
            ("ms", Goal(at_most=99), 0.1, False),
            ("MB", Goal(at_most=5), 5e6, True),
            ("MB", Goal(at_most=4.9), 5e6, False),
            ("requests", Goal(at_most=2), 2.0, True),
            ("requests", Goal(at_most=2), 3.0, False),
        ],
    )
    def test_a_goal_is_met_or_missed(self, unit: str, goal: Goal, ours: float, met: bool) -> None:
        found = outcome(unit, goal, ours=ours, reference=0.5)
        judged = report.verdict(found, goal)
        assert judged is not None
        assert judged[1] is met
        assert ("met" if met else "MISSED") in report.table(found)

    def test_a_contender_that_failed_has_words_and_no_figure(self) -> None:
        found = outcome("GB/s", Goal("reference", at_least=4), ours=0.1, reference=0.5)
        found.results[1].error = "could not be installed"
        assert found.of("reference") is None
        assert report.verdict(found, found.case.goals[0]) is None
        assert "could not be installed" in report.table(found)

    def test_a_goal_of_another_way_to_run_names_it(self) -> None:
        goal = Goal("reference", at_least=4, who="ours-libsodium")
        found = outcome("GB/s", goal, **{"ours": 0.01, "ours-libsodium": 0.25, "reference": 0.5})
        assert report.verdict(found, goal) == ("ours-libsodium: 2.00 x reference, goal >= 4", False)

    def test_markdown_gives_variants_rows_and_families_tables(self) -> None:
        found = outcome("ms", Goal(at_most=120), **{"ours": 0.1, "ours-libsodium": 0.25, "reference": 0.5})
        points = []
        for threads in (1, 2):
            case = Case(
                f"f-{threads}", f"a sweep: {threads}", "load", lambda bench: 0.0, "llm", "ms", family="f", at=threads
            )
            points.append(CaseResult(case, 10**9, [Result(contender("ours-avx2"), [threads / 10])]))
        text = document(json.loads(json.dumps(report.as_json([found, *points], 10**9, 1))))
        assert "| a case (this project, libsodium), ms | **250** | 500 |" in text
        assert "| a sweep, ms | 1 | 2 |\n|---|---|---|\n| this project, avx2 | 100 | 200 |" in text

    def test_markdown_holds_every_case_and_figure(self) -> None:
        found = outcome("ms", Goal(at_most=120), ours=0.1, reference=0.5, machine=0.08)
        text = document(json.loads(json.dumps(report.as_json([found], 10**9, 1))))
        assert "| a case, ms | **100** | 500 | 80 | 5.0 x | 80% |" in text
        assert "| a case | 100 ms, goal <= 120 | met |" in text


def test_every_case_is_measured_on_us_and_against_somebody() -> None:
    for case in CASES:
        names = [c.name for c in CONTENDERS if case.takes(c)]
        assert any(name.split("-")[0] == "ours" for name in names), case.name
        assert len(names) > 1, case.name
        assert all(goal.versus is None or goal.versus in names for goal in case.goals), case.name


def test_a_family_of_cases_is_asked_for_by_its_name() -> None:
    assert "crypto-threads" in names()
    found = cases("crypto-threads")
    assert [case.at for case in found] == thread_counts(len(os.sched_getaffinity(0)))
    assert {case.family for case in found} == {"crypto-threads"}
    assert [case.name for case in cases("load-hot")] == ["load-hot"]


def test_the_threads_of_a_chart_are_few_and_end_with_all_cores() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(3) == [1, 2, 3]
    assert thread_counts(24) == [1, 2, 3, 4, 8, 16, 24]


def run_cases(folder: Path, wanted: list[str], contenders: list[str]) -> Path:
    """One run from end to end; the path of its JSON."""
    command = [sys.executable, "-m", "benchmarks", "--size", "20MB", "--runs", "1", "--cases", *wanted]
    command += ["--contenders", *contenders, "--cache", str(folder / "cache"), "--out", str(folder / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (folder / "out").glob("*.json")
    facts = json.loads(written.read_text())
    assert [case["name"] for case in facts["cases"]] == [case.name for name in wanted for case in cases(name)]
    for case in facts["cases"]:
        assert [r["error"] for r in case["results"]] == [""] * len(case["results"])
        assert all(r["median"] >= 0 for r in case["results"])
    return written


@pytest.mark.slow
def test_a_run_from_end_to_end_measures_and_writes_json_and_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wanted = ["load-hot", "load-many", "save-tmpfs", "memory-load", "encrypted-load", "encrypted-save"]
    wanted.append("crypto-threads")
    written = run_cases(tmp_path, wanted, ["ours", "ours-libsodium", "machine", "libsodium", "bare-python"])
    for chart in (written.stem, f"{written.stem}-crypto-threads"):
        assert (written.parent / f"{chart}.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


@pytest.mark.slow
def test_the_cases_of_a_gpu_run_from_end_to_end_over_the_fake_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_FAKE_CUDA", "1")
    skipped = ("gpu-load-many", "gpu-load-dtype")  # of 200 MB; torch converts, which wants a device
    run_cases(tmp_path, [case.name for case in GPU_CASES if case.name not in skipped], ["ours", "link"])


@pytest.mark.slow
def test_distributed_checkpoints_are_measured_with_ranks_of_their_own(tmp_path: Path) -> None:
    run_cases(tmp_path / "checkpoint", ["dcp-load-2", "dcp-reshard-1"], ["ours", "torch-dcp"])
    run_cases(tmp_path / "model", ["dcp-model-2"], ["ours", "hf-dcp"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("programs", "wanted"),
    [
        (
            ("nginx", "curl"),
            [
                "http-loopback",
                "https-loopback",
                "http-object-store",
                "http-slow-tail",
                "http-busy-store",
                "http-index",
                "http-index-requests",
            ],
        ),
        (("redis-server",), ["redis-load"]),
        (("swift-proxy-server", "memcached"), ["s3-load", "s3-upload", "memory-s3-upload"]),
    ],
    ids=["http", "redis", "s3"],
)
def test_remote_cases_measure_against_the_limit_and_end_their_servers(
    programs: tuple[str, ...], wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    if missing := [program for program in programs if not shutil.which(program, path=path)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    servers = Path(tempfile.mkdtemp(prefix="tzr-"))  # short, for the path of a socket
    request.addfinalizer(lambda: shutil.rmtree(servers, ignore_errors=True))
    monkeypatch.setenv("TMPDIR", str(servers))
    written = run_cases(tmp_path, wanted, ["ours", "curl", "boto3", "sockets"])
    for case in json.loads(written.read_text())["cases"]:
        who = {result["contender"]: result for result in case["results"]}
        assert "ours" in who
        assert case["limit"] in ("", "sockets")
        if case["limit"]:
            assert 0 < who["ours"]["of_limit"] < 2, case["name"]
    assert not still_running(str(servers))
    assert list(servers.iterdir()) == []


def still_running(word: str) -> list[str]:
    """Command lines of processes that have the word in them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in (words := place.read_bytes()):
                found.append(words.decode().replace("\0", " "))
    return found


class TestServers:
    def test_the_emulated_store_keeps_its_latency_and_its_rate(self, tmp_path: Path) -> None:
        content = bytes(range(256)) * (4 * MIB // 256)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "object").write_bytes(content)
        with services.object_store(Stage(tmp_path, (), ())) as settings:
            url = f"{settings['http']}/model/object"
            begin = time.perf_counter()
            with urllib.request.urlopen(url) as answer:
                first = time.perf_counter() - begin
                assert answer.read() == content
            whole = time.perf_counter() - begin
            assert first >= services.LATENCY_MS / 1e3
            assert whole >= services.LATENCY_MS / 1e3 + 0.9 * len(content) / services.BYTES_PER_SECOND
            request = urllib.request.Request(url, headers={"Range": "bytes=1000-1999"})
            with urllib.request.urlopen(request) as answer:
                assert (answer.status, answer.read()) == (206, content[1000:2000])
                assert answer.headers["Content-Range"] == f"bytes 1000-1999/{len(content)}"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{settings['http']}/model/nothing")
            with urllib.request.urlopen(f"{settings['http']}/-/requests") as answer:
                assert answer.read() == b"3"
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url)

    def test_the_emulated_store_has_a_slow_tail_and_refuses_what_is_too_much(self, tmp_path: Path) -> None:
        (tmp_path / "object").write_bytes(bytes(8 * MIB))
        with services.slow_tail_store(Stage(tmp_path, (), ())) as settings:
            request = urllib.request.Request(f"{settings['http']}/object", headers={"Range": "bytes=0-9"})
            slow = 0
            for _ in range(services.SLOW_EVERY):
                begin = time.perf_counter()
                urllib.request.urlopen(request).close()
                slow += time.perf_counter() - begin >= services.SLOW_FACTOR * services.LATENCY_MS / 1e3
            assert slow == 1
        with services.busy_store(Stage(tmp_path, (), ())) as settings, contextlib.ExitStack() as under_way:
            url = f"{settings['http']}/object"
            for _ in range(services.MOST_REQUESTS):
                under_way.enter_context(urllib.request.urlopen(url))  # 0.1 s each until it is in
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(url)

    def test_a_case_whose_server_is_missing_says_so_for_everybody(self, tmp_path: Path) -> None:
        @contextlib.contextmanager
        def nothing(stage: Stage) -> Iterator[dict[str, str]]:
            raise Unavailable("no such server")
            yield {}

        case = Case("x", "a case", "load", lambda bench: 0.0, model="tiny", service=nothing)
        runner = Runner(tmp_path / "cache", tmp_path / "scratch", tmp_path, 10**6, {})
        found = runner.run(case, [contender("ours")], 1)
        assert [result.error for result in found.results] == ["no such server"]

    def test_a_model_is_no_larger_than_its_case_wants(self, tmp_path: Path) -> None:
        runner = Runner(tmp_path / "cache", tmp_path / "scratch", tmp_path, 2 * 10**9, {})
        assert runner.size_of("llm", 5 * 10**8) == 5 * 10**8
        assert runner.size_of("llm") == 2 * 10**9
        assert runner.folder_of("llm", 5 * 10**8) != runner.folder_of("llm")

    def test_a_secret_of_a_store_is_in_no_repr(self) -> None:
        assert "s3cret" not in repr(S3Place("s3://b/k/l", "http://host", "id", "s3cret"))
        assert (S3Place("s3://b/k/l", "", "", "").bucket, S3Place("s3://b/k/l", "", "", "").key) == ("b", "k/l")


def test_a_call_enters_few_files_and_a_further_tensor_costs_few_calls() -> None:
    from benchmarks import walks

    bounds = {
        "TensorDeserializer": (10, 1),
        "load_into_module": (15, 8),
        "torch.load_file": (12, 4),
        "convert": (22, 20),
        "from_pretrained": (18, 20),
    }
    if importlib.util.find_spec("transformers") is None:
        del bounds["from_pretrained"]
    for name, (files, calls) in bounds.items():
        found = walks.walk(walks.WALKS[name])
        assert (found.files <= files, found.calls <= calls) == (True, True), (name, found)


def test_a_conversion_of_one_tensor_takes_few_calls(tmp_path: Path) -> None:
    from benchmarks import walks

    counted = []
    for name in ("first", "second"):  # the first imports what is imported late
        (tmp_path / name).mkdir()
        counted.append(walks.count(walks.convert(tmp_path / name, 1))[1])
    assert counted[1] <= 400


def test_a_model_from_s3_takes_few_calls() -> None:
    pytest.importorskip("boto3")
    transformers = pytest.importorskip("transformers")
    from servers.s3_recorder import S3Recorder

    from benchmarks import walks
    from tensorizer.integrations import huggingface

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        huggingface.save_pretrained(transformers.LlamaForCausalLM(config), "s3://bucket/model", **options)
        found = [
            walks.count_changes(lambda: huggingface.from_pretrained("s3://bucket/model", **options), threads=True)
            for _ in range(2)
        ]
    entered, calls, changes = found[1]  # the first imports what is imported late
    assert (len(entered) <= 22, calls <= 1100, changes <= 300) == (True, True, True), (len(entered), calls, changes)
