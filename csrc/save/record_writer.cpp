#include "save/record_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/checked_math.h"
#include "core/endian.h"
#include "core/error.h"
#include "core/pages.h"
#include "core/run_units.h"
#include "core/sync.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"
#include "digest/deal.h"
#include "digest/record_digester.h"

namespace tensorizer::save {
namespace {

using digest::RecordDigester;

constexpr size_t kUnitRecords = 512;
// What is encrypted from host memory is copied chunk by chunk, so that cipher and sink find it in
// the processor's cache; several, so that a worker has steps of two tensors to hash.
constexpr uint64_t kHostBufferNbytes = kCipherChunkNbytes;
constexpr size_t kHostBuffers = 8;

// Whole small records that are neighbours, or one step of a large one.
struct Unit {
  uint32_t first;
  uint32_t count;   // 0: a step of record `first`
  uint64_t offset;  // of the step within its payload
  uint64_t nbytes;  // of payload
  uint32_t step;
};

struct Plan {
  std::vector<Unit> units;      // in the order of the file
  std::vector<uint32_t> steps;  // per record; 0: it is written whole
};

Plan cut(std::span<const PlannedRecord> records, std::span<const device::TensorMemory> payloads,
         uint64_t unit_nbytes) {
  Plan plan;
  plan.steps.resize(payloads.size());
  Unit open{};
  const auto close = [&] {
    if (open.count > 0) plan.units.push_back(open);
    open = {};
  };
  for (uint32_t i = 0; i < payloads.size(); ++i) {
    const uint64_t nbytes = payloads[i].nbytes;
    if (nbytes > unit_nbytes) {
      close();
      for (uint64_t at = 0; at < nbytes; at += unit_nbytes)
        plan.units.push_back({i, 0, at, std::min(unit_nbytes, nbytes - at), plan.steps[i]++});
      continue;
    }
    const bool joins = open.count > 0 && open.count < kUnitRecords &&
                       open.nbytes + nbytes <= unit_nbytes &&
                       records[i].offset == records[i - 1].end();
    if (!joins) close();
    if (open.count == 0) open.first = i;
    ++open.count;
    open.nbytes += nbytes;
  }
  close();
  return plan;
}

// How the steps of large records are hashed.
struct Hashing {
  size_t dealt = 0;  // records in turn, so that as many SHA-256 chains can run; 0: one by one
  size_t gathered = digest::kDealtPerWorker;  // see RecordDigester::Use
};

// A record in turn leaves up to two stretches of the sink unfinished: where its header goes, and
// where it has come to. The others are on their way to the store.
constexpr unsigned kPlacesOfOne = 5;

Hashing hashing_of(const RecordsToWrite& job, const io::RangeSink& sink, unsigned workers) {
  if (!job.hashes.sha256) return {};
  const size_t lanes = digest::Sha256::lanes();
  // Tensors in host memory can fill all lanes, those of a device have few buffers.
  if (!job.is_staged()) return {.dealt = sink.any_order() ? lanes * workers : 0};
  if (job.engine != nullptr || !sink.any_order() || lanes < digest::kManyLanes) {
    const size_t most = sink.places() > 0 ? std::max(1U, sink.places() / kPlacesOfOne) : SIZE_MAX;
    return {.dealt = std::min(digest::kDealtPerWorker * workers, most)};
  }
  return {.dealt = kHostBuffers * workers, .gathered = kHostBuffers * workers};
}

// What the workers of one call share.
struct Shared {
  Shared(const RecordsToWrite& to_write, Plan planned, unsigned workers, size_t gathered,
         io::RangeSink& to, const std::stop_token& stop)
      : job(to_write),
        plan(std::move(planned)),
        sink(to),
        is_bounded(to.places() > 0),
        digester(plan.steps,
                 {.workers = std::min(workers, cpu_quota()),
                  .bytes_stay = !to_write.is_staged() && to.any_order(),
                  .gathered = gathered},
                 [this, stop](uint32_t record, const digest::RecordDigests& digests) {
                   complete(record, digests, stop);
                 }) {
    for (uint32_t i = 0; i < plan.steps.size(); ++i) {
      if (plan.steps[i] > 0) digester.expect(i, start_of(i));
    }
  }

  digest::RecordStart start_of(uint32_t record) const {
    return {format::digest_header(job.records[record].header, job.hashes), job.hashes};
  }

