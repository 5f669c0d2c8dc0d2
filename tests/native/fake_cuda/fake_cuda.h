// Control of the fake CUDA driver: a shared library with the entry points of libcuda.so.1 over host
// memory.
//
// Streams are threads; events, contexts and pinned memory behave as the driver API documents them.
// Copies run late (a random delay per operation) and in any order that CUDA permits. The library
// also keeps the rules that a program must keep, and ends the process with one line on stderr when
// one is broken:
//   - asynchronous copies use registered or driver-allocated host memory, live device memory, and a
//   stream of their
//     own: never the default stream, nor one that synchronises with it
//   - a source is not changed before the copy has run; two accesses to the same bytes, one of them
//   a write, are
//     ordered by events, stream order, or a wait of the host
//   - device memory is not freed, host memory not unregistered, no stream destroyed while work on
//   it may still run
//   - kernels get device memory, and the memory of the chunks that they are told of is live when
//   they run
//   - handles are not used after their end; contexts are popped by the thread that pushed them; a
//   forked child of a
//     process that initialised the driver makes no call
// The kernels are those of csrc/device/cuda/kernels, run by the host on the stream's thread, with
// their thread blocks and threads in any order.
// Device addresses are not accessible to the host: touching one ends in SIGSEGV.
//
// Environment, read by the first call: FAKE_CUDA_VERSION (13000), FAKE_CUDA_DEVICES (2),
// FAKE_CUDA_DELAY_US ("0:0"), FAKE_CUDA_SEED (1), FAKE_CUDA_FAIL (see fake_cuda_fail),
// FAKE_CUDA_NO_REGISTER (1: memory cannot be registered), FAKE_CUDA_ANY_ADDRESS (1: any host
// address passes for a device address), FAKE_CUDA_MODEL (how long things take: see link.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Makes calls fail: "cuMemcpyHtoDAsync:3:700" lets the third call from now return 700; ":sticky" at
// the end lets every call after it fail too, whatever its name, as for a lost device. "execute"
// counts copies when they run: the one that fails is not done, and the device is lost. Several are
// separated by commas.
void fake_cuda_fail(const char* specification);
void fake_cuda_set_delay(unsigned min_us, unsigned max_us);

// Forgets failures and counters, heals a lost device. REQUIRES: no call is under way.
void fake_cuda_reset(void);

// Calls of an entry point since the last reset.
unsigned fake_cuda_calls(const char* name);

// What is not released, as text ("2 events, 1 stream"); empty when nothing is. Memory and streams
// made by the functions below count as the caller's and are left out.
const char* fake_cuda_leaks(void);

// Forgets what is not released, where a program has to leak it: the driver could not say whether
// work on it ended.
void fake_cuda_forget_leaks(void);

// The other side: what a caller of the library does with its own device memory and streams.
void* fake_cuda_allocate(int device, size_t nbytes);
// As a caching allocator frees: work on other streams that is not ordered before `stream` breaks
// the rules.
void fake_cuda_free(void* address, void* stream);
void* fake_cuda_make_stream(int device);
void fake_cuda_destroy_stream(void* stream);
// Work on the caller's stream: takes `microseconds`, then writes `value` to the range, or reads it
// for value < 0. device: for the default stream (stream == NULL), whose it is.
void fake_cuda_compute(void* stream, int device, void* address, size_t nbytes, int value,
                       unsigned microseconds);
void fake_cuda_wait(void* stream, int device);
// Work on the caller's stream that does not end before fake_cuda_let_go().
void fake_cuda_hold(void* stream, int device);
void fake_cuda_let_go(void);
// The devices report this attribute, as those do whose memory is the host's: 18 (integrated) or 100
// (uses the host's page tables); 0: none of them.
void fake_cuda_unify(int attribute);
// Copies may use memory that is not pinned: they then have run, or read their source, when the call
// returns.
void fake_cuda_allow_pageable(int allowed);
// Copies that obey no stream order, for filling and checking; the ranges must be at rest.
void fake_cuda_write(void* address, const void* from, size_t nbytes);
void fake_cuda_read(const void* address, void* to, size_t nbytes);
// Kernels that are started from now on do nothing.
void fake_cuda_break_kernels(int broken);
// As FAKE_CUDA_MODEL; an empty text takes it away. REQUIRES: no copy is under way.
void fake_cuda_model(const char* text);
// What the engines of the model did since the last report, as JSON.
const char* fake_cuda_report(void);
// Copies to a device may not carry these bytes; nothing is forbidden for 0.
void fake_cuda_forbid(const void* bytes, size_t nbytes);
// The stream behaves as if it captured a graph.
void fake_cuda_set_capturing(void* stream, int device, int capturing);

#ifdef __cplusplus
}
#endif
