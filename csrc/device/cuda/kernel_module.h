// The kernels of one device, and for each staging buffer what they are told: an area of pinned
// memory that a worker fills and one on the device that it is copied to.
//
// The kernels are the text that scripts/kernels.py made, compiled by the driver when this is made.
// They are used only once they have given on this device what the same source gives on the host:
// a process tests them once for each device.
//
// What stands in the areas is as secret as the plaintext: the device's is zeroed in the order of
// the stream, behind the kernels, the host's by wipe(). No kernel has a secret parameter: those lie
// in memory of the driver that nobody can wipe. Different buffers may be used by different threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/sync.h"
#include "device/chunk_to_open.h"
#include "device/cuda/copy_stream.h"
#include "device/cuda/driver.h"

namespace tensorizer::device::cuda {

// What the self-test of a device's kernels has shown, for as long as the process lives. Internally
// locked.
class SelfTestRecord {
 public:
  // What the kernels gave wrong: they are not used again then. Empty where they passed, nullopt
  // where they were not tested.
  std::optional<std::string> wrong() const;
  void note(std::optional<std::string> wrong);

 private:
  mutable Mutex mutex_;
  std::optional<std::string> wrong_ GUARDED_BY(mutex_);
};

class Kernels {
 public:
  // Tests the kernels, unless `tested` says how that ended. Throws Error(device) where the driver
  // is too old, refuses the module or the memory, or the kernels do not give what they should.
  // REQUIRES: the device's context is current, here, in the destructor and where work is enqueued;
  // nothing that was enqueued runs when it is destroyed.
  Kernels(const Driver& driver, SelfTestRecord& tested, unsigned buffers, uint64_t buffer_nbytes);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Chunks that one buffer has room for.
  size_t room() const noexcept { return room_; }
  // To be filled; first_segment is left to enqueue().
  std::span<ChunkToOpen> chunks(unsigned buffer) const noexcept;

  // Enqueues the copies of a buffer by `copy`, all that opens its first `count` chunks, and the
  // zeroing of the device's area. Throws Error(device), the zeroing enqueued where the driver still
  // takes it; Error(invalid_argument) for more segments than fit.
  void enqueue(Stream stream, unsigned buffer, size_t count, const CopyWithTables& copy) const;

  struct Refused {
    size_t chunk;
    bool ran;  // false: the kernels did not come so far
  };
  // The first chunk that was not opened, once the stream is done.
  std::optional<Refused> first_refused(unsigned buffer, size_t count) const noexcept;

  void wipe(unsigned buffer) const noexcept;

 private:
  friend class SelfTest;

  // The chunks and then, behind the last one that is used, the chunk of each segment; verdicts and
  // partial sums have places of their own. Offsets in an area.
  struct Area {
    std::byte* host;
    DevicePointer device;
    size_t room;  // for chunks, and for segments

    size_t verdicts_at() const noexcept { return room * (sizeof(ChunkToOpen) + sizeof(uint32_t)); }
    size_t partial_at() const noexcept { return verdicts_at() + room * sizeof(uint32_t); }
    size_t nbytes() const noexcept {
      return partial_at() + room * kPartialWords * sizeof(uint32_t);
    }
    ChunkToOpen* chunks() const noexcept { return reinterpret_cast<ChunkToOpen*>(host); }
    uint32_t* verdicts() const noexcept {
      return reinterpret_cast<uint32_t*>(host + verdicts_at());
    }
  };

  Area layout() const noexcept { return {nullptr, 0, room_}; }
  size_t stride() const noexcept { return (layout().nbytes() + 7) / 8 * 8; }
  Area area(unsigned buffer) const noexcept;
  void load();
  void test(SelfTestRecord& tested) const;
  void reserve();
  void release() noexcept;
  void launch(Function function, unsigned blocks, Stream stream, void** parameters) const;
  static uint32_t number_segments(const Area& area, size_t count);
  static Copy chunk_table(const Area& area, size_t count, uint32_t segments) noexcept;
  void enqueue_open(Stream stream, const Area& area, size_t count, uint32_t segments) const;

  const Driver& driver_;
  const unsigned buffers_;
  const size_t room_;  // chunks of a buffer
  Module module_ = nullptr;
  Function mac_ = nullptr;
  Function open_ = nullptr;
  void* host_ = nullptr;
  DevicePointer device_ = 0;
};

}  // namespace tensorizer::device::cuda
