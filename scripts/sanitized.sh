#!/usr/bin/env bash
# Runs one program built with sanitizers so that every finding is fatal. usage: sanitized.sh PROGRAM ARGUMENTS...
set -euo pipefail
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
# Older sanitizer runtimes cannot map their shadow memory where kernels randomise addresses with more than 28 bits.
if command -v setarch >/dev/null && setarch --addr-no-randomize true 2>/dev/null; then
  exec setarch --addr-no-randomize "$@"
fi
exec "$@"
