#include "load/load_session.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_workers.h"
#include "core/stop.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"
#include "device/host_arena.h"
#include "format/tensor_path.h"

namespace tensorizer::load {

namespace {

constexpr uint64_t kHeaderGapNbytes = 4096;
constexpr size_t kWipedAtOnce = 256;  // destinations on a device, between two waits
constexpr uint64_t kUnsizedHeaderLimit = uint64_t{256} << 20;
constexpr uint64_t kUnsizedDataLimit = uint64_t{4} << 40;  // the plan of more would take memory
// As much is read from memory sooner than another thread wakes up.
constexpr uint64_t kBriefNbytes = uint64_t{1} << 20;
constexpr size_t kBriefUnits = 512;
// A source whose requests cost less than this many bytes is read chunk by chunk when decrypting.
constexpr uint64_t kCheapRequestNbytes = uint64_t{64} << 10;

template <class Fn>
void with_tensor_name(const format::IndexEntry& entry, const std::string& source, Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    const std::string tensor = "tensor " + format::display_name(entry.name) + ": ";
    std::string text = error.what();
    if (text.find(tensor) == std::string::npos) text.insert(0, tensor);
    Error named(error.code(), source + ": " + text, source, error.offset.value_or(entry.offset));
    named.system_errno = error.system_errno;
    throw named;
  }
}

}  // namespace

struct LoadSession::TargetState {
  // Written by the worker that reads the header, before `parsed`.
  bool want_crc32 = false;
  bool want_sha256 = false;
  bool encrypted = false;
  bool assembled = false;     // ciphertext is gathered first, see assembly
  uint64_t chunk_nbytes = 0;  // of the cipher
  std::shared_ptr<const crypto::SecretKey> key;
  format::HeaderDigest digest;                  // header part, then the payload in order
  std::shared_ptr<device::HostArena> assembly;  // ciphertext of an assembled device tensor
  std::atomic<bool> parsed{false};
  std::atomic<uint32_t> arrived{0};  // payload segments of an assembled tensor
  uint32_t next_turn = 0;            // guarded by order_mutex_: device tensors, digest order
  uint32_t first_segment = 0;        // position of payload step 0 in the plan
};

// One thread's share of the work, and its buffers.
class LoadSession::Worker {
 public:
  Worker(LoadSession& session, const std::stop_token& stop) : s_(session), stop_(stop) {}

