// How long things take on the device that the fake driver stands for: its copy engines, its
// kernels, allocation, pinning. Off unless FAKE_CUDA_MODEL is set, as "gbps=2,alloc_us=3000":
//   gbps, down_gbps    GB/s of one copy engine, to the device and back (down_gbps: as gbps)
//   copy_us            of each copy, beside its bytes
//   engines            copy engines per device and direction (1)
//   host_gbps          all devices together, each direction
//   call_us            of each driver call; the processor is busy meanwhile
//   pin_us_per_mib     of memory that is registered or allocated pinned, one such call at a time
//   alloc_us, alloc_us_per_mib   of memory that the caller allocates
//   kernel_gbps, launch_us       of kernels
//   jit_ms             of loading a module
//   discard=1          copies above 4 KiB move no bytes, and kernels do nothing but to take every
//                      chunk for genuine: to be set once they are tested
// An engine is busy until a time of its clock; a copy begins when both it and its stream are free.
// Threads that wake up late delay what is seen, and not the engine.
//
// With a model on, sources of copies have no checksums: these would cost as much as the copies.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fake_cuda {

enum class Engine : uint8_t { none, up, down, kernel };

// What an operation costs its engine.
struct Cost {
  Engine engine = Engine::none;
  uint64_t nbytes = 0;
  unsigned count = 0;  // copies, or launches
};

class LinkModel {
 public:
  using Clock = std::chrono::steady_clock;

  explicit LinkModel(int devices);

  bool is_on() const noexcept { return on_; }
  bool discards() const noexcept { return discard_; }
  bool discards(uint64_t nbytes) const noexcept { return discard_ && nbytes > 4096; }

  // Sets a model, or none for an empty text.
  void configure(const char* text);

  // Books the operation; when it will be over.
  Clock::time_point book(int device, const Cost& cost);

  void spend_call() const;
  void pin(uint64_t nbytes);
  void allocate(uint64_t nbytes) const;
  void load_module() const;
  // What is registered now, for the report.
  void note_pinned(uint64_t nbytes) noexcept { pinned_nbytes_ = nbytes; }

  // Of each engine that was used since the last report, as JSON: bytes, busy, first, last and the
  // longest gap in seconds; and the bytes that were pinned when the first copy began.
  std::string report();

 private:
  struct Queue {
    Clock::time_point free_at{};
    Clock::time_point first{}, last{};
    Clock::duration longest_gap{}, busy{};
    uint64_t nbytes = 0;
    uint64_t count = 0;
  };
  static constexpr size_t kKinds = 4;

  Clock::duration length(const Cost& cost) const;

  // Streams look at these while a test sets another model.
  std::atomic<bool> on_{false};
  std::atomic<bool> discard_{false};
  double gbps_ = 0, down_gbps_ = 0, host_gbps_ = 0, kernel_gbps_ = 0;
  double copy_us_ = 0, call_us_ = 0, pin_us_per_mib_ = 0, alloc_us_ = 0, alloc_us_per_mib_ = 0;
  double launch_us_ = 0, jit_ms_ = 0;
  unsigned engines_ = 1;

  std::mutex mutex_;
  std::mutex pinning_;
  std::vector<std::array<std::vector<Queue>, kKinds>> queues_;  // per device and engine
  std::array<Clock::time_point, kKinds> host_free_at_{};
  Clock::time_point since_ = Clock::now();
  uint64_t pinned_nbytes_ = 0;
  uint64_t pinned_at_first_copy_ = 0;
  bool copied_ = false;
};

}  // namespace fake_cuda
