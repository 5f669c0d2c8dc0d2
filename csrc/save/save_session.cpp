#include "save/save_session.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/chain_queue.h"
#include "core/checked_math.h"
#include "core/endian.h"
#include "core/error.h"
#include "core/run_units.h"
#include "core/stop.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"

namespace tensorizer::save {
namespace {

constexpr uint64_t kUnitNbytes = uint64_t{8} << 20;  // a multiple of the cipher chunk
constexpr uint64_t kEndMarkNbytes = 8;
constexpr size_t kUnitRecords = 512;
constexpr uint64_t kBriefNbytes = uint64_t{1} << 20;  // hashed and written in a few milliseconds
constexpr size_t kBriefRecords = 64;

}  // namespace

struct SaveSession::Call {
  std::vector<TensorToWrite> tensors;
  std::vector<PlannedRecord> records;
  std::vector<format::OwnedPair> ties;  // stored names
  format::Prologue prologue;            // as it will be when the call is finished
  Head before;                          // what abort_call() goes back to
  size_t path_mark = 0;
  size_t entry_mark = 0;
  size_t tie_mark = 0;
  uint64_t shift = 0;  // how far the records moved into a new file
  bool aside = false;  // they did, and the published file is as it was
  bool brief = false;
  bool may_wait = false;      // the content need not be published with this call
  uint64_t index_nbytes = 0;  // with the entries of this call
  uint64_t records_end = 0;
  uint32_t written = 0;  // records handed over so far
};

// One write_payloads(): units of whole small records and of pieces of large ones.
class SaveSession::Worker {
 public:
  struct Unit {
    uint32_t first = 0, count = 0;  // payloads; count 0: a piece of payload `first`
    uint64_t offset = 0, nbytes = 0;
    uint32_t step = 0;
  };

  // A record that is written in several pieces; its header follows when the last of them is done.
  struct Large {
    format::HeaderDigest digest;
    std::vector<uint32_t> crcs;
    std::atomic<uint32_t> left{0};  // pieces, plus the chain of SHA-256 steps
    uint32_t next_turn = 0;         // guarded by Shared::turn_mutex
    uint32_t steps = 0;
  };

  struct Shared {
    SaveSession& session;
    std::span<const PayloadToWrite> payloads;
    device::CopyEngine* engine;
    uint64_t unit_nbytes = kUnitNbytes;
    std::vector<Unit> units{};
    std::vector<std::unique_ptr<Large>> large{};  // per payload; null for small ones
    std::unique_ptr<ChainQueue> chains{};
    std::atomic<uint32_t> next_unit{0};
    Mutex turn_mutex{};
    CondVar turn_changed{};
  };

  Worker(Shared& shared, const std::stop_token& stop)
      : shared_(shared), s_(shared.session), stop_(stop) {
    if (shared_.engine != nullptr) lane_ = shared_.engine->make_lane();
  }

  static void cut_units(Shared& shared) {
    uint64_t& unit_nbytes = shared.unit_nbytes;
    if (shared.engine != nullptr)
      unit_nbytes = std::min(
          unit_nbytes, align_down(shared.engine->buffer_nbytes(), format::kCipherChunkNbytes));
    std::vector<uint32_t> steps(shared.payloads.size(), 0);
    shared.large.resize(shared.payloads.size());
    Unit open;
    auto close = [&] {
      if (open.count > 0) shared.units.push_back(open);
      open = Unit{};
    };
    for (uint32_t i = 0; i < shared.payloads.size(); ++i) {
      const uint64_t nbytes = shared.payloads[i].from.nbytes;
      if (nbytes > unit_nbytes) {
        close();
        auto large = std::make_unique<Large>();
        for (uint64_t at = 0; at < nbytes; at += unit_nbytes) {
          shared.units.push_back({i, 0, at, std::min(unit_nbytes, nbytes - at), large->steps++});
        }
        steps[i] = large->steps;
        shared.large[i] = std::move(large);
        continue;
      }
      if (open.count == kUnitRecords || (open.count > 0 && open.nbytes + nbytes > unit_nbytes))
        close();
      if (open.count == 0) open.first = i;
      ++open.count;
      open.nbytes += nbytes;
    }
    close();
    prepare_large(shared, std::move(steps));
  }