  void run() {
    while (true) {
      throw_if_stopped(stop_);
      if (s_.chains_) {
        const ChainQueue::Work pair = s_.chains_->take(false);
        if (pair.count > 0) {
          hash_steps(pair);
          continue;
        }
      }
      // The slot comes before the unit: whoever has an early unit, which others may wait for, never
      // waits for a slot that one of those holds.
      device::SlotLease slot;
      if (on_device()) slot = s_.options_.engine->acquire(stop_);
      const uint32_t unit = s_.next_unit_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= s_.plan_.units.size()) break;
      process(s_.plan_.units[unit], std::move(slot));
    }
    while (s_.chains_) {
      throw_if_stopped(stop_);
      const ChainQueue::Work work = s_.chains_->take_or_wait(stop_);
      if (work.count == 0) break;
      hash_steps(work);
    }
  }

 private:
  std::span<const Segment> segments_of(const Unit& unit) const {
    return std::span(s_.plan_.segments).subspan(unit.first_segment, unit.segment_count);
  }
  size_t segment_number(const Segment& segment) const {
    return static_cast<size_t>(&segment - s_.plan_.segments.data());
  }
  io::Slice header_slice(uint32_t target) {
    auto view = s_.headers_->bytes_of(target);
    return {const_cast<std::byte*>(view.data()), view.size()};
  }
  bool on_device() const { return s_.options_.engine != nullptr; }

  void process(const Unit& unit, device::SlotLease slot) {
    read(unit, slot);
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind == Segment::Kind::header) accept_header(segment.target);
    }
    if (s_.has_crypt_info()) decrypt(unit, slot);
    if (s_.options_.verify) digest(unit, slot);
    finish_empty_tensors(unit);
    if (slot) submit(unit, std::move(slot));
    for (uint32_t target : to_send_) send_assembled(target);
    to_send_.clear();
    s_.nbytes_done_.fetch_add(unit.payload_nbytes, std::memory_order_relaxed);
  }

  // --- read ---

  // Plain payloads go where they belong: the destination, or the slot. Ciphertext goes to the
  // cipher buffer.
  void read(const Unit& unit, const device::SlotLease& slot) {
    slices_.clear();
    make_trash(unit);
    cipher_ = nullptr;
    uint64_t from = unit.offset;
    if (s_.has_crypt_info() && unit.payload_nbytes > 0) {
      cipher_ = s_.source_.view(unit.offset, unit.nbytes);
      if (cipher_ != nullptr) {
        copy_headers(unit);
        return;
      }
      cipher_buffer_.resize(std::max<size_t>(cipher_buffer_.size(), unit.nbytes));
      cipher_ = cipher_buffer_.data();
    }
    uint64_t end = from;
    auto flush = [&] {
      if (!slices_.empty()) s_.source_.read_at(from, slices_, stop_);
      slices_.clear();
    };
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind == Segment::Kind::payload && s_.targets_[segment.target].in_place) {
        flush();
        from = end = segment.offset + segment.nbytes;
        continue;
      }
      slices_.push_back(place_for(segment, unit, slot));
      end += segment.nbytes;
    }
    flush();
  }

  // Room for the longest gap, before any slice points to it.
  void make_trash(const Unit& unit) {
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind == Segment::Kind::skip && segment.nbytes > trash_.size())
        trash_.resize(segment.nbytes);
    }
  }

  io::Slice place_for(const Segment& segment, const Unit& unit, const device::SlotLease& slot) {
    switch (segment.kind) {
      case Segment::Kind::header:
        return header_slice(segment.target);
      case Segment::Kind::skip:
        return {trash_.data(), segment.nbytes};
      case Segment::Kind::payload:
        break;
    }
    if (cipher_ != nullptr)
      return {cipher_buffer_.data() + (segment.offset - unit.offset), segment.nbytes};
    return plain_place(segment, unit, slot);
  }

  // Where the plaintext of a segment is, or will be, in host memory.
  io::Slice plain_place(const Segment& segment, const Unit& unit,
                        const device::SlotLease& slot) const {
    if (!slot)
      return {s_.targets_[segment.target].destination.data + segment.target_offset, segment.nbytes};
    return slot.bytes().subspan(slot_offset(segment, unit), segment.nbytes);
  }

  // Payloads lie in a slot as in the file, without the headers and gaps between them.
  uint64_t slot_offset(const Segment& segment, const Unit& unit) const {
    uint64_t offset = 0;
    for (const Segment& before : segments_of(unit)) {
      if (&before == &segment) break;
      if (before.kind == Segment::Kind::payload) offset += before.nbytes;
    }
    return offset;
  }

  void copy_headers(const Unit& unit) {
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind != Segment::Kind::header) continue;
      io::Slice into = header_slice(segment.target);
      std::memcpy(into.data(), cipher_ + (segment.offset - unit.offset), into.size());
    }
  }

  // --- headers ---

  void accept_header(uint32_t target) {
    const format::IndexEntry& entry = s_.entry_of(target);
    TargetState& state = s_.states_[target];
    with_tensor_name(entry, s_.source_.name(), [&] {
      auto bytes = s_.headers_->bytes_of(target);
      format::RecordHeader& header = s_.headers_->headers[target];
      header = format::parse_record_header(bytes, entry, s_.has_crypt_info());
      format::check_against_index(header, entry);
      if (s_.has_crypt_info()) accept_cipher(target, header, state);
      // Tensors without data have nothing that a hash of data could prove (format.md 6.3).
      if (s_.options_.verify && !entry.zero_filled()) {
        for (const format::StoredHash& hash : header.hashes) {
          (hash.type == format::HashType::crc32 ? state.want_crc32 : state.want_sha256) = true;
        }
        state.digest = format::digest_header(bytes, header, state.want_crc32, state.want_sha256);
      }
    });
    state.parsed.store(true, std::memory_order_release);
    if (s_.plan_.payload_steps[target] > 1) {
      MutexLock lock(s_.order_mutex_);
      s_.order_changed_.notify_all();
    }
  }

  void accept_cipher(uint32_t target, const format::RecordHeader& header, TargetState& state) {
    const format::IndexEntry& entry = s_.entry_of(target);
    const uint64_t chunk = format::check_crypt_info(*header.crypt, entry.data_nbytes);
    if (entry.data_nbytes == 0) return;
    state.encrypted = true;
    state.chunk_nbytes = chunk;
    state.key = s_.options_.keys->key_for(*header.crypt);
    // Units are cut at multiples of the usual chunk; a chunk that straddles a cut waits for the
    // whole tensor.
    state.assembled = entry.data_nbytes > chunk ? format::kCipherChunkNbytes % chunk != 0
                                                : s_.plan_has_many_steps(target);
  }

  void wait_for_header(uint32_t target) {
    TargetState& state = s_.states_[target];
    if (state.parsed.load(std::memory_order_acquire)) return;
    MutexLock lock(s_.order_mutex_);
    const bool parsed = s_.order_changed_.wait(
        s_.order_mutex_, stop_, [&] { return state.parsed.load(std::memory_order_acquire); });
    if (!parsed) throw Error(Errc::cancelled, "cancelled");
  }

  // --- decrypt ---

  void decrypt(const Unit& unit, const device::SlotLease& slot) {
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind != Segment::Kind::payload) continue;
      wait_for_header(segment.target);
      TargetState& state = s_.states_[segment.target];
      std::span<const std::byte> cipher(cipher_ + (segment.offset - unit.offset), segment.nbytes);
      with_tensor_name(s_.entry_of(segment.target), s_.source_.name(), [&] {
        if (state.assembled) {
          assemble(segment, cipher);
        } else {
          open_chunks(state, segment.target, segment.target_offset, cipher,
                      plain_place(segment, unit, slot).data());
        }
      });
    }
  }

  void open_chunks(const TargetState& state, uint32_t target, uint64_t offset,
                   std::span<const std::byte> cipher, std::byte* plain) const {
    const format::CipherChunks& chunks = *s_.headers_->headers[target].crypt->cipher;
    const uint64_t first = offset / state.chunk_nbytes;
    const uint64_t total = std::max<uint64_t>(chunks.mac_count(), 1);
    for (uint64_t done = 0, i = first; done < cipher.size(); ++i) {
      const uint64_t n = std::min<uint64_t>(state.chunk_nbytes, cipher.size() - done);
      const auto nonce = crypto::nonce_plus(crypto::NonceView(chunks.nonce), i);
      const auto mac = chunks.macs.subspan(i * crypto::kMacNbytes).first<crypto::kMacNbytes>();
      if (!crypto::open({plain + done, n}, cipher.subspan(done, n), mac, nonce, *state.key))
        throw Error(Errc::crypto, "chunk " + std::to_string(i + 1) + " of " +
                                      std::to_string(total) +
                                      " does not match its authentication code: wrong key, or the "
                                      "file was altered");
      done += n;
      throw_if_stopped(stop_);
    }
  }

  // Ciphertext of an oddly chunked tensor is gathered (in the destination itself on the host);
  // whoever brings the last piece decrypts all of it in place.
  void assemble(const Segment& segment, std::span<const std::byte> cipher) {
    TargetState& state = s_.states_[segment.target];
    const format::IndexEntry& entry = s_.entry_of(segment.target);
    std::byte* base = assembly_base(segment.target);
    std::memcpy(base + segment.target_offset, cipher.data(), cipher.size());
    const uint32_t steps = s_.plan_.payload_steps[segment.target];
    if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < steps) return;
    std::span<std::byte> whole(base, entry.data_nbytes);
    open_chunks(state, segment.target, 0, whole, base);
    if (s_.options_.verify) digest_assembled(segment.target, whole);
    if (on_device()) to_send_.push_back(segment.target);
  }

  void digest_assembled(uint32_t target, std::span<const std::byte> whole) {
    const uint32_t steps = s_.plan_.payload_steps[target];
    if (on_device() || steps == 1) {
      TargetState& state = s_.states_[target];
      update_sha256(state, whole);
      update_crc32(state, whole);
      check(target);
      return;
    }
    for (uint32_t step = 0; step < steps; ++step) {
      const Segment& piece = step_segment(target, step);
      s_.segment_crcs_[segment_number(piece)] =
          format::crc32(0, whole.subspan(piece.target_offset, piece.nbytes));
      s_.chains_->mark_ready({target, step});
    }
  }

  std::byte* assembly_base(uint32_t target) {
    if (!on_device()) return s_.targets_[target].destination.data;
    TargetState& state = s_.states_[target];
    MutexLock lock(s_.order_mutex_);
    if (!state.assembly)
      state.assembly = device::HostArena::create(s_.entry_of(target).data_nbytes);
    return state.assembly->bytes().data();
  }

  // After the unit's own slot was submitted: a worker never waits for a slot while it holds one.
  void send_assembled(uint32_t target) {
    std::span<const std::byte> plain = s_.states_[target].assembly->bytes();
    const device::Destination& to = s_.targets_[target].destination;
    const uint64_t nbytes = std::min<uint64_t>(plain.size(), to.nbytes);
    for (uint64_t done = 0; done < nbytes;) {
      device::SlotLease slot = s_.options_.engine->acquire(stop_);
      const uint64_t n = std::min<uint64_t>(slot.bytes().size(), nbytes - done);
      std::memcpy(slot.bytes().data(), plain.data() + done, n);
      const device::CopyPiece piece{0, to.data + done, n};
      s_.options_.engine->submit(std::move(slot), {&piece, 1});
      done += n;
    }
    s_.states_[target].assembly.reset();
  }

  // --- digest ---

  void digest(const Unit& unit, const device::SlotLease& slot) {
    whole_.clear();
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind != Segment::Kind::payload) continue;
      if (s_.states_[segment.target].parsed.load(std::memory_order_acquire) &&
          s_.states_[segment.target].assembled)
        continue;  // digested by whoever completed it
      std::span<const std::byte> plain = plain_place(segment, unit, slot);
      if (s_.plan_.payload_steps[segment.target] == 1) {
        whole_.push_back({segment.target, plain});
        continue;
      }
      const TargetState& state = s_.states_[segment.target];
      if (!state.parsed.load(std::memory_order_acquire) || state.want_crc32)
        s_.segment_crcs_[segment_number(segment)] = format::crc32(0, plain);
      if (on_device()) {
        digest_in_turn(segment, plain);
      } else {
        s_.chains_->mark_ready({segment.target, segment.step});
      }
    }
    digest_pairs();
  }

  struct WholePayload {
    uint32_t target;
    std::span<const std::byte> plain;
  };

  // Payloads that are complete in this unit: two SHA-256 streams at a time.
  void digest_pairs() {
    for (size_t i = 0; i < whole_.size(); i += 2) {
      TargetState& a = s_.states_[whole_[i].target];
      if (i + 1 < whole_.size()) {
        TargetState& b = s_.states_[whole_[i + 1].target];
        if (a.want_sha256 && b.want_sha256) {
          format::Sha256::update_pair(a.digest.sha256, whole_[i].plain, b.digest.sha256,
                                      whole_[i + 1].plain);
        } else {
          update_sha256(a, whole_[i].plain);
          update_sha256(b, whole_[i + 1].plain);
        }
        update_crc32(b, whole_[i + 1].plain);
        check(whole_[i + 1].target);
      } else {
        update_sha256(a, whole_[i].plain);
      }
      update_crc32(a, whole_[i].plain);
      check(whole_[i].target);
    }
  }

  static void update_sha256(TargetState& state, std::span<const std::byte> plain) {
    if (state.want_sha256) state.digest.sha256.update(plain);
  }
  static void update_crc32(TargetState& state, std::span<const std::byte> plain) {
    if (state.want_crc32) state.digest.crc32 = format::crc32(state.digest.crc32, plain);
  }

  // Device tensors leave their slot right after this, so their pieces are hashed in order here.
  void digest_in_turn(const Segment& segment, std::span<const std::byte> plain) {
    TargetState& state = s_.states_[segment.target];
    {
      MutexLock lock(s_.order_mutex_);
      const bool my_turn = s_.order_changed_.wait(s_.order_mutex_, stop_, [&] {
        return state.parsed.load(std::memory_order_acquire) && state.next_turn == segment.step;
      });
      if (!my_turn) throw Error(Errc::cancelled, "cancelled");
    }
    update_sha256(state, plain);
    if (segment.step + 1 == s_.plan_.payload_steps[segment.target]) check_steps(segment.target);
    MutexLock lock(s_.order_mutex_);
    ++state.next_turn;
    s_.order_changed_.notify_all();
  }

  void hash_steps(const ChainQueue::Work& work) {
    std::span<const std::byte> bytes[2];
    TargetState* states[2] = {};
    for (int i = 0; i < work.count; ++i) {
      const uint32_t target = work.steps[i].chain;
      states[i] = &s_.states_[target];
      const Segment& segment = step_segment(target, work.steps[i].step);
      bytes[i] = {s_.targets_[target].destination.data + segment.target_offset, segment.nbytes};
    }
    if (work.count == 2 && states[0]->want_sha256 && states[1]->want_sha256) {
      format::Sha256::update_pair(states[0]->digest.sha256, bytes[0], states[1]->digest.sha256,
                                  bytes[1]);
    } else {
      for (int i = 0; i < work.count; ++i) update_sha256(*states[i], bytes[i]);
    }
    for (int i = 0; i < work.count; ++i) {
      const uint32_t target = work.steps[i].chain;
      if (work.steps[i].step + 1 == s_.plan_.payload_steps[target]) check_steps(target);
    }
    s_.chains_->done(work);
  }

  const Segment& step_segment(uint32_t target, uint32_t step) const {
    return s_.plan_.segments[s_.step_segments_[s_.states_[target].first_segment + step]];
  }

  // All pieces were hashed in order; their CRCs, made as they came, are combined now.
  void check_steps(uint32_t target) {
    TargetState& state = s_.states_[target];
    if (state.want_crc32) {
      for (uint32_t step = 0; step < s_.plan_.payload_steps[target]; ++step) {
        const Segment& segment = step_segment(target, step);
        state.digest.crc32 = format::crc32_combine(
            state.digest.crc32, s_.segment_crcs_[segment_number(segment)], segment.nbytes);
      }
    }
    check(target);
  }

  void check(uint32_t target) {
    TargetState& state = s_.states_[target];
    with_tensor_name(s_.entry_of(target), s_.source_.name(), [&] {
      format::Sha256Digest sha256{};
      if (state.want_sha256) sha256 = state.digest.sha256.finish();
      format::check_hashes(s_.headers_->headers[target],
                           state.want_crc32 ? &state.digest.crc32 : nullptr,
                           state.want_sha256 ? &sha256 : nullptr);
    });
  }

  // Tensors without payload segments are complete once their header is there.
  void finish_empty_tensors(const Unit& unit) {
    if (!s_.options_.verify) return;
    for (const Segment& segment : segments_of(unit)) {
      const uint32_t target = segment.target;
      if (segment.kind == Segment::Kind::header && s_.plan_.payload_steps[target] == 0 &&
          !s_.entry_of(target).zero_filled())
        check(target);
    }
  }

  // --- place ---

  void submit(const Unit& unit, device::SlotLease slot) {
    pieces_.clear();
    uint64_t slot_at = 0;
    for (const Segment& segment : segments_of(unit)) {
      if (segment.kind != Segment::Kind::payload) continue;
      const device::Destination& to = s_.targets_[segment.target].destination;
      const bool assembled = s_.has_crypt_info() && s_.states_[segment.target].assembled;
      if (!assembled && segment.target_offset < to.nbytes) {
        const uint64_t n = std::min(segment.nbytes, to.nbytes - segment.target_offset);
        pieces_.push_back({slot_at, to.data + segment.target_offset, n});
      }
      slot_at += segment.nbytes;
    }
    if (!pieces_.empty()) s_.options_.engine->submit(std::move(slot), pieces_);
  }

  LoadSession& s_;
  const std::stop_token stop_;
  std::vector<io::Slice> slices_;
  std::vector<std::byte> cipher_buffer_, trash_;
  const std::byte* cipher_ = nullptr;  // first byte of the unit, where it is encrypted
  std::vector<WholePayload> whole_;
  std::vector<device::CopyPiece> pieces_;
  std::vector<uint32_t> to_send_;  // assembled device tensors that this unit completed
};

