// Writes one container through a sink, call by call. Confined to one thread; workers are its own.
//
// A call is planned whole (names checked, records placed), then its payloads are handed over in
// batches, then it is finished: index and prologue are written last and the sink publishes. A call
// that fails leaves what earlier calls published as it was.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <stop_token>
#include <vector>

#include "crypto/secret_key.h"
#include "device/copy_engine.h"
#include "device/destination.h"
#include "format/annex.h"
#include "format/tensor_path.h"
#include "io/range_sink.h"
#include "save/save_plan.h"

namespace tensorizer::save {

struct SaveOptions {
  format::HashChoice hashes;
  unsigned max_workers = 0;                         // 0: as many as are useful
  std::shared_ptr<const crypto::SecretKey> key;     // set: encrypt
  std::optional<format::KeyDerivation> derivation;  // how the key came from a passphrase
  std::vector<format::OwnedPair> metadata{};        // sealed where there is a key
};

// What a call says of a tensor that another one of the file stands for.
struct TieToWrite {
  format::TensorPath alias;
  format::TensorPath target;
  bool listed = false;  // the alias is among the call's tensors too
};

// Where the bytes of one planned record are. Host memory, or device memory with the session's
// engine.
struct PayloadToWrite {
  uint32_t record;  // number within the call
  device::Destination from;
};

class SaveSession {
 public:
  // The container starts at `start` of the sink.
  SaveSession(std::shared_ptr<io::RangeSink> sink, uint64_t start, const SaveOptions& options);
  ~SaveSession();

  // Plans a call; nothing is written. `paths` are the decoded names of `tensors`. `growing`: more
  // calls will follow (single tensors), so room is left in the index. Throws
  // Error(invalid_argument), with the session unchanged, for names in use and fields that do not
  // fit. REQUIRES: the targets of `ties` are tensors of this call.
  void begin_call(std::vector<TensorToWrite> tensors, std::span<const format::TensorPath> paths,
                  std::span<const TieToWrite> ties, bool growing, const std::stop_token& stop);

  // Writes records of the current call, headers and hashes included. Every record is handed over
  // once, in order, those without data too; the bytes are only read, and no longer needed on
  // return. `engine` serves device memory.
  void write_payloads(std::span<const PayloadToWrite> payloads, device::CopyEngine* engine,
                      const std::stop_token& stop);

  // Index and annex, end mark, prologue; then the sink publishes.
  void finish_call(const std::stop_token& stop);

  // Forgets the current call. The content that was last published stays valid.
  void abort_call() noexcept;

  // Closes the sink; no call follows.
  void finish(const std::stop_token& stop) { sink_->finish(stop); }

  // Closes without completing; no call follows.
  void abandon() noexcept { sink_->abandon(); }

  uint64_t tensor_nbytes() const noexcept { return prologue_.tensor_size; }
  uint64_t end() const noexcept { return end_; }  // of the published content
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }

 private:
  class Worker;
  struct Call;

  PlannedRecord& record_of(const PayloadToWrite& payload);
  format::Nonce draw_nonce();
  format::AnnexToWrite annex_of(std::span<const format::OwnedPair> more_ties) const;
  std::vector<std::byte> seal_metadata();
  uint64_t sealed_overhead() const noexcept;
  uint64_t index_nbytes(const Call& call) const;
  void make_room(Call& call, bool growing, const std::stop_token& stop);
  void relayout(uint64_t room, const std::stop_token& stop);
  void place_records(Call& call);
  void write_index(size_t first, const format::Prologue& prologue, const std::stop_token& stop);
  void restore_head() noexcept;
  void forget(const Call& call) noexcept;
  void write_end_and_publish(const std::stop_token& stop);

  std::shared_ptr<io::RangeSink> sink_;
  const uint64_t start_;
  const SaveOptions options_;
  CryptChoice crypt_;
  format::PathRegistry paths_;
  format::Prologue prologue_;
  std::vector<SavedEntry> entries_;
  std::vector<format::OwnedPair> ties_;  // of the published content
  using NoncePrefix = std::array<std::byte, 16>;
  std::set<NoncePrefix> nonces_;   // upper parts of all first nonces: no two records share one
  uint64_t index_room_ = 0;        // reserved bytes; 0: no layout yet
  uint64_t index_used_ = 0;        // bytes of the entries on disk
  bool head_stale_ = false;        // index and prologue on disk may be those of a failed call
  uint64_t end_;                   // first byte behind the last record
  uint64_t published_nbytes_ = 0;  // of the container, end mark included; 0: nothing published
  std::unique_ptr<Call> call_;
  std::atomic<uint64_t> nbytes_done_{0};
};

}  // namespace tensorizer::save
