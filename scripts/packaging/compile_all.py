#!/usr/bin/env python3
"""Compiles the C++ sources with every supported compiler that a Debian has, against the libraries of that release.

    compile_all.py [SUITE ...]

Wants root. Ends with one line per compiler; the exit status tells whether all of them compiled everything.
"""

from __future__ import annotations

import sys

from roots import PYTHON, packages_of, run_with_repository

# bullseye has libcurl 7.74, OpenSSL 1.1.1 and hiredis 0.14; sid has what comes next.
COMPILERS = {
    "bullseye": {"g++-10": "g++-10", "clang-16": "clang++-16"},
    "bookworm": {"g++-11": "g++-11", "g++-12": "g++-12"},
    "trixie": {"g++-13": "g++-13", "g++-14": "g++-14", "clang-19": "clang++-19"},
    "sid": {"g++": "g++", "clang": "clang++"},
}


def main() -> int:
    suites = sys.argv[1:] or list(COMPILERS)
    unknown = [suite for suite in suites if suite not in COMPILERS]
    if unknown:
        sys.exit(f"compile_all.py: no compilers of {', '.join(unknown)}: wanted some of {', '.join(COMPILERS)}")
    results = {}
    for suite in suites:
        packages = [*COMPILERS[suite], *packages_of("build"), *PYTHON]
        for package, program in COMPILERS[suite].items():
            command = ["env", f"CXX={program}", "scripts/packaging/compile_with.sh"]
            status = run_with_repository(suite, packages, command)
            outcome = f"no Debian {suite} could be made" if status is None else "FAILED" if status else "passed"
            results[f"{package} of Debian {suite}"] = outcome
    for name, result in results.items():
        print(f"{name}: {result}")
    return int(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