LoadSession::LoadSession(io::RangeSource& source, std::shared_ptr<const OpenedIndex> opened,
                         std::vector<LoadTarget> targets, const LoadOptions& options)
    : source_(source),
      opened_(std::move(opened)),
      targets_(std::move(targets)),
      options_(options),
      states_(targets_.size()) {
  if (has_crypt_info() && options_.keys == nullptr)
    throw Error(Errc::crypto, source_.name() + " is encrypted, but no key was given",
                source_.name());
  uint64_t header_nbytes = 0, data_nbytes = 0;  // records do not overlap: below 2^64
  for (uint32_t target = 0; target < targets_.size(); ++target) {
    headers_->begins.push_back(header_nbytes);
    header_nbytes += entry_of(target).header_nbytes();
    data_nbytes += entry_of(target).data_nbytes;
  }
  if (!source_.size() && data_nbytes > kUnsizedDataLimit)
    throw Error(Errc::malformed, source_.name() + ": tensors claim " + std::to_string(data_nbytes) +
                                     " bytes in a source of unknown size");
  if (!source_.size() && header_nbytes > kUnsizedHeaderLimit)
    throw Error(Errc::malformed, source_.name() + ": record headers claim " +
                                     std::to_string(header_nbytes) +
                                     " bytes in a source of unknown size");
  headers_->bytes.resize(header_nbytes);  // records do not overlap: at most the size of the source
  headers_->headers.resize(targets_.size());
  if (!opened_->has_record_headers()) take_headers_from_index();
  make_plan();
}