  // The header of a record in steps is the last of it that is written: all of it is known now.
  void complete(uint32_t record, const digest::RecordDigests& digests,
                const std::stop_token& stop) {
    PlannedRecord& planned = job.records[record];
    format::HeaderLayout& header = planned.header;
    if (header.crc32_at != 0) store_le(header.bytes.data() + header.crc32_at, digests.crc32);
    if (header.sha256_at != 0)
      std::ranges::copy(digests.sha256, header.bytes.data() + header.sha256_at);
    if (plan.steps[record] == 0 || header.bytes.empty() || sink.in_order()) return;
    if (!sink.one_writer())
      return sink.write_at(planned.offset, io::ConstBuffer(header.bytes), stop);
    const MutexLock lock(mutex);
    complete_headers.push_back(record);
  }

  // By the thread that holds `writing`.
  void write_complete_headers(const std::stop_token& stop) {
    std::vector<uint32_t> complete;
    {
      const MutexLock lock(mutex);
      complete.swap(complete_headers);
    }
    for (const uint32_t record : complete)
      sink.write_at(job.records[record].offset, io::ConstBuffer(job.records[record].header.bytes),
                    stop);
  }

  // All that a unit writes, but for headers of records that are in steps: those are where their
  // first step begins.
  std::pair<uint64_t, uint64_t> stretch_of(const Unit& unit) const {
    const PlannedRecord& first = job.records[unit.first];
    if (unit.count > 0) return {first.offset, job.records[unit.first + unit.count - 1].end()};
    const uint64_t begin = first.data_offset() + unit.offset;
    return {unit.step == 0 ? first.offset : begin, begin + unit.nbytes};
  }

  const RecordsToWrite& job;
  const Plan plan;
  io::RangeSink& sink;
  const bool is_bounded;
  Mutex writing;  // held by the thread that writes to a sink which takes one writer
  Mutex mutex;
  // Of records in steps that are hashed; the next thread that writes to such a sink writes them.
  std::vector<uint32_t> complete_headers GUARDED_BY(mutex);
  RecordDigester digester;
  std::atomic<size_t> written{0};  // units
};

class Worker final : public UnitWorker {
 public:
  Worker(Shared& shared, const std::stop_token& stop)
      : shared_(shared), job_(shared.job), stop_(stop) {
    if (job_.engine != nullptr) copier_ = job_.engine->make_copier(job_.key != nullptr);
  }

  bool help() override { return shared_.digester.help(); }

  void prepare(size_t number) override {
    if (shared_.is_bounded) await_room(number);
    if (is_staged() && !std::exchange(prepared_, true)) take_buffer();
  }

  // From a device: begins to fetch this unit, and writes the one before it meanwhile.
  void process(size_t number) override {
    prepared_ = false;
    if (is_staged()) fill_buffer(shared_.plan.units[number]);
    if (copier_) {
      write_fetched();
      fetched_ = {number, next_buffer_};
    } else {
      write(number);
    }
  }

  void finish() override {
    write_fetched();
    shared_.digester.finish(stop_);
    const MutexLock writes(shared_.writing);
    shared_.write_complete_headers(stop_);
  }

 private:
  bool is_staged() const noexcept { return job_.is_staged(); }

  // Units get room in their order. So those that were taken are all written and hashed, whoever
  // waits here, and what they complete makes room; only where that leaves nothing to upload does
  // the next one get room beyond the sink's budget.
  void await_room(size_t number) {
    using Wish = io::RangeSink::RoomWish;
    const auto [begin, end] = shared_.stretch_of(shared_.plan.units[number]);
    if (shared_.sink.make_room(begin, end, Wish::now)) return;
    write_fetched();
    for (;;) {
      throw_if_stopped(stop_);
      if (shared_.digester.help_with(1)) continue;
      const bool all_written = shared_.written.load() >= number && shared_.digester.is_idle();
      if (shared_.sink.make_room(begin, end, all_written ? Wish::anyway : Wish::soon)) return;
    }
  }

  // A buffer goes on once its steps are hashed.
  void take_buffer() {
    const auto release = [this] { hashing_.release_oldest(stop_); };
    if (copier_) {
      std::span<std::byte> next = copier_->try_acquire();
      if (next.empty()) {
        write_fetched();  // others may wait for it: before this waits for them
        next = device::next_buffer(*copier_, stop_, release);
      }
      next_buffer_ = next;
    } else {
      if (hashing_.buffers() == kHostBuffers) release();
      Pages& next = host_buffers_[next_host_buffer_++ % kHostBuffers];
      if (!next) next = allocate_pages(kHostBufferNbytes, PageUse::secret);
      buffer_ = bytes_of(next);
    }
    if (!copier_) hashing_.begin_buffer();
  }

