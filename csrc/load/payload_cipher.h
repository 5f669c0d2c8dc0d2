// The ciphers of the payloads of one load: keys, nonces and MACs from the record headers. A
// record's cipher is set once, by the worker that reads its header; others wait for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

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

  // How many chunks of the stretch a device would open, all of them: 0 where it leaves one of them
  // to the host. `address`: of the device, where the ciphertext will lie, or any that is aligned as
  // that one will be.
  // REQUIRES: they do not straddle pieces.
  size_t chunks_for_device(uint32_t target, uint64_t nbytes, uint64_t address) const noexcept;

  // Fills in what a device needs to open them. REQUIRES: chunks_for_device() counted them, and
  // there is room.
  void describe(uint32_t target, uint64_t offset, uint64_t nbytes, const std::byte* address,
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