// The index says all there is to know, and there are no digests to compare.
void LoadSession::take_headers_from_index() {
  options_.verify = false;
  headers_->index = opened_;
  for (uint32_t target = 0; target < targets_.size(); ++target) {
    const format::IndexEntry& entry = entry_of(target);
    with_tensor_name(entry, source_.name(), [&] {
      if (entry.dtype.empty()) throw Error(Errc::malformed, format::why_not_loadable(entry));
    });
    format::RecordHeader& header = headers_->headers[target];
    header.type = entry.type;
    header.name = entry.name;
    header.dtype = entry.dtype;
    header.shape.assign(entry.shape.begin(), entry.shape.end());
    header.data_nbytes = entry.data_nbytes;
    states_[target].parsed.store(true, std::memory_order_relaxed);
  }
}

LoadSession::~LoadSession() = default;

void LoadSession::make_plan() {
  const io::SourceTraits traits = source_.traits();
  PlanOptions plan;
  plan.unit_nbytes = traits.unit_nbytes;
  plan.gap_nbytes = traits.gap_nbytes;
  if (options_.engine != nullptr)
    plan.unit_nbytes = std::min(plan.unit_nbytes, options_.engine->slot_nbytes());
  if (has_crypt_info()) {
    plan.cut_nbytes = format::kCipherChunkNbytes;
    if (traits.gap_nbytes <= kCheapRequestNbytes) plan.unit_nbytes = format::kCipherChunkNbytes;
  }
  const bool all_in_place =
      !targets_.empty() &&
      std::all_of(targets_.begin(), targets_.end(), [](const LoadTarget& t) { return t.in_place; });
  if (all_in_place && !options_.verify) {
    plan.payloads = false;
    plan.gap_nbytes = kHeaderGapNbytes;
  }
  std::vector<uint32_t> selection;
  selection.reserve(targets_.size());
  for (const LoadTarget& target : targets_) selection.push_back(target.entry);
  plan_ = plan_load(opened_->index, selection, plan);

  if (traits.prompt && !has_crypt_info() && options_.engine == nullptr &&
      plan_.units.size() <= kBriefUnits) {
    uint64_t total = 0;
    for (const Unit& unit : plan_.units) total += unit.nbytes;
    brief_ = total <= kBriefNbytes;
  }

  uint32_t steps = 0;
  for (uint32_t target = 0; target < targets_.size(); ++target) {
    states_[target].first_segment = steps;
    steps += plan_.payload_steps[target];
  }
  if (!options_.verify) return;
  segment_crcs_.resize(plan_.segments.size());
  step_segments_.resize(steps);
  for (uint32_t i = 0; i < plan_.segments.size(); ++i) {
    const Segment& segment = plan_.segments[i];
    if (segment.kind == Segment::Kind::payload)
      step_segments_[states_[segment.target].first_segment + segment.step] = i;
  }
}