  void run() {
    while (true) {
      throw_if_stopped(stop_);
      if (shared_.chains) {
        const ChainQueue::Work pair = shared_.chains->take(false);
        if (pair.count > 0) {
          hash_steps(pair);
          continue;
        }
      }
      // The buffer comes before the unit: whoever has an early one, which others may wait for,
      // waits for no buffer.
      std::span<std::byte> slot;
      if (lane_) slot = device::next_buffer(*lane_, stop_, [] {});
      const uint32_t unit = shared_.next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit >= shared_.units.size()) break;
      process(shared_.units[unit], slot);
    }
    while (shared_.chains) {
      throw_if_stopped(stop_);
      const ChainQueue::Work work = shared_.chains->take_or_wait(stop_);
      if (work.count == 0) break;
      hash_steps(work);
    }
  }

 private:
  static void prepare_large(Shared& shared, std::vector<uint32_t> steps) {
    const format::HashChoice hashes = shared.session.options_.hashes;
    for (uint32_t i = 0; i < shared.payloads.size(); ++i) {
      Large* large = shared.large[i].get();
      if (large == nullptr) continue;
      large->digest =
          format::digest_header(shared.session.record_of(shared.payloads[i]).header, hashes);
      large->crcs.resize(large->steps);
      large->left = large->steps + (hashes.sha256 && shared.engine == nullptr ? 1 : 0);
    }
    if (hashes.sha256 && shared.engine == nullptr)
      shared.chains = std::make_unique<ChainQueue>(std::move(steps));
  }

  void process(const Unit& unit, std::span<std::byte> slot) {
    if (!slot.empty()) fetch(unit);
    if (unit.count > 0) {
      write_small_records(unit, slot);
    } else {
      write_piece(unit, slot);
    }
    s_.nbytes_done_.fetch_add(unit.nbytes, std::memory_order_relaxed);
  }

  // The unit's plaintext in host memory, one span per payload: the caller's memory, or a slot.
  std::span<const std::byte> host_bytes(const Unit& unit, uint32_t i, std::span<std::byte> slot,
                                        uint64_t slot_at) const {
    const device::TensorMemory& from = shared_.payloads[i].from;
    if (!slot.empty()) return slot.subspan(slot_at, unit.count > 0 ? from.nbytes : unit.nbytes);
    return {from.data + unit.offset, unit.count > 0 ? from.nbytes : unit.nbytes};
  }

  void fetch(const Unit& unit) {
    if (unit.nbytes == 0) return;
    std::vector<device::CopyPiece> pieces;
    uint64_t at = 0;
    for (uint32_t i = unit.first; i < unit.first + std::max(unit.count, 1U); ++i) {
      const device::TensorMemory& from = shared_.payloads[i].from;
      const uint64_t nbytes = unit.count > 0 ? from.nbytes : unit.nbytes;
      if (nbytes > 0) pieces.push_back({at, from.data + unit.offset, nbytes});
      at += nbytes;
    }
    lane_->fetch(pieces, stop_);
  }

  // --- small records: hash, encrypt, one gathered write ---

  void write_small_records(const Unit& unit, std::span<std::byte> slot) {
    digest_small(unit, slot);
    slices_.clear();
    if (s_.options_.key) cipher_.resize(kUnitNbytes);
    uint64_t at = 0;
    const uint64_t begin = s_.record_of(shared_.payloads[unit.first]).offset;
    for (uint32_t i = unit.first; i < unit.first + unit.count; ++i) {
      PlannedRecord& record = s_.record_of(shared_.payloads[i]);
      std::span<const std::byte> plain = host_bytes(unit, i, slot, at);
      slices_.emplace_back(record.header.bytes);
      if (record.encrypted) {
        std::span<std::byte> cipher(cipher_.data() + at, plain.size());
        seal_chunks(record, 0, plain, cipher);
        slices_.emplace_back(cipher);
      } else {
        slices_.push_back(plain);
      }
      at += plain.size();
    }
    s_.sink_->write_at(begin, slices_, stop_);
  }

