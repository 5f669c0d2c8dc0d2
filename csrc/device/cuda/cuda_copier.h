// A worker's copier to a CUDA device: up to three pinned buffers, a stream, and the events of the
// buffers. See device/copy_engine.h for the contract.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "device/copy_engine.h"
#include "device/cuda/cuda_device.h"

namespace tensorizer::device::cuda {

// What the copiers of one engine share with it.
struct CopierState {
  CopierState(Device& on, std::shared_ptr<PinnedBuffers> from, Context in, OpenOnDevice open)
      : device(on), buffers(std::move(from)), context(in), open_on_device(open) {}

  Device& device;
  const std::shared_ptr<PinnedBuffers> buffers;
  const Context context;
  const OpenOnDevice open_on_device;
  Event fence = nullptr;            // copies wait for its latest record
  std::atomic<uint64_t> fences{0};  // how often it was recorded
  std::atomic<bool> cancelled{false};
  Mutex mutex;
  CondVar changed;
  unsigned copiers GUARDED_BY(mutex) = 0;
};

class CudaCopier final : public Copier {
 public:
  CudaCopier(CopierState& shared, bool secret);
  ~CudaCopier() override;

  std::span<std::byte> try_acquire() override;
  void wait(const std::stop_token& stop) override;
  bool has_in_use() const noexcept override { return !in_use_.empty(); }
  void give_back_unused() noexcept override;
  void pass_fence(const std::stop_token& stop) override;
  void send(std::span<const CopyPiece> pieces, const std::stop_token& stop) override;
  size_t most_chunks_to_open(const std::stop_token& stop) override;
  std::span<ChunkToOpen> chunks_to_open(const std::stop_token& stop) override;
  void send_to_open(std::span<const CopyPiece> pieces, size_t chunks,
                    const std::function<void(size_t)>& refuse,
                    const std::stop_token& stop) override;
  void begin_fetch(std::span<const CopyPiece> pieces, const std::stop_token& stop) override;
  void end_fetch(const std::stop_token& stop) override;
  void finish(const std::stop_token& stop) override;

 private:
  struct Use {
    unsigned buffer = 0;
    bool copies = false;     // some were enqueued; its event tells when they are done
    bool described = false;  // its chunks may have been
    size_t chunks = 0;       // that the device was asked to open
    std::function<void(size_t)> refuse;
  };

  template <class Fn>
  auto in_context(Fn&& fn) const;
  void enqueue(std::span<const CopyPiece> pieces, Direction direction,
               const std::function<void(Stream, const CopyWithTables&)>& around,
               const std::stop_token& stop);
  void check_pieces(std::span<const CopyPiece> pieces) const;
  void wait_for_line(const std::stop_token& stop);
  const Kernels* find_kernels(const std::stop_token& stop);
  void forget_chunks(const Use& use) const noexcept;
  void give_back(unsigned buffer) noexcept;
  Result settle() noexcept;

  CopierState& shared_;
  const bool secret_;
  PinnedBuffers& buffers_;
  std::deque<Use> in_use_;  // oldest first
  std::vector<unsigned> spare_;
  uint64_t fences_passed_ = 0;
  const Kernels* kernels_ = nullptr;  // null: the host opens chunks, up to now
};

// Asks until the event has happened, or the stop comes. Throws Error: cancelled, device. `action`
// says what is waited for. REQUIRES: the device's context is current.
void wait_for_event(const Driver& driver, Event event, const std::stop_token& stop,
                    const std::atomic<bool>& cancelled, const char* action);

// Calls `fn`; an error gets the device's name.
template <class Fn>
auto naming(const Device& device, Fn&& fn) {
  try {
    return fn();
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    throw Error(error.code(), device.label() + ": " + error.what());
  }
}

}  // namespace tensorizer::device::cuda
