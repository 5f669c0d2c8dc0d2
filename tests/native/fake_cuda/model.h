// The state behind the fake driver: streams that are threads, memory, and who is ordered after
// whom.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "link.h"

namespace fake_cuda {

// Ends the process: the program under test broke a rule of CUDA.
[[noreturn]] void violation(const std::string& what);

// How many operations of each stream are ordered before something (a vector clock over stream
// numbers).
class Clock {
 public:
  uint64_t of(int stream) const {
    const auto found = counts_.find(stream);
    return found == counts_.end() ? 0 : found->second;
  }
  void advance(int stream, uint64_t count) { counts_[stream] = std::max(of(stream), count); }
  void merge(const Clock& other) {
    for (const auto& [stream, count] : other.counts_) advance(stream, count);
  }

 private:
  std::map<int, uint64_t> counts_;
};

struct Access {
  uint64_t begin;  // in its block
  uint64_t end;
  int stream;
  uint64_t number;  // of the operation on that stream
  bool writes;
};

// A stretch of device memory or of pinned host memory, with the accesses that the host has not
// waited for.
struct Block {
  std::byte* address = nullptr;  // what programs see; inaccessible for device memory
  std::byte* bytes = nullptr;    // where the bytes are
  uint64_t nbytes = 0;
  int device = -1;         // -1: host memory
  bool allocated = false;  // by the program under test, from the driver
  std::unordered_map<uint64_t, std::vector<Access>> recent;  // by 64 KiB page
};

struct ContextTag {
  int device;
  unsigned retained = 0;
};

struct Operation {
  std::function<void()> run;      // without the lock
  std::function<bool()> may_run;  // under the lock; empty: at once
  Cost cost = {};
};

struct StreamTag {
  int number = 0;
  int device = 0;
  bool of_caller = false;
  bool capturing = false;
  bool closing = false;
  bool running = false;  // something that touches memory, not a wait
  uint64_t enqueued = 0;
  uint64_t completed = 0;
  Clock clock;
  std::deque<Operation> queue;
  std::thread worker;
};

// The state of a stream when an event was recorded on it.
struct Record {
  std::shared_ptr<StreamTag> stream;
  uint64_t number = 0;
  Clock clock;
};

// The module that a program loaded, and its kernels.
struct ModuleTag {
  int device = 0;
};
struct FunctionTag {
  ModuleTag* module;
  std::string name;
};

struct EventTag {
  int device = 0;
  std::shared_ptr<Record> record;
};

struct Fault {
  std::string name;
  unsigned countdown;
  int code;
  bool sticky;
};

// Everything; guarded by `mutex` unless said otherwise. Never destroyed.
struct Model {
  Model();

  std::mutex mutex;
  std::condition_variable changed;

  int version = 13000;
  int devices = 2;
  bool can_register = true;
  int unified = 0;  // see fake_cuda_unify
  bool any_address = false;
  std::atomic<bool> wrong_kernels{false};
  bool pageable_allowed = false;     // copies may use host memory that is not pinned
  std::vector<std::byte> forbidden;  // see fake_cuda_forbid
  bool held = false;                 // see fake_cuda_hold
  unsigned min_delay_us = 0;
  unsigned max_delay_us = 0;
  std::mt19937 random;

  std::unique_ptr<LinkModel> link;  // internally locked

  int lost = 0;  // what every call returns once the device is lost
  std::vector<Fault> faults;
  std::map<std::string, unsigned> calls;

  int started_by = 0;      // pid
  int initialised_by = 0;  // pid
  std::vector<std::unique_ptr<ContextTag>> contexts;
  std::map<StreamTag*, std::shared_ptr<StreamTag>> streams;
  std::vector<std::shared_ptr<StreamTag>> default_streams;
  std::set<EventTag*> events;
  std::set<ModuleTag*> modules;
  std::vector<std::unique_ptr<FunctionTag>> functions;         // never forgotten
  std::map<std::byte*, std::unique_ptr<Block>> device_blocks;  // by address
  std::map<std::byte*, std::unique_ptr<Block>> host_blocks;
  std::set<std::byte*> control;  // device blocks with what kernels are told
  int next_stream = 1;
  Clock host;  // what the host has waited for; every later operation is ordered after it

  std::shared_ptr<StreamTag> make_stream(int device, bool of_caller);
  void close_stream(std::unique_lock<std::mutex>& lock, const std::shared_ptr<StreamTag>& stream);

  // Adds an operation to the stream; returns its number.
  uint64_t enqueue(const std::shared_ptr<StreamTag>& stream, Operation operation);
  void record(EventTag& event, const std::shared_ptr<StreamTag>& stream);
  void wait_for_record(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Record>& record);

  // nullptr where the range is in no live block.
  Block* find(std::map<std::byte*, std::unique_ptr<Block>>& blocks, const void* address,
              uint64_t nbytes);
  // The operation that will be enqueued next on `stream` touches the range.
  void note_access(Block& block, const void* address, uint64_t nbytes, StreamTag& stream,
                   bool writes);
  // Nothing that the host has not waited for touches the range.
  bool is_at_rest(const Block& block, const void* address, uint64_t nbytes) const;
  // Ends the process unless every access to the block is ordered before `clock` or known to the
  // host.
  void require_rest(const Block& block, const Clock& clock, const char* what) const;

  // The code an injected failure gives this call, 0 for none. Counts the call.
  int fault(const std::string& name);
  void parse_faults(const std::string& specification);

 private:
  void run_stream(StreamTag& stream);
};

Model& model();

}  // namespace fake_cuda
