// The ciphers of the payloads of one load: keys, nonces and MACs from the record headers. A
// record's cipher is set once, by the worker that reads its header; others wait for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "core/sync.h"
#include "device/chunk_to_open.h"
#include "format/record_header.h"
#include "load/key_ring.h"
#include "load/open_index.h"

namespace tensorizer::load {

class PayloadCipher {
 public:
  PayloadCipher(const OpenedIndex& opened, KeyRing& keys, size_t targets);
  ~PayloadCipher();

  // From the header of a target. `steps`: pieces that its payload comes in. Throws Error: crypto,
  // authentication, malformed, out_of_memory.
  void accept(uint32_t target, const format::RecordHeader& header, uint32_t steps);

  // Bytes of its chunks, all but the last; 0 for tensors without data. REQUIRES: accept() has
  // returned.
  uint64_t chunk_nbytes(uint32_t target) const noexcept;

  // Whether chunks straddle the pieces that the payload comes in, so that none of these can be
  // opened by itself. Source: docs/format.md 7; no writer that was released makes such files.
  bool straddles(uint32_t target) const noexcept;

  // Decrypts chunks that begin at `offset` of the payload: out of place, or in place where both are
  // the same memory. Throws Error: crypto (then `plain` holds no plaintext), cancelled.
  void open(uint32_t target, uint64_t offset, std::span<const std::byte> cipher, std::byte* plain,
            const std::stop_token& stop) const;

  // Fills in what a device needs to open the chunks that begin at `offset`, `nbytes` together, with
  // their ciphertext at `address` of the device; how many they are. 0 where the device does not
  // open them, or `room` is not enough for all. REQUIRES: they do not straddle pieces.
  size_t describe(uint32_t target, uint64_t offset, uint64_t nbytes, const std::byte* address,
                  std::span<device::ChunkToOpen> room) const noexcept;

  // Error(crypto) as open() throws it, for the chunk with that number.
  [[noreturn]] void refuse(uint32_t target, uint64_t chunk) const;

 private:
  struct Target;
  std::vector<std::unique_ptr<Target>> targets_;  // null for tensors without data
  const OpenedIndex& opened_;
  KeyRing& keys_;
};

}  // namespace tensorizer::load