  void digest_small(const Unit& unit, std::span<std::byte> slot) {
    const format::HashChoice hashes = s_.options_.hashes;
    uint64_t at = 0;
    for (uint32_t i = unit.first; i < unit.first + unit.count; i += 2) {
      const bool two = i + 1 < unit.first + unit.count;
      std::span<const std::byte> x = host_bytes(unit, i, slot, at);
      at += x.size();
      format::HeaderDigest a = format::digest_header(header_of(i), hashes);
      if (!two) {
        if (hashes.sha256) a.sha256.update(x);
        fill_hashes(i, a, x);
        break;
      }
      std::span<const std::byte> y = host_bytes(unit, i + 1, slot, at);
      at += y.size();
      format::HeaderDigest b = format::digest_header(header_of(i + 1), hashes);
      if (hashes.sha256) format::Sha256::update_pair(a.sha256, x, b.sha256, y);
      fill_hashes(i, a, x);
      fill_hashes(i + 1, b, y);
    }
  }

  format::HeaderLayout& header_of(uint32_t payload) const {
    return s_.record_of(shared_.payloads[payload]).header;
  }

  void fill_hashes(uint32_t payload, format::HeaderDigest& digest,
                   std::span<const std::byte> plain) {
    if (s_.options_.hashes.crc32) digest.crc32 = format::crc32(digest.crc32, plain);
    store_hashes(header_of(payload), digest);
  }

  void store_hashes(format::HeaderLayout& header, format::HeaderDigest& digest) const {
    if (header.crc32_at != 0) store_le(header.bytes.data() + header.crc32_at, digest.crc32);
    if (header.sha256_at != 0) {
      const format::Sha256Digest value = digest.sha256.finish();
      std::memcpy(header.bytes.data() + header.sha256_at, value.data(), value.size());
    }
  }

  // Chunks of `plain`, which starts at `offset` of the record's payload; MACs go to the header.
  void seal_chunks(PlannedRecord& record, uint64_t offset, std::span<const std::byte> plain,
                   std::span<std::byte> cipher) const {
    for (uint64_t done = 0; done < plain.size(); done += format::kCipherChunkNbytes) {
      const uint64_t chunk = (offset + done) / format::kCipherChunkNbytes;
      const uint64_t n = std::min(format::kCipherChunkNbytes, plain.size() - done);
      const auto nonce = crypto::nonce_plus(crypto::NonceView(record.nonce), chunk);
      auto mac = std::span(record.header.bytes)
                     .subspan(record.header.macs_at + chunk * crypto::kMacNbytes)
                     .first<crypto::kMacNbytes>();
      crypto::seal(cipher.subspan(done, n), mac, plain.subspan(done, n), nonce, *s_.options_.key);
      throw_if_stopped(stop_);
    }
  }

  // --- large records: pieces in parallel, the header last ---

  void write_piece(const Unit& unit, std::span<std::byte> slot) {
    PlannedRecord& record = s_.record_of(shared_.payloads[unit.first]);
    Large& large = *shared_.large[unit.first];
    std::span<const std::byte> plain = host_bytes(unit, unit.first, slot, 0);
    if (s_.options_.hashes.crc32) large.crcs[unit.step] = format::crc32(0, plain);
    if (s_.options_.hashes.sha256 && shared_.engine != nullptr) digest_in_turn(unit, large, plain);
    if (record.encrypted) {
      cipher_.resize(kUnitNbytes);
      std::span<std::byte> cipher(cipher_.data(), plain.size());
      seal_chunks(record, unit.offset, plain, cipher);
      s_.sink_->write_at(record.data_offset() + unit.offset, cipher, stop_);
    } else {
      s_.sink_->write_at(record.data_offset() + unit.offset, plain, stop_);
    }
    if (shared_.chains) shared_.chains->mark_ready({unit.first, unit.step});
    finish_part(unit.first);
  }

