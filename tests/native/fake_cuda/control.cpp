// What tests ask of the fake driver, and what a caller of the library does with its own memory and
// streams.
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

#include "fake_cuda.h"
#include "host_memory.h"
#include "model.h"

#define CONTROL extern "C" __attribute__((visibility("default")))

namespace fake_cuda {
namespace {

using Lock = std::unique_lock<std::mutex>;

std::shared_ptr<StreamTag> callers_stream(void* handle, int device) {
  Model& m = model();
  if (!handle) return m.default_streams.at(static_cast<size_t>(device));
  const auto found = m.streams.find(static_cast<StreamTag*>(handle));
  if (found == m.streams.end()) violation("a test used a stream that does not exist any more");
  return found->second;
}

Block& device_block(const void* address, size_t nbytes) {
  Block* block = model().find(model().device_blocks, address, nbytes);
  if (!block) violation("a test touches device memory that is not allocated");
  return *block;
}

std::byte* bytes_of(Block& block, const void* address) {
  return block.bytes + (static_cast<const std::byte*>(address) - block.address);
}

void count(std::string& text, size_t number, const char* what) {
  if (number == 0) return;
  if (!text.empty()) text += ", ";
  text += std::to_string(number) + " " + what + (number > 1 ? "s" : "");
}

// The end of the process that started the threads: every call fails from here on, as with the real
// driver.
__attribute__((destructor)) void deinitialise() {
  Model& m = model();
  if (m.started_by != ::getpid()) return;
  constexpr int kDeinitialised = 4;
  Lock lock(m.mutex);
  m.lost = kDeinitialised;
  m.changed.notify_all();
  for (const auto& stream : m.default_streams) m.close_stream(lock, stream);
  m.default_streams.clear();
}

}  // namespace

CONTROL void fake_cuda_fail(const char* specification) {
  const Lock lock(model().mutex);
  model().parse_faults(specification);
}

CONTROL void fake_cuda_set_delay(unsigned min_us, unsigned max_us) {
  const Lock lock(model().mutex);
  model().min_delay_us = min_us;
  model().max_delay_us = max_us;
}

CONTROL void fake_cuda_reset() {
  Lock lock(model().mutex);
  if (model().lost != 0) {  // what was enqueued is dropped; then all is at rest
    for (const auto& [handle, stream] : model().streams) {
      model().changed.wait(lock,
                           [&stream = stream] { return stream->completed == stream->enqueued; });
      model().host.merge(stream->clock);
    }
  }
  model().faults.clear();
  model().calls.clear();
  model().lost = 0;
  model().unified = 0;
}

CONTROL void fake_cuda_break_kernels(int broken) {
  const Lock lock(model().mutex);
  model().wrong_kernels = broken != 0;
}

CONTROL unsigned fake_cuda_calls(const char* name) {
  const Lock lock(model().mutex);
  return model().calls[name];
}

CONTROL const char* fake_cuda_leaks() {
  static thread_local std::string text;
  const Lock lock(model().mutex);
  text.clear();
  size_t streams = 0;
  for (const auto& [handle, stream] : model().streams) streams += !stream->of_caller;
  size_t contexts = 0;
  for (const auto& context : model().contexts) contexts += context->retained;
  count(text, streams, "stream");
  count(text, model().events.size(), "event");
  count(text, model().host_blocks.size(), "stretch of pinned memory");
  size_t allocations = 0;
  for (const auto& [address, block] : model().device_blocks) allocations += block->allocated;
  count(text, allocations, "allocation");
  count(text, model().modules.size(), "module");
  count(text, contexts, "retained context");
  return text.c_str();
}

CONTROL void fake_cuda_forget_leaks() {
  const Lock lock(model().mutex);
  model().events.clear();
  model().modules.clear();
  for (const auto& [address, block] : model().device_blocks) block->allocated = false;
  model().host_blocks.clear();
  for (const auto& [handle, stream] : model().streams) stream->of_caller = true;
  for (const auto& context : model().contexts) context->retained = 0;
}

CONTROL void fake_cuda_model(const char* text) { model().link->configure(text); }

CONTROL void fake_cuda_forbid(const void* bytes, size_t nbytes) {
  const Lock lock(model().mutex);
  const auto* const begin = static_cast<const std::byte*>(bytes);
  model().forbidden.assign(begin, begin + nbytes);
}

CONTROL const char* fake_cuda_report() {
  static thread_local std::string text;
  text = model().link->report();
  return text.c_str();
}

CONTROL void* fake_cuda_allocate(int device, size_t nbytes) {
  model().link->allocate(nbytes);
  const Lock lock(model().mutex);
  auto block = std::make_unique<Block>();
  map_device(*block, nbytes);
  block->device = device;
  std::byte* address = block->address;
  model().device_blocks[address] = std::move(block);
  return address;
}

CONTROL void fake_cuda_free(void* address, void* stream) {
  const Lock lock(model().mutex);
  const auto found = model().device_blocks.find(static_cast<std::byte*>(address));
  if (found == model().device_blocks.end()) violation("device memory was freed twice");
  Block& block = *found->second;
  if (model().lost != 0) {  // its streams may be in the middle of anything: the bytes stay
    static_cast<void>(found->second.release());
    model().device_blocks.erase(found);
    return;
  }
  const auto freeing = callers_stream(stream, block.device);
  model().require_rest(block, freeing->clock, "device memory was freed under a copy");
  const std::shared_ptr<Block> gone = std::move(found->second);
  model().device_blocks.erase(found);
  model().enqueue(freeing,
                  {[gone] {  // work on this stream may still use it: the bytes go after that
                     unmap(gone->address, gone->nbytes);
                     unmap(gone->bytes, gone->nbytes);
                   },
                   {}});
}

CONTROL void* fake_cuda_make_stream(int device) {
  const Lock lock(model().mutex);
  return model().make_stream(device, true).get();
}

CONTROL void fake_cuda_destroy_stream(void* stream) {
  Lock lock(model().mutex);
  model().close_stream(lock, callers_stream(stream, 0));
}

CONTROL void fake_cuda_compute(void* stream, int device, void* address, size_t nbytes, int value,
                               unsigned microseconds) {
  const Lock lock(model().mutex);
  const auto kept = callers_stream(stream, device);
  Block& block = device_block(address, nbytes);
  model().note_access(block, address, nbytes, *kept, value >= 0);
  std::byte* bytes = bytes_of(block, address);
  model().enqueue(kept, {[=] {
                           std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
                           if (value >= 0) std::memset(bytes, value, nbytes);
                         },
                         {}});
}

CONTROL void fake_cuda_hold(void* stream, int device) {
  const Lock lock(model().mutex);
  model().held = true;
  model().enqueue(callers_stream(stream, device), {{}, [] { return !model().held; }});
}

CONTROL void fake_cuda_let_go() {
  const Lock lock(model().mutex);
  model().held = false;
  model().changed.notify_all();
}

CONTROL void fake_cuda_unify(int attribute) {
  const Lock lock(model().mutex);
  model().unified = attribute;
}

CONTROL void fake_cuda_allow_pageable(int allowed) {
  const Lock lock(model().mutex);
  model().pageable_allowed = allowed != 0;
}

CONTROL void fake_cuda_wait(void* stream, int device) {
  Lock lock(model().mutex);
  EventTag now;
  model().record(now, callers_stream(stream, device));
  model().wait_for_record(lock, now.record);
}

CONTROL void fake_cuda_write(void* address, const void* from, size_t nbytes) {
  const Lock lock(model().mutex);
  Block& block = device_block(address, nbytes);
  model().require_rest(block, {}, "a test wrote to device memory at work");
  std::memcpy(bytes_of(block, address), from, nbytes);
}

CONTROL void fake_cuda_read(const void* address, void* to, size_t nbytes) {
  const Lock lock(model().mutex);
  Block& block = device_block(address, nbytes);
  model().require_rest(block, {}, "device memory was read before its copies had run");
  std::memcpy(to, bytes_of(block, address), nbytes);
}

CONTROL void fake_cuda_set_capturing(void* stream, int device, int capturing) {
  const Lock lock(model().mutex);
  callers_stream(stream, device)->capturing = capturing != 0;
}

}  // namespace fake_cuda