  // Writes the unit whose fetch was begun last, if there is one.
  void write_fetched() {
    if (!fetched_) return;
    const Fetched unit = *std::exchange(fetched_, std::nullopt);
    copier_->end_fetch(stop_);
    buffer_ = unit.buffer;
    hashing_.begin_buffer();
    write(unit.number);
  }

  void write(size_t number) {
    const Unit& unit = shared_.plan.units[number];
    if (unit.count > 0) {
      write_whole_records(unit);
    } else {
      write_step(unit);
    }
    job_.nbytes_done.fetch_add(unit.nbytes, std::memory_order_relaxed);
    shared_.written.fetch_add(1);
  }

  // The unit's plaintext, one payload behind the other. The only time that the caller's memory is
  // read.
  void fill_buffer(const Unit& unit) {
    pieces_.clear();
    uint64_t at = 0;
    for (uint32_t i = unit.first; i < unit.first + std::max(unit.count, 1U); ++i) {
      const uint64_t nbytes = unit.count > 0 ? job_.payloads[i].nbytes : unit.nbytes;
      if (nbytes > 0) pieces_.push_back({at, job_.payloads[i].data + unit.offset, nbytes});
      at += nbytes;
    }
    if (copier_ && !pieces_.empty()) {
      copier_->begin_fetch(pieces_, stop_);
    } else {
      for (const device::CopyPiece& piece : pieces_)
        std::memcpy(buffer_.data() + piece.buffer_offset, piece.device_address, piece.nbytes);
    }
  }

  // Plaintext of the unit in host memory: a payload of its `nbytes`, `at` behind the first.
  std::span<const std::byte> plaintext(const Unit& unit, uint32_t payload, uint64_t at,
                                       uint64_t nbytes) const {
    if (is_staged()) return buffer_.subspan(at, nbytes);
    return {job_.payloads[payload].data + unit.offset, nbytes};
  }

  void write_whole_records(const Unit& unit) {
    std::vector<RecordDigester::Whole> whole;
    uint64_t at = 0;
    for (uint32_t i = unit.first; i < unit.first + unit.count; ++i) {
      const uint64_t nbytes = job_.payloads[i].nbytes;
      whole.push_back({i, shared_.start_of(i), plaintext(unit, i, at, nbytes)});
      at += nbytes;
    }
    shared_.digester.add_whole(whole);
    std::vector<io::ConstBuffer> buffers;
    at = 0;
    for (const RecordDigester::Whole& record : whole) {
      buffers.emplace_back(job_.records[record.record].header.bytes);
      buffers.push_back(stored_bytes(record.record, at, record.bytes));
      at += record.bytes.size();
    }
    write_at(job_.records[unit.first].offset, buffers);
  }

  void write_step(const Unit& unit) {
    const std::span<const std::byte> plain = plaintext(unit, unit.first, 0, unit.nbytes);
    PlannedRecord& record = job_.records[unit.first];
    if (record.encrypted) {
      write_sealed(record, unit.offset, plain);
    } else if (shared_.sink.in_order() && unit.step == 0) {
      const std::array<io::ConstBuffer, 2> both{io::ConstBuffer(record.header.bytes), plain};
      write_at(record.offset, both);
    } else {
      write_at(record.data_offset() + unit.offset, plain);
    }
    // Only now: the record may be complete with it.
    shared_.digester.add(unit.first, unit.step, plain);
    if (is_staged()) hashing_.add({unit.first, unit.step});
  }

  // What the file holds of a whole payload: itself, or its ciphertext, made at `at` of a buffer.
  io::ConstBuffer stored_bytes(uint32_t record, uint64_t at, std::span<const std::byte> plain) {
    if (!job_.records[record].encrypted) return plain;
    cipher_.resize(buffer_.size());
    const std::span<std::byte> cipher(cipher_.data() + at, plain.size());
    for_each_chunk(plain, [&](uint64_t done, std::span<const std::byte> chunk) {
      seal_chunk(job_.records[record], done, chunk, cipher.subspan(done, chunk.size()));
    });
    return cipher;
  }

  // Seals and writes a step, each chunk while it is in the processor's cache; into the sink's own
  // memory where it has some.
  void write_sealed(PlannedRecord& record, uint64_t offset, std::span<const std::byte> plain) {
    for_each_chunk(plain, [&](uint64_t done, std::span<const std::byte> chunk) {
      const uint64_t at = record.data_offset() + offset + done;
      const auto seal = [&](io::Buffer room) { seal_chunk(record, offset + done, chunk, room); };
      if (shared_.sink.fill_at(at, chunk.size(), seal, stop_)) return;
      cipher_.resize(buffer_.size());
      const io::Buffer room = std::span(cipher_).first(chunk.size());
      seal(room);
      write_at(at, room);
    });
  }