  // Bytes in a slot are gone when the slot is given back, so they are hashed in order here.
  void digest_in_turn(const Unit& unit, Large& large, std::span<const std::byte> plain) {
    {
      MutexLock lock(shared_.turn_mutex);
      const bool my_turn = shared_.turn_changed.wait(shared_.turn_mutex, stop_,
                                                     [&] { return large.next_turn == unit.step; });
      if (!my_turn) throw Error(Errc::cancelled, "cancelled");
    }
    large.digest.sha256.update(plain);
    MutexLock lock(shared_.turn_mutex);
    ++large.next_turn;
    shared_.turn_changed.notify_all();
  }

  std::span<const std::byte> step_bytes(ChainQueue::Step step) const {
    const device::TensorMemory& from = shared_.payloads[step.chain].from;
    const uint64_t at = step.step * shared_.unit_nbytes;
    return {from.data + at, std::min(shared_.unit_nbytes, from.nbytes - at)};
  }

  void hash_steps(const ChainQueue::Work& work) {
    Large& a = *shared_.large[work.steps[0].chain];
    if (work.count == 2) {
      Large& b = *shared_.large[work.steps[1].chain];
      format::Sha256::update_pair(a.digest.sha256, step_bytes(work.steps[0]), b.digest.sha256,
                                  step_bytes(work.steps[1]));
    } else {
      a.digest.sha256.update(step_bytes(work.steps[0]));
    }
    for (int i = 0; i < work.count; ++i) {
      const ChainQueue::Step step = work.steps[i];
      if (step.step + 1 == shared_.large[step.chain]->steps) finish_part(step.chain);
    }
    shared_.chains->done(work);
  }

