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
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <vector>

#include "core/fork.h"
#include "crypto/authentication.h"
#include "crypto/secret_key.h"
#include "device/copy_engine.h"
#include "device/tensor_memory.h"
#include "digest/digest.h"
#include "format/annex.h"
#include "format/tensor_path.h"
#include "io/range_sink.h"
#include "save/save_plan.h"

namespace tensorizer::save {

struct SaveOptions {
  digest::HashChoice hashes;
  unsigned max_workers = 0;                         // 0: as many as are useful
  std::shared_ptr<const crypto::SecretKey> key;     // set: encrypt
  std::optional<format::KeyDerivation> derivation;  // how the key came from a passphrase
  std::vector<format::OwnedPair> metadata{};        // sealed where there is a key
  std::shared_ptr<const crypto::Signer> signer{};   // signs the file, each time it is published
  bool binds_records = false;  // to the index digest, also where no key or signer needs that

  // Whether the file says what its record headers have to be.
  bool digests_headers() const noexcept { return binds_records || key || signer; }
};

// A tensor of the call that has a second name.
struct TieToWrite {
  format::TensorPath alias;
  format::TensorPath target;  // a tensor of the call
  bool listed = false;        // the alias is one too
};

// Where a record of the call lies, and the digests that it states.
struct RecordFacts {
  uint64_t data_offset = 0;  // absolute in the container
  std::optional<uint32_t> crc32;
  std::optional<digest::Sha256Digest> sha256;
};

class SaveSession {
 public:
  // The container starts at `start` of the sink.
  SaveSession(std::shared_ptr<io::RangeSink> sink, uint64_t start, const SaveOptions& options);
  ~SaveSession();

  // True where a call with `tensors` takes a few milliseconds at most: little data, room in the
  // index, and nothing that has to be synced. `growing` as for begin_call().
  bool is_brief(std::span<const TensorToWrite> tensors, bool growing) const;
  bool call_is_brief() const noexcept;  // the call that was begun

  // Plans a call; nothing is written. `paths` are the decoded names of `tensors`. `growing`: more
  // calls will follow (single tensors), so room is left in the index, and the sink may let the
  // content wait for that of later calls. Throws Error(invalid_argument), with the session
  // unchanged, for names in use and fields that do not fit. A sink that takes bytes in order gets
  // the head of the file now; for what cannot be written like that Error(io) is thrown.
  void begin_call(std::vector<TensorToWrite> tensors, std::span<const format::TensorPath> paths,
                  std::span<const TieToWrite> ties, bool growing, const std::stop_token& stop);

  // Text to keep from the next call on, besides that of the options; "" forgets it. To be put back
  // before abort_call() where that call fails.
  void set_metadata(const std::string& key, const std::string& value);

  // Writes the next records of the current call, headers and hashes included: every one is handed
  // over once, in order, those without data too. The bytes are only read, and no longer needed on
  // return. `engine` serves device memory. See record_writer.h.
  void write_payloads(std::span<const device::TensorMemory> payloads, device::CopyEngine* engine,
                      const std::stop_token& stop);

  // The records of the current call, in order. REQUIRES: all payloads were handed over, and
  // finish_call() was not called yet. A later call may move them.
  std::vector<RecordFacts> records() const;

  // The records are complete content now: index, annex, end mark and prologue are written and the
  // sink publishes, here or, where it may wait, in a later call. After a failure abort_call() must
  // follow.
  void finish_call(const std::stop_token& stop);

  // Forgets the current call. What earlier calls completed stays valid.
  void abort_call() noexcept;

  // Publishes what waits and closes the sink, also where one of them fails; no call follows.
  void finish(const std::stop_token& stop);

  // Closes without completing, but publishes what waits; no call follows.
  void abandon() noexcept;

  // Of the content that was published last, if the file says what its record headers have to be.
  const std::optional<digest::Sha256Digest>& index_digest() const noexcept { return digest_; }
  uint64_t tensor_nbytes() const noexcept { return head_.prologue.tensor_size; }
  uint64_t published_nbytes() const noexcept;  // the whole container; 0: nothing is published
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }

 private:
  struct Call;

  // How the content is published.
  enum class Publish : uint8_t {
    create,    // nothing is published yet: the index, then the prologue
    append,    // entries behind those of the published index, then the prologue
    replace,   // the whole head, in a new file that takes the place of the published one
    in_place,  // the whole head, over the published one, with a single write: where there can be no
               // new file, or no room for one
  };

  // The layout of the complete content, and how much of its index is in the file.
  struct Head {
    format::Prologue prologue;
    uint64_t end = 0;             // first byte behind the last record
    uint64_t room = 0;            // bytes reserved for the index; 0: no layout yet
    uint64_t index_nbytes = 0;    // of all entries
    bool indexed = false;         // the file has an index in this place and form, with
    size_t written = 0;           // so many entries of
    uint64_t written_nbytes = 0;  // so many bytes
  };

  format::Nonce draw_nonce();
  format::AnnexToWrite annex_with(std::span<const format::OwnedPair> more_ties) const;
  // Of the annex with so many more entries and ties; 0: there is none.
  uint64_t annex_nbytes_with(size_t more_entries,
                             std::span<const format::OwnedPair> more_ties) const;
  bool has_annex() const noexcept;
  format::Signatures sign(const digest::Sha256Digest& digest);
  void digest_headers(const Call& call);
  std::vector<std::byte> seal_metadata();
  uint64_t index_nbytes_with(std::span<const TensorToWrite> tensors, bool tagged) const;
  void make_room(Call& call, bool growing, const std::stop_token& stop);
  void relayout(Call& call, uint64_t room, const std::stop_token& stop);
  void move_records(uint64_t distance) noexcept;
  void place_records(Call& call);
  void check_order() const;
  void take_entries(Call& call);
  Publish how_to_publish() const noexcept;
  void publish(const std::stop_token& stop);
  bool copies_to_new_file(const std::stop_token& stop);
  void publish_waiting(const std::stop_token& stop);
  void move_content(uint64_t distance, const std::stop_token& stop);
  void write_new_entries(const std::stop_token& stop);
  void write_head(Publish how, const std::stop_token& stop);
  std::array<std::byte, format::kPrologueNbytes> stored_prologue() const;
  void take_back(const Head& before) noexcept;
  void restore_head() noexcept;
  void undo(Call& call) noexcept;
  uint64_t waiting_nbytes() const noexcept { return head_.end - published_end_; }

  std::shared_ptr<io::RangeSink> sink_;
  const uint64_t start_;
  const SaveOptions options_;
  std::vector<format::OwnedPair> metadata_;
  const OwnerProcess owner_;                   // writes the file; a forked child does not
  std::optional<crypto::SecretKey> tag_key_;   // derived from the key of encrypted files
  std::optional<crypto::SecretKey> mark_key_;  // likewise
  format::PathSet paths_{Errc::invalid_argument};
  std::vector<SavedEntry> entries_;
  std::vector<format::OwnedPair> ties_;  // stored names of aliases and targets
  // Bytes 8 to 15 of all first nonces: no two records share them, so no two chunks meet.
  std::set<std::array<std::byte, 8>> nonces_;
  Head head_;
  // Of the published content; 0: nothing is published.
  uint64_t published_end_ = 0;
  std::array<std::byte, format::kPrologueNbytes> published_prologue_{};
  bool published_annex_ = false;
  // Set while the prologue in the file may be another one than the published one; after in_place,
  // the index too.
  std::optional<Publish> unfinished_;
  // Set while the sink writes a new file and the published one is as it was: how far the records
  // have moved in it.
  std::optional<uint64_t> moved_by_;
  std::optional<digest::Sha256Digest> digest_;  // of the index that was written last
  std::unique_ptr<Call> call_;
  std::atomic<uint64_t> nbytes_done_{0};
};

}  // namespace tensorizer::save