bool LoadSession::plan_has_many_steps(uint32_t target) const noexcept {
  return plan_.payload_steps[target] > 1;
}

void LoadSession::run(const std::stop_token& stop) {
  try {
    run_workers(stop);
    if (options_.engine != nullptr) options_.engine->drain();
  } catch (...) {
    if (options_.engine != nullptr) options_.engine->abandon();
    if (has_crypt_info()) wipe_destinations();
    throw;
  }
}

void LoadSession::run_workers(const std::stop_token& stop) {
  if (options_.verify && options_.engine == nullptr) {
    std::vector<uint32_t> lengths(targets_.size(), 0);
    for (uint32_t target = 0; target < targets_.size(); ++target) {
      if (plan_.payload_steps[target] > 1) lengths[target] = plan_.payload_steps[target];
    }
    chains_ = std::make_unique<ChainQueue>(std::move(lengths));
  }
  const io::SourceTraits traits = source_.traits();
  unsigned workers = traits.sequential || brief_ ? 1 : std::max(1U, traits.concurrency);
  if (!traits.sequential && !brief_ && (options_.verify || has_crypt_info()))
    workers = std::max(workers, cpu_quota());
  if (options_.max_workers > 0) workers = std::min(workers, options_.max_workers);
  workers =
      static_cast<unsigned>(std::min<size_t>(workers, std::max<size_t>(plan_.units.size(), 1)));

  tensorizer::run_workers(workers, stop,
                          [this](const std::stop_token& token) { Worker(*this, token).run(); });
}

