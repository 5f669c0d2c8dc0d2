"""Takes turns: every contender once, then every contender again, each time in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Optional

from benchmarks.case import Case, Stage, Unavailable
from benchmarks.contender import Contender
from benchmarks.contenders import contender
from benchmarks.environments import ROOT, compiled, python_of

OURS = contender("ours")
TINY = 1 << 20
MANY_SHARE = 10  # the many small tensors are a tenth of the large model: 200 MB beside 2 GB


@dataclass
class Result:
    """One contender in one case.

    Attributes:
        contender: Who.
        values: One per run: seconds, or bytes.
        version: What was measured.
        error: The last line of what went wrong; no figure is shown then.
    """

    contender: Contender
    values: list[float] = field(default_factory=list)
    version: str = ""
    error: str = ""

    @property
    def median(self) -> Optional[float]:
        """The middle of the runs; ``None`` where something went wrong."""
        return median(self.values) if self.values and not self.error else None


@dataclass
class CaseResult:
    """One case, complete: ``nbytes`` is the payload that turns seconds into GB/s."""

    case: Case
    nbytes: int
    results: list[Result]

    def of(self, name: str) -> Optional[Result]:
        """The result of that contender, if it took part and succeeded."""
        found = [r for r in self.results if r.contender.name == name and r.median is not None]
        return found[0] if found else None


class WorkerError(RuntimeError):
    """A process of the benchmark failed; the message is its last line."""


class Runner:
    """Prepares data and environments, then measures case by case.

    Args:
        cache: Folder for models, environments and the limits program; kept between runs.
        scratch: Folder on the disk that the save cases measure.
        tmpfs: Folder in memory.
        size: Bytes of the large model.
        given: Interpreters named by the user, by contender.
    """

    def __init__(self, cache: Path, scratch: Path, tmpfs: Path, size: int, given: dict[str, Path]) -> None:
        self.cache, self.scratch, self.tmpfs, self.size, self.given = cache, scratch, tmpfs, size, given
        for folder in (cache, scratch):
            folder.mkdir(parents=True, exist_ok=True)
        self._programs: dict[str, str] = {}  # for the environment of processes
        self._prepared: set[Path] = set()
        self._pythons: dict[str, Path] = {}
        self._unavailable: dict[str, str] = {}

    def folder_of(self, model: str, largest: int = 0) -> Path:
        """Where the model's files lie."""
        return self.cache / f"{model}-{self.size_of(model, largest) // 1_000_000}MB"

    def size_of(self, model: str, largest: int = 0) -> int:
        """Bytes asked for of that model, ``largest`` at most where that is not zero."""
        size = min(self.size, largest or self.size)
        return {"llm": size, "many": size // MANY_SHARE, "tiny": TINY}[model]

    def worker(
        self, python: Path, *arguments: object, settings: Optional[dict[str, str]] = None, timeout: float = 900
    ) -> dict[str, object]:
        """Run one process; returns what it says. It finds the settings in its environment.

        Raises:
            WorkerError: It failed or took too long.
        """
        inherited = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")  # others' packages; imports without .pyc
        clean = {name: value for name, value in os.environ.items() if name not in inherited}
        environment = {**clean, "BENCH_ROOT": str(ROOT), **self._programs}
        environment["BENCH_SETTINGS"] = json.dumps(settings or {})
        command = [str(python), str(Path(__file__).with_name("worker.py")), *map(str, arguments)]
        try:
            done = subprocess.run(
                command, cwd=self.cache, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise WorkerError(f"no answer within {timeout:.0f} s") from None
        if done.returncode != 0:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise WorkerError(words[-1])
        answer: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def python(self, contender: Contender) -> Path:
        """The contender's interpreter.

        Raises:
            WorkerError: Its environment cannot be made; said once, remembered.
        """
        if contender.name in self._unavailable:
            raise WorkerError(self._unavailable[contender.name])
        if contender.name not in self._pythons:
            try:
                self._pythons[contender.name] = python_of(contender, self.cache, self.given)
            except subprocess.CalledProcessError:
                self._unavailable[contender.name] = "could not be installed"
                raise WorkerError(self._unavailable[contender.name]) from None
            except FileNotFoundError as error:
                self._unavailable[contender.name] = str(error)
                raise WorkerError(str(error)) from None
        return self._pythons[contender.name]

    def prepare(self, who: Contender, folder: Path, model: str, variant: str = "") -> None:
        """Have the contender write its own file, once; ours anew in every run, since our writer changes."""
        writer = contender(who.owner)
        path = folder / writer.file_name(variant)
        if path in self._prepared or not writer.can(f"prepare_{variant}" if variant else "prepare"):
            return
        if model in writer.cannot_write:
            self.prepare(OURS, folder, model, variant)
            path.unlink(missing_ok=True)
            path.hardlink_to(folder / OURS.file_name(variant))
        elif writer.role == "ours" or not path.exists():
            arguments = ("--contender", writer.name, "--folder", folder, "--variant", variant)
            self.worker(self.python(writer), "prepare", *arguments)
        self._prepared.add(path)

    def make(self, model: str, largest: int = 0) -> int:
        """Make the model's data; returns its payload in bytes."""
        size, folder = self.size_of(model, largest), self.folder_of(model, largest)
        arguments = ("make", "--model", model, "--size", size, "--folder", folder)
        return int(str(self.worker(Path(sys.executable), *arguments)["nbytes"]))

    def run(self, case: Case, contenders: list[Contender], runs: int) -> CaseResult:
        """Measure one case: ``runs`` rounds, each contender once per round, a different one first each time."""
        nbytes = self.make(case.model, case.largest)
        self.make("tiny")
        results = [Result(c) for c in contenders if case.takes(c)]
        if any(result.contender.role == "limit" for result in results):  # it takes long to compile
            self._programs["BENCH_LIMITS"] = str(compiled("limits", self.cache, "-lcrypto", "-lsodium"))
        for result in results:
            result.error = self._error_of_preparing(result.contender, case)
        try:
            with case.service(self._stage(case, results)) as settings:
                self._take_turns(case, results, {"tmpfs": str(self.tmpfs), **settings}, runs)
        except Unavailable as error:
            for result in results:
                result.error = str(error)
        return CaseResult(case, nbytes, results)

    def _take_turns(self, case: Case, results: list[Result], settings: dict[str, str], runs: int) -> None:
        for turn in range(runs):
            for place in range(len(results)):
                self._measure(case, results[(turn + place) % len(results)], settings)
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    def _stage(self, case: Case, results: list[Result]) -> Stage:
        folders = (self.folder_of(case.model, case.largest), self.folder_of("tiny"))
        names = dict.fromkeys(r.contender.file_name(case.variant) for r in results)
        files = [folder / name for folder in folders for name in names]
        return Stage(self.cache, folders, tuple(file for file in files if file.exists()))

    def _error_of_preparing(self, contender: Contender, case: Case) -> str:
        try:
            self.prepare(contender, self.folder_of(case.model, case.largest), case.model, case.variant)
            self.prepare(contender, self.folder_of("tiny"), "tiny", case.variant)
        except WorkerError as error:
            return str(error)
        return ""

    def _measure(self, case: Case, result: Result, settings: dict[str, str]) -> None:
        if result.error:
            return
        arguments: list[object] = ["measure", "--contender", result.contender.name, "--case", case.name]
        arguments += ["--folder", self.folder_of(case.model, case.largest), "--tiny", self.folder_of("tiny")]
        arguments += ["--scratch", self.scratch]
        try:
            answer = self.worker(self.python(result.contender), *arguments, settings=settings)
        except WorkerError as error:
            result.error = str(error)
            return
        result.values.append(float(str(answer["value"])))
        result.version = str(answer["version"])