  // Where the sink takes one writer at a time, a thread that finds another one there hashes steps.
  template <class Bytes>
  void write_at(uint64_t offset, const Bytes& bytes) {
    if (!shared_.sink.one_writer()) return shared_.sink.write_at(offset, bytes, stop_);
    while (!shared_.writing.try_lock()) {
      if (shared_.digester.help_with(2)) continue;
      shared_.writing.lock();
      break;
    }
    const MutexLock writes(shared_.writing, std::adopt_lock);
    shared_.sink.write_at(offset, bytes, stop_);
    shared_.write_complete_headers(stop_);
  }

  template <class Fn>
  void for_each_chunk(std::span<const std::byte> plain, Fn&& fn) const {
    for (uint64_t done = 0; done < plain.size(); done += kCipherChunkNbytes) {
      throw_if_stopped(stop_);
      fn(done, plain.subspan(done, std::min(kCipherChunkNbytes, plain.size() - done)));
    }
  }

  // The chunk at `offset` of the record's payload; its MAC goes to the header.
  void seal_chunk(PlannedRecord& record, uint64_t offset, std::span<const std::byte> plain,
                  std::span<std::byte> cipher) const noexcept {
    const uint64_t chunk = offset / kCipherChunkNbytes;
    const auto nonce = crypto::nonce_plus(crypto::NonceView(record.nonce), chunk);
    const auto mac = std::span(record.header.bytes)
                         .subspan(record.header.macs_at + chunk * kMacNbytes)
                         .first<kMacNbytes>();
    crypto::seal(cipher, mac, plain, nonce, *job_.key);
  }

  Shared& shared_;
  const RecordsToWrite& job_;
  const std::stop_token stop_;
  std::unique_ptr<device::Copier> copier_;  // set iff the payloads are on a device
  std::span<std::byte> buffer_;             // with the plaintext of the unit at hand, if staged
  // From a device: a buffer that nothing was fetched to yet; a unit that is on its way.
  struct Fetched {
    size_t number;
    std::span<std::byte> buffer;
  };
  bool prepared_ = false;
  std::span<std::byte> next_buffer_;
  std::optional<Fetched> fetched_;
  std::array<Pages, kHostBuffers> host_buffers_;  // host tensors are only staged to be encrypted
  size_t next_host_buffer_ = 0;
  digest::StepsInBuffers hashing_{&shared_.digester};  // behind the buffers
  std::vector<device::CopyPiece> pieces_;
  std::vector<std::byte> cipher_;
};

}  // namespace

void write_records(const RecordsToWrite& job, io::RangeSink& sink, const std::stop_token& stop) {
  uint64_t unit_nbytes = kUnitNbytes;
  if (job.is_staged())
    unit_nbytes =
        job.engine == nullptr
            ? kHostBufferNbytes
            : std::min(unit_nbytes, align_down(job.engine->buffer_nbytes(), kCipherChunkNbytes));
  Plan plan = cut(job.records, job.payloads, unit_nbytes);
  const unsigned useful = std::max(sink.concurrency(), cpu_quota());
  const unsigned allowed = job.max_workers > 0 ? std::min(job.max_workers, useful) : useful;
  const unsigned most = sink.in_order()     ? 1
                        : sink.places() > 0 ? std::min(allowed, sink.places())
                                            : allowed;
  const auto workers = static_cast<unsigned>(std::clamp<size_t>(plan.units.size(), 1, most));
  const Hashing hashing = hashing_of(job, sink, workers);
  if (hashing.dealt > 0) {
    const auto record_of = [](const Unit& unit) {
      return unit.count > 0 ? digest::kNoRecord : unit.first;
    };
    const std::vector<uint32_t> records = digest::records_of(plan.units, record_of);
    digest::put_in_order(plan.units, digest::deal(records, hashing.dealt, hashing.dealt));
  }
  Shared shared(job, std::move(plan), workers, hashing.gathered, sink, stop);
  std::atomic<size_t> next{0};
  run_units(shared.plan.units.size(), next, workers, stop,
            [&](const std::stop_token& token) { return std::make_unique<Worker>(shared, token); });
}

}  // namespace tensorizer::save