  void finish_part(uint32_t payload) {
    Large& large = *shared_.large[payload];
    if (large.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    PlannedRecord& record = s_.record_of(shared_.payloads[payload]);
    if (s_.options_.hashes.crc32) {
      uint64_t left = record.data_nbytes;
      for (uint32_t crc : large.crcs) {
        const uint64_t n = std::min(shared_.unit_nbytes, left);
        large.digest.crc32 = format::crc32_combine(large.digest.crc32, crc, n);
        left -= n;
      }
    }
    store_hashes(record.header, large.digest);
    s_.sink_->write_at(record.offset, io::ConstSlice(record.header.bytes), stop_);
  }

  Shared& shared_;
  SaveSession& s_;
  const std::stop_token stop_;
  std::unique_ptr<device::Lane> lane_;  // set iff the payloads are on a device
  std::vector<io::ConstSlice> slices_;
  std::vector<std::byte> cipher_;
};

SaveSession::SaveSession(std::shared_ptr<io::RangeSink> sink, uint64_t start,
                         const SaveOptions& options)
    : sink_(std::move(sink)),
      start_(start),
      options_(options),
      metadata_(options.metadata),
      process_(getpid()),
      crypt_{options.derivation} {
  paths_.set_error_is_caller(true);
  head_.prologue.version = options_.key ? format::kVersionEncrypted : format::kVersionPlain;
  head_.end = start;
}

SaveSession::~SaveSession() = default;

PlannedRecord& SaveSession::record_of(const PayloadToWrite& payload) {
  return call_->records[payload.record];
}

// A fresh random nonce whose chunk nonces cannot meet those of another record of this file: the
// upper 16 bytes differ, and the lower 8 are far from overflowing.
format::Nonce SaveSession::draw_nonce() {
  format::Nonce nonce;
  crypto::random_bytes(nonce);
  nonce[7] &= std::byte{0x7F};
  NoncePrefix upper;
  std::copy(nonce.begin() + 8, nonce.end(), upper.begin());
  if (!nonces_.insert(upper).second)
    throw Error(Errc::crypto, "the random generator repeated itself: refusing to reuse a nonce");
  return nonce;
}

bool SaveSession::is_brief(std::span<const TensorToWrite> tensors, bool growing) const {
  if (tensors.size() > kBriefRecords) return false;
  uint64_t nbytes = 0;
  format::Prologue prologue = head_.prologue;
  for (const TensorToWrite& tensor : tensors) {
    if (tensor.data_nbytes > kBriefNbytes) return false;
    nbytes += tensor.data_nbytes;
    prologue = raise_version(prologue, tensor, options_.key != nullptr);
  }
  const bool tagged = prologue.tagged_entries();
  const bool fits =
      head_.room == 0 || (tagged == head_.prologue.tagged_entries() &&
                          index_nbytes_with(tensors, tagged) + annex_nbytes_with({}) <= head_.room);
  return nbytes <= kBriefNbytes && fits &&
         (sink_->prompt() || (growing && sink_->may_wait(waiting_nbytes() + nbytes)));
}

bool SaveSession::call_is_brief() const noexcept { return call_ && call_->brief; }

void SaveSession::begin_call(std::vector<TensorToWrite> tensors,
                             std::span<const format::TensorPath> paths,
                             std::span<const TieToWrite> ties, bool growing,
                             const std::stop_token& stop) {
  auto call = std::make_unique<Call>();
  call->path_mark = paths_.mark();
  call->entry_mark = entries_.size();
  call->tie_mark = ties_.size();
  call->before = head_;
  call->brief = is_brief(tensors, growing);
  try {
    for (const format::TensorPath& path : paths) paths_.add(path);
    for (const TieToWrite& tie : ties) {
      if (!tie.listed) paths_.add(tie.alias);
      call->ties.emplace_back(format::encode_name(tie.alias), format::encode_name(tie.target));
    }
    call->prologue = head_.prologue;
    for (const TensorToWrite& tensor : tensors) {
      call->prologue = raise_version(call->prologue, tensor, options_.key != nullptr);
      call->prologue.tensor_size += tensor.data_nbytes;
    }
    call->prologue.tensor_count += tensors.size();
    call->tensors = std::move(tensors);
    make_room(*call, growing, stop);
    place_records(*call);
    call->may_wait = growing && published_end_ > 0 && !call->aside &&
                     (sink_->may_wait(call->records_end - published_end_) ||
                      (published_annex_ && sink_->relocates_aside()));
    sink_->reserve_head(start_ + format::kPrologueNbytes + head_.room);
    sink_->reserve(call->records_end + kEndMarkNbytes);
  } catch (...) {
    undo(*call);
    throw;
  }
  call_ = std::move(call);
}

// Bytes of the index with `tensors` added; all of it anew where the form of entries changes.
uint64_t SaveSession::index_nbytes_with(std::span<const TensorToWrite> tensors, bool tagged) const {
  uint64_t nbytes = head_.index_nbytes;
  if (tagged != head_.prologue.tagged_entries()) {
    nbytes = 0;
    for (const SavedEntry& entry : entries_)
      nbytes += format::index_entry_nbytes(entry.view(), tagged);
  }
  for (const TensorToWrite& tensor : tensors) {
    nbytes += format::index_entry_nbytes(
        {tensor.name, tensor.dtype, tensor.shape, tensor.type, 0, 0, 0}, tagged);
  }
  return nbytes;
}

void SaveSession::make_room(Call& call, bool growing, const std::stop_token& stop) {
  const bool tagged = call.prologue.tagged_entries();
  call.index_nbytes = index_nbytes_with(call.tensors, tagged);
  const uint64_t needed = call.index_nbytes + annex_nbytes_with(call.ties);
  if (head_.room == 0) {
    head_.room = index_room(needed, growing);
    head_.end = start_ + format::kPrologueNbytes + head_.room;
    return;
  }
  // An index whose entries change their form is not written over the published one.
  const bool anew = tagged != head_.prologue.tagged_entries() && sink_->relocates_aside();
  if (anew || needed > head_.room)
    relayout(call, std::max(head_.room, index_room(needed, true)), stop);
}

// All records move behind a larger index. Where the sink copies them into a new file, the published
// one stays as it is until this call is finished; where it moves them in place, the content is
// published again in its new place before anything new is written.
void SaveSession::relayout(Call& call, uint64_t room, const std::stop_token& stop) {
  const uint64_t begin = start_ + format::kPrologueNbytes + head_.room;
  call.shift = room - head_.room;
  const bool aside = sink_->relocates_aside();
  sink_->relocate(begin, head_.end - begin, begin + call.shift, stop);
  call.aside = aside_ = aside;
  move_records(call.shift);
  head_.room = room;
  head_.indexed = false;
  if (call.aside) return;
  call.before = head_;
  prologue_touched_ = index_touched_ = true;  // it describes what is no longer there
  publish(stop);
  call.before = head_;
}

// By a distance modulo 2^64, so that adding the negated one undoes it.
void SaveSession::move_records(uint64_t distance) noexcept {
  for (SavedEntry& entry : entries_) {
    entry.offset += distance;
    entry.data_offset += distance;
  }
  head_.end += distance;
}

void SaveSession::place_records(Call& call) {
  const PlanChoice choice{options_.hashes, options_.key ? &crypt_ : nullptr};
  uint64_t offset = head_.end;
  call.records.reserve(call.tensors.size());
  for (const TensorToWrite& tensor : call.tensors) {
    const bool encrypted = options_.key != nullptr && tensor.data_nbytes > 0;
    call.records.push_back(
        plan_record(tensor, offset, choice, encrypted ? draw_nonce() : format::Nonce{}));
    const std::optional<uint64_t> next =
        checked_add(call.records.back().data_offset(), tensor.data_nbytes);
    if (!next || *next > (uint64_t{1} << 62))
      throw Error(Errc::invalid_argument, "the tensors are larger than a file can be");
    offset = *next;
  }
  call.records_end = offset;
}

void SaveSession::write_payloads(std::span<const PayloadToWrite> payloads,
                                 device::CopyEngine* engine, const std::stop_token& stop) {
  if (!call_) throw Error(Errc::invalid_argument, "no write call is open");
  for (const PayloadToWrite& payload : payloads) {
    if (payload.record != call_->written || payload.record >= call_->records.size() ||
        payload.from.nbytes != call_->records[payload.record].data_nbytes)
      throw Error(Errc::invalid_argument, "payloads must come in order and with the planned size");
    ++call_->written;
  }
  Worker::Shared shared{.session = *this, .payloads = payloads, .engine = engine};
  Worker::cut_units(shared);
  const unsigned wanted = std::max(sink_->concurrency(), cpu_quota());
  const unsigned allowed = options_.max_workers > 0 ? options_.max_workers : wanted;
  const unsigned workers =
      static_cast<unsigned>(std::clamp<size_t>(shared.units.size(), 1, std::min(wanted, allowed)));
  run_workers(workers, stop,
              [&shared](const std::stop_token& token) { Worker(shared, token).run(); });
}

void SaveSession::finish_call(const std::stop_token& stop) {
  if (!call_ || call_->written != call_->records.size())
    throw Error(Errc::invalid_argument, "not all payloads of the call were written");
  for (size_t i = 0; i < call_->tensors.size(); ++i) {
    TensorToWrite& tensor = call_->tensors[i];
    tensor.dtype = index_dtype(tensor);
    entries_.push_back(
        {std::move(tensor), call_->records[i].offset, call_->records[i].data_offset()});
  }
  ties_.insert(ties_.end(), call_->ties.begin(), call_->ties.end());
  if (call_->prologue.tagged_entries() != head_.prologue.tagged_entries()) head_.indexed = false;
  head_.prologue = call_->prologue;
  head_.index_nbytes = call_->index_nbytes;
  head_.end = call_->records_end;
  if (!call_->may_wait) publish(stop);
  call_.reset();
}

void SaveSession::publish(const std::stop_token& stop) {
  // An annex lies where further entries would go, and has a digest of all of them.
  const bool whole =
      !head_.indexed || index_touched_ || published_annex_ || annex_nbytes_with({}) > 0;
  if (whole && published_end_ > 0 && !aside_ && sink_->relocates_aside()) {
    publish_aside(stop);
    return;
  }
  const std::array<std::byte, kEndMarkNbytes> end_mark{};
  sink_->write_at(head_.end, io::ConstSlice(end_mark), stop);
  if (whole) {
    write_head(stop);
  } else {
    write_new_entries(stop);
  }
  sink_->publish(head_.end + kEndMarkNbytes, stop);
  published_end_ = head_.end;
  published_prologue_ = stored_prologue();
  published_annex_ = annex_nbytes_with({}) > 0;
  prologue_touched_ = index_touched_ = aside_ = false;
}

// A published head is not written over where another file can take the place of this one: the
// records go there, to the same offsets.
void SaveSession::publish_aside(const std::stop_token& stop) {
  const uint64_t begin = start_ + format::kPrologueNbytes + head_.room;
  const Head before = head_;
  sink_->relocate(begin, head_.end - begin, begin, stop);
  aside_ = true;
  try {
    publish(stop);
  } catch (...) {
    sink_->undo_relocate();
    head_ = before;
    prologue_touched_ = index_touched_ = aside_ = false;
    throw;
  }
}

// The entries that are not in the file yet, and then, once they and all records are where no crash
// can take them away, the prologue that counts them.
void SaveSession::write_new_entries(const std::stop_token& stop) {
  std::vector<std::byte> bytes;
  for (size_t i = head_.written; i < entries_.size(); ++i) {
    format::append_index_entry(bytes, entries_[i].view(), head_.prologue.tagged_entries());
  }
  sink_->write_at(start_ + format::kPrologueNbytes + head_.written_nbytes, io::ConstSlice(bytes),
                  stop);
  sink_->barrier(stop);
  prologue_touched_ = true;
  sink_->write_at(start_, io::ConstSlice(stored_prologue()), stop);
  head_.written = entries_.size();
  head_.written_nbytes += bytes.size();
}

// All of it, with zeros to the end of the index's room: into files that nobody sees yet, the
// prologue last; into those that can only be written in place, with a single write.
void SaveSession::write_head(const std::stop_token& stop) {
  std::vector<std::byte> index;
  for (const SavedEntry& entry : entries_)
    format::append_index_entry(index, entry.view(), head_.prologue.tagged_entries());
  const uint64_t nbytes = index.size();
  const auto prologue = stored_prologue();
  if (annex_nbytes_with({}) > 0) {
    const std::vector<std::byte> annex = format::serialize_annex(
        annex_with({}), seal_metadata(), format::digest_index(prologue, index));
    index.insert(index.end(), annex.begin(), annex.end());
  }
  index.resize(head_.room);
  sink_->barrier(stop);
  prologue_touched_ = index_touched_ = true;
  if (published_end_ == 0) {
    sink_->write_at(start_ + prologue.size(), io::ConstSlice(index), stop);
    sink_->write_at(start_, io::ConstSlice(prologue), stop);
  } else {
    const std::array<io::ConstSlice, 2> both{io::ConstSlice(prologue), io::ConstSlice(index)};
    sink_->write_at(start_, both, stop);
  }
  head_.indexed = true;
  head_.written = entries_.size();
  head_.written_nbytes = nbytes;
}

format::AnnexToWrite SaveSession::annex_with(std::span<const format::OwnedPair> more_ties) const {
  format::AnnexToWrite annex;
  for (const auto& [key, value] : metadata_) annex.metadata.push_back({key, value});
  for (const auto& [alias, target] : ties_) annex.ties.push_back({alias, target});
  for (const auto& [alias, target] : more_ties) annex.ties.push_back({alias, target});
  return annex;
}

uint64_t SaveSession::annex_nbytes_with(std::span<const format::OwnedPair> more_ties) const {
  if (metadata_.empty() && ties_.empty() && more_ties.empty()) return 0;
  const uint64_t sealed_overhead =
      options_.key ? format::kSectionHeadNbytes +
                         format::message_crypt_info_nbytes(options_.derivation.has_value())
                   : 0;
  return format::annex_nbytes(annex_with(more_ties), sealed_overhead);
}

// One message under a nonce of its own, drawn like those of records.
std::vector<std::byte> SaveSession::seal_metadata() {
  if (!options_.key || metadata_.empty()) return {};
  const std::vector<std::byte> plain = format::serialize_metadata(annex_with({}).metadata);
  std::vector<std::byte> cipher(plain.size());
  std::array<std::byte, format::kMacNbytes> mac;
  const format::Nonce nonce = draw_nonce();
  crypto::seal(cipher, mac, plain, crypto::NonceView(nonce), *options_.key);
  const auto& derivation = options_.derivation;
  std::vector<std::byte> sealed =
      format::serialize_message_crypt_info(derivation ? &*derivation : nullptr, nonce, mac);
  sealed.insert(sealed.end(), cipher.begin(), cipher.end());
  return sealed;
}

void SaveSession::set_metadata(const std::string& key, const std::string& value) {
  std::erase_if(metadata_, [&](const format::OwnedPair& pair) { return pair.first == key; });
  if (!value.empty()) metadata_.emplace_back(key, value);
}

std::array<std::byte, format::kPrologueNbytes> SaveSession::stored_prologue() const {
  format::Prologue stored = head_.prologue;
  stored.metadata_nbytes = head_.room;
  stored.tensor_count = entries_.size();
  return format::serialize_prologue(stored);
}

// After a failure the prologue, or all of the head, in the file may count records that are void.
// Puts back those of the last published content; where that fails too, the next publish() writes
// all of it.
void SaveSession::restore_head() noexcept {
  try {
    if (index_touched_) {
      write_head({});
    } else {
      sink_->write_at(start_, io::ConstSlice(published_prologue_), {});
    }
    prologue_touched_ = index_touched_ = false;
  } catch (...) {  // what failed first tells more
    index_touched_ = true;
  }
}

void SaveSession::abort_call() noexcept {
  if (!call_) return;
  undo(*call_);
  call_.reset();
}

void SaveSession::undo(Call& call) noexcept {
  paths_.rollback(call.path_mark);
  entries_.resize(call.entry_mark);
  ties_.resize(call.tie_mark);
  if (published_end_ == 0) {
    head_ = call.before;
    prologue_touched_ = index_touched_ = false;
    sink_->rollback(0);
    return;
  }
  if (call.aside) {
    sink_->undo_relocate();
    move_records(-call.shift);
    prologue_touched_ = index_touched_ = aside_ = false;
  }
  head_ = call.before;
  if (prologue_touched_) restore_head();
  sink_->rollback(head_.end + kEndMarkNbytes);
}

void SaveSession::finish(const std::stop_token& stop) {
  if (published_end_ > 0 && waiting_nbytes() > 0) publish(stop);
  sink_->finish(stop);
}

void SaveSession::abandon() noexcept {
  try {
    abort_call();
    if (published_end_ > 0 && waiting_nbytes() > 0 && process_ == getpid()) publish({});
  } catch (...) {  // the content that was published before stays
    if (prologue_touched_) restore_head();
  }
  sink_->abandon();
}

}  // namespace tensorizer::save
