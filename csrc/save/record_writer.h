// Writes the payloads of planned records and their headers: digested, and encrypted where there is
// a key. A record without a header is a payload alone, as in a .safetensors file.
//
// Plain tensors in host memory are written from where they are and hashed there. What passes
// through memory of ours on its way (encrypted, or on a device) is copied once; digest, ciphertext
// and file are made of that copy, so they agree whatever the caller does to the tensor meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <stop_token>

#include "crypto/secret_key.h"
#include "device/copy_engine.h"
#include "device/tensor_memory.h"
#include "format/record_header.h"
#include "io/range_sink.h"
#include "save/save_plan.h"

namespace tensorizer::save {

// How much one worker takes at once when payloads are written or copied: a multiple of the cipher's
// chunk.
inline constexpr uint64_t kUnitNbytes = uint64_t{8} << 20;

struct RecordsToWrite {
  std::span<PlannedRecord> records;  // in the order of the file; hashes and MACs are filled in
  std::span<const device::TensorMemory> payloads;  // of the records, each of the planned size
  device::CopyEngine* engine = nullptr;            // set iff they are on its device
  digest::HashChoice hashes{.crc32 = false, .sha256 = false};
  const crypto::SecretKey* key = nullptr;  // of encrypted records
  unsigned max_workers = 0;                // 0: as many as are useful
  std::atomic<uint64_t>& nbytes_done;

  // Whether the payloads are copied to memory of ours on their way.
  bool is_staged() const noexcept { return engine != nullptr || key != nullptr; }
};

// Returns when all of it is in the sink. REQUIRES: nothing is hashed or encrypted where the sink
// takes bytes in order: headers go first there. Throws Error: io, device, out_of_memory, cancelled.
void write_records(const RecordsToWrite& job, io::RangeSink& sink, const std::stop_token& stop);

}  // namespace tensorizer::save