// Only what a worker may have filled: touching the rest would cost its memory and its time.
void LoadSession::wipe_destinations() noexcept {
  std::array<device::DeviceRange, kWipedAtOnce> ranges;
  size_t count = 0;
  const auto wipe_on_device = [&] {
    options_.engine->wipe(std::span(ranges).first(count));
    count = 0;
  };
  const size_t begun = std::min<size_t>(next_unit_.load(), plan_.units.size());
  for (size_t i = 0; i < begun; ++i) {
    const Unit& unit = plan_.units[i];
    for (const Segment& segment :
         std::span(plan_.segments).subspan(unit.first_segment, unit.segment_count)) {
      const LoadTarget& target = targets_[segment.target];
      const device::Destination& to = target.destination;
      if (segment.kind != Segment::Kind::payload || target.in_place ||
          segment.target_offset >= to.nbytes)
        continue;
      std::byte* const at = to.data + segment.target_offset;
      const uint64_t nbytes = std::min(segment.nbytes, to.nbytes - segment.target_offset);
      if (options_.engine == nullptr) {
        crypto::wipe({at, nbytes});
        continue;
      }
      ranges[count++] = {at, nbytes};
      if (count == ranges.size()) wipe_on_device();
    }
  }
  if (count > 0) wipe_on_device();
}

}  // namespace tensorizer::load
