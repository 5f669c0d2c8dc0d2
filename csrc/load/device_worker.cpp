#include "load/device_worker.h"

#include <functional>
#include <optional>
#include <utility>

#include "core/format_sizes.h"
#include "device/host_arena.h"
#include "load/unit_stages.h"

namespace tensorizer::load {
namespace {

// A worker's part of one load: its copier, and the buffers that it has under way.
class DeviceLoad : private UnitStages {
 public:
  // `before_blocking` is called before the thread waits in line for a buffer of the copier, which
  // has none then.
  DeviceLoad(LoadSession& session, const std::stop_token& stop,
             std::function<void()> before_blocking)
      : UnitStages(session, stop),
        before_blocking_(std::move(before_blocking)),
        copier_(session.options.engine->make_copier(session.cipher != nullptr)) {
    const io::SourceTraits traits = session.source.traits();
    remote_ = traits.remote && !traits.sequential;
    if (remote_) read_buffers_.resize(session.read_buffers);
  }

  // Hashes what others left; false: there is nothing.
  bool help() { return session_.digester && session_.digester->help(); }

  // Gets a buffer for the next unit.
  void prepare() {
    if (prepared_) return;
    if (!has_room()) take_buffer();
    prepared_ = true;
  }

  // Gives back what prepare() got.
  void unprepare() {
    if (!std::exchange(prepared_, false)) return;
    if (!outgoing_.empty()) return send();
    buffer_ = {};
    if (session_.digester) hashing_.drop_newest();
    if (remote_) {
      --next_read_buffer_;
    } else {
      copier_->give_back_unused();
    }
  }

  // Ends the use of every buffer of the copier.
  void release_buffers() {
    send();
    if (!remote_)
      while (hashing_.buffers() > 0) hashing_.release_oldest(stop_);
    free_slots();
  }

  void process(size_t number) {
    unit_ = number;
    prepared_ = false;
    const Unit& unit = session_.plan.units[number];
    const std::span<const Piece> pieces = session_.plan.pieces_of(unit);
    session_.note(number, LoadSession::Progress::begun);
    give_places(unit, pieces);
    const std::byte* image = session_.in_order(number, stop_, [&] { return read(unit, pieces); });
    if (session_.options.parts && session_.cipher && unit.placed_nbytes > 0)
      image = open_chunks(unit, pieces.front(), image, nullptr);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.kind == Piece::Kind::header) {
        if (image) read_up_to(unit, piece.unit_offset + piece.nbytes);
        accept_header(piece.target, {image ? image + piece.unit_offset : places_[i], piece.nbytes});
      } else if (places_[i] == nullptr) {
        pack(unit, piece, image);
      } else if (open(unit, piece, image, places_[i])) {
        if (session_.digester && digest(piece, places_[i]))
          hashing_.add({piece.target, piece.step});
        outgoing_.push_back({number, place_in_buffer(places_[i]), piece.nbytes, piece.target,
                             piece.place, std::exchange(chunks_, 0)});
      }
    }
    digest_whole_records();
    if (!has_room() || !straddling_.empty()) send();
    for (const uint32_t record : straddling_) load_by_itself(record);
    straddling_.clear();
    session_.nbytes_done.fetch_add(unit.placed_nbytes, std::memory_order_relaxed);
  }

  // No unit is left.
  void finish() {
    send();
    if (session_.digester) session_.digester->finish(stop_);
    copier_->finish(stop_);
  }

 private:
  // A piece in the buffer that is to be sent; `chunks`: how many of it the device opens.
  struct Outgoing {
    size_t unit;
    uint64_t at, nbytes;
    uint32_t target;
    uint64_t place;
    size_t chunks;
  };
  struct ReadBuffer {
    std::span<std::byte> bytes;
    std::shared_ptr<void> owner;
  };
  struct Origin {
    uint32_t target;
    uint64_t chunk;
  };

  uint64_t place_in_buffer(const std::byte* place) const {
    return static_cast<uint64_t>(place - buffer_.data());
  }

  // --- buffers ---

  // Whether the buffer at hand takes any further unit.
  bool has_room() const noexcept {
    const LoadPlan& plan = session_.plan;
    return plan.units_share_buffers && used_ + plan.longest_unit_nbytes <= buffer_.size();
  }

  void begin_buffer(std::span<std::byte> buffer) {
    buffer_ = buffer;
    if (session_.digester) hashing_.begin_buffer();
    used_ = 0;
  }

  void take_buffer() {
    if (remote_) {
      take_read_buffer();
    } else {
      take_slot();
    }
  }

  // A buffer goes on once its copies are done and its steps are hashed. Two or three are under way,
  // so that a worker has steps of several tensors to hash side by side.
  void take_slot() {
    const auto release = [this] {
      if (session_.digester) hashing_.release_oldest(stop_);
    };
    begin_buffer(device::next_buffer(*copier_, stop_, release, before_blocking_));
  }

  // The copies from it are made when send() returns: it goes on once its steps are hashed.
  void take_read_buffer() {
    if (hashing_.buffers() == read_buffers_.size()) hashing_.release_oldest(stop_);
    ReadBuffer& next = read_buffers_[next_read_buffer_++ % read_buffers_.size()];
    if (next.bytes.empty()) next = make_read_buffer(session_.options.engine->buffer_nbytes());
    begin_buffer(next.bytes);
  }

  // Of a plain file in pages that are there already, where earlier loads have left some.
  ReadBuffer make_read_buffer(uint64_t nbytes) const {
    if (session_.cipher) {
      auto secret = std::make_shared<Pages>(allocate_pages(nbytes, PageUse::secret));
      return {bytes_of(*secret).first(nbytes), secret};
    }
    auto arena = device::HostArena::recycle(nbytes);
    return {arena->bytes(), arena};
  }

  // Where the bytes of each piece come together: in the buffer where they lie in the unit, or, of
  // parts, one behind the other. Chunks of encrypted parts may be longer than a buffer, and have no
  // place before they are opened.
  void give_places(const Unit& unit, std::span<const Piece> pieces) {
    places_.clear();
    const bool parts = session_.options.parts;
    if (!parts) {
      unit_begin_ = used_ + place_in_page(unit, used_, buffer_.size());
      used_ = unit_begin_ + unit.nbytes;
    }
    for (const Piece& piece : pieces) {
      std::byte* place = nullptr;
      if (piece.kind == Piece::Kind::header) {
        // read() knows.
      } else if (!parts) {
        place = buffer_.data() + unit_begin_ + piece.unit_offset;
      } else if (!session_.cipher) {
        place = buffer_.data() + used_;
        used_ += piece.nbytes;
      }
      places_.push_back(place);
    }
  }

  // --- read ---

  // The image of the unit; null where its bytes are in their places.
  const std::byte* read(const Unit& unit, std::span<const Piece> pieces) {
    in_buffer_ = unit.nbytes;
    if (!session_.options.parts)
      return unit.placed_nbytes > 0 ? read_to_buffer(unit) : read_image(unit);
    if (session_.cipher || unit.read == Unit::Read::image) return read_image(unit);
    read_to_places(unit, pieces);
    return nullptr;
  }

  // Chunks are opened while they are in the cache: of those, no more is read at once than the
  // source likes. What is in memory already is opened from there.
  const std::byte* read_to_buffer(const Unit& unit) {
    const io::SourceTraits traits = session_.source.traits();
    if (session_.cipher) {
      if (const std::byte* there = session_.source.view(unit.offset, unit.nbytes)) return there;
      if (!traits.remote && !traits.sequential && !traits.ascending) {
        in_buffer_ = 0;
        return buffer_.data() + unit_begin_;
      }
    }
    const io::Buffer into = buffer_.subspan(unit_begin_, unit.nbytes);
    session_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  // Of a unit that is read to the buffer bit by bit: all up to there.
  void read_up_to(const Unit& unit, uint64_t end) {
    while (in_buffer_ < end) {
      const uint64_t n =
          std::min(std::max(end - in_buffer_, kCipherChunkNbytes), unit.nbytes - in_buffer_);
      session_.source.read_at(unit.offset + in_buffer_,
                              buffer_.subspan(unit_begin_ + in_buffer_, n), stop_);
      in_buffer_ += n;
    }
  }

  // --- open ---

  // Gets the bytes of a piece to their place. False: the worker with its header does that.
  bool open(const Unit& unit, const Piece& piece, const std::byte* image, std::byte* place) {
    if (session_.cipher && !session_.options.parts) {
      if (!can_open_alone(piece)) return false;
      open_piece(unit, piece, image + piece.unit_offset, place);
    } else if (image != nullptr && image + piece.unit_offset != place) {
      copy_runs(unit, piece, 0, piece.nbytes, image, place);
    }
    return true;
  }

  // Whole chunks, a few at a time, while they are in the cache.
  void open_piece(const Unit& unit, const Piece& piece, const std::byte* stored, std::byte* place) {
    chunks_ = chunks_for_device(piece);
    const uint64_t chunk_nbytes = session_.cipher->chunk_nbytes(piece.target);
    const uint64_t step = std::max(chunk_nbytes, align_down(kCipherChunkNbytes, chunk_nbytes));
    for (uint64_t done = 0; done < piece.nbytes;) {
      const uint64_t n = std::min(step, piece.nbytes - done);
      read_up_to(unit, piece.unit_offset + done + n);
      if (chunks_ == 0) {
        open_chunks_of(piece.target, piece.place + done, {stored + done, n}, place + done);
      } else if (stored != place) {
        std::memcpy(place + done, stored + done, n);
      }
      done += n;
    }
  }

  // Ciphertext goes to the device if the kernels can open it and no thread hashes the plaintext.
  // Memory that is not allocated yet will be aligned.
  size_t chunks_for_device(const Piece& piece) {
    if (session_.digester) return 0;
    const uint64_t at = session_.has_memory(piece.target)
                            ? reinterpret_cast<uintptr_t>(
                                  session_.targets[piece.target].destination.data + piece.place)
                            : piece.place;
    const size_t count = session_.cipher->chunks_for_device(piece.target, piece.nbytes, at);
    if (count == 0 || sealed_ + count > copier_->most_chunks_to_open(stop_)) return 0;
    sealed_ += count;
    return count;
  }

  // --- place ---

  void send() {
    if (outgoing_.empty()) return;
    for (const Outgoing& piece : outgoing_) session_.wait_for_memory(piece.target, stop_);
    copier_->pass_fence(stop_);
    if (remote_) copy_to_slot();
    std::vector<Origin> origins;
    for (const Outgoing& piece : outgoing_) {
      session_.note(piece.unit, LoadSession::Progress::placed);
      std::byte* const address = session_.targets[piece.target].destination.data + piece.place;
      copies_.push_back({piece.at, address, piece.nbytes});
      if (piece.chunks > 0) describe(piece, address, origins);
    }
    outgoing_.clear();
    sealed_ = 0;
    const size_t chunks = origins.size();
    const auto refuse = [this, origins = std::move(origins)](size_t i) {
      const Origin& origin = origins[i];
      session_.naming(origin.target, [&] { session_.cipher->refuse(origin.target, origin.chunk); });
    };
    copier_->send_to_open(copies_, chunks, refuse, stop_);
    copies_.clear();
    buffer_ = {};  // is sent once
    // The next request takes longer than these copies, and other workers wait for slots meanwhile.
    if (remote_) free_slots();
  }

  void free_slots() {
    copier_->finish(stop_);
    copier_->give_back_unused();
  }

  void copy_to_slot() {
    const std::span<std::byte> slot = device::next_buffer(*copier_, stop_, [] {}, before_blocking_);
    for (const Outgoing& piece : outgoing_)
      std::memcpy(slot.data() + piece.at, buffer_.data() + piece.at, piece.nbytes);
  }

  // What the device opens of the buffer that is about to be sent.
  void describe(const Outgoing& piece, const std::byte* address, std::vector<Origin>& origins) {
    const uint64_t first = piece.place / session_.cipher->chunk_nbytes(piece.target);
    session_.cipher->describe(piece.target, piece.place, piece.nbytes, address,
                              copier_->chunks_to_open(stop_).subspan(origins.size()));
    for (size_t i = 0; i < piece.chunks; ++i) origins.push_back({piece.target, first + i});
  }

  // From an image to as many buffers as it takes.
  void pack(const Unit& unit, const Piece& piece, const std::byte* image) {
    for (uint64_t done = 0; done < piece.nbytes;) {
      if (used_ == buffer_.size()) {
        send();
        take_buffer();
      }
      const uint64_t n = std::min<uint64_t>(piece.nbytes - done, buffer_.size() - used_);
      copy_runs(unit, piece, done, n, image, buffer_.data() + used_);
      outgoing_.push_back({unit_, used_, n, piece.target, piece.place + done, 0});
      used_ += n;
      done += n;
    }
  }

  // --- all four, of a tensor whose chunks straddle the pieces ---

  void load_by_itself(uint32_t record) {
    const uint64_t nbytes = session_.entry_of(record).data_nbytes;
    const Pages opened = allocate_pages(nbytes, PageUse::secret);
    const std::span<std::byte> bytes(opened.get(), nbytes);
    digest::StepsInBuffers hashing(session_.digester.get());  // behind the bytes
    if (session_.digester) hashing.begin_buffer();
    load_straddling(record, bytes, [&](uint32_t step) { hashing.add({record, step}); });
    take_buffer();
    pack({}, {.target = record, .span_nbytes = nbytes, .nbytes = nbytes}, bytes.data());
    send();
    if (session_.digester) hashing.release_oldest(stop_);
  }

  const std::function<void()> before_blocking_;
  const std::unique_ptr<device::Copier> copier_;
  size_t unit_ = 0;              // at hand
  bool remote_ = false;          // units are read to memory of ours first
  bool prepared_ = false;        // buffer_ is for the next unit
  std::span<std::byte> buffer_;  // for the unit at hand
  uint64_t used_ = 0;            // of the buffer
  uint64_t unit_begin_ = 0;      // in the buffer, of the image of a unit
  uint64_t in_buffer_ = 0;       // bytes of the unit that have been read
  std::vector<Outgoing> outgoing_;
  size_t chunks_ = 0;  // of the piece at hand that the device opens
  size_t sealed_ = 0;  // of outgoing_
  std::vector<device::CopyPiece> copies_;
  std::vector<ReadBuffer> read_buffers_;  // where the source is on another machine
  size_t next_read_buffer_ = 0;
  digest::StepsInBuffers hashing_{session_.digester.get()};  // behind the buffers
};

class DeviceWorker final : public UnitWorker {
 public:
  DeviceWorker(std::span<LoadSession* const> sessions, std::span<const NumberedUnit> order,
               const std::stop_token& stop)
      : sessions_(sessions), order_(order), stop_(stop), loads_(sessions.size()) {}

  bool help() override {
    bool helped = false;
    for (const auto& load : loads_) helped = (load && load->help()) || helped;
    return helped;
  }

  void prepare(size_t number) override {
    const uint32_t load = unit_at(number).load;
    if (prepared_ && *prepared_ != load) loads_[*prepared_]->unprepare();
    prepared_ = load;
    load_at(load).prepare();
  }

  void process(size_t number) override {
    const auto [load, unit] = unit_at(number);
    prepared_.reset();
    load_at(load).process(unit);
  }

  void finish() override {
    for (const auto& load : loads_)
      if (load) load->finish();
    // Others may have more to do than this thread has seen.
    for (size_t i = 0; i < loads_.size(); ++i)
      if (!loads_[i] && sessions_[i]->digester) sessions_[i]->digester->finish(stop_);
  }

 private:
  NumberedUnit unit_at(size_t number) const {
    return order_.empty() ? NumberedUnit{0, static_cast<uint32_t>(number)} : order_[number];
  }

  DeviceLoad& load_at(uint32_t load) {
    if (!loads_[load])
      loads_[load] = std::make_unique<DeviceLoad>(*sessions_[load], stop_,
                                                  [this, load] { release_others(load); });
    return *loads_[load];
  }

  // A thread that waits in line for a buffer of one device holds none of another's: that would keep
  // those waiting that hold what it waits for. Its own copies end without anybody's help: while it
  // waits for those, the other device goes on with what it has.
  void release_others(uint32_t load) {
    for (uint32_t other = 0; other < loads_.size(); ++other)
      if (other != load && loads_[other]) loads_[other]->release_buffers();
  }

  const std::span<LoadSession* const> sessions_;
  const std::span<const NumberedUnit> order_;
  const std::stop_token stop_;
  std::vector<std::unique_ptr<DeviceLoad>> loads_;  // per session; made when it is first needed
  std::optional<uint32_t> prepared_;                // the load of the unit that is expected
};

}  // namespace

std::unique_ptr<UnitWorker> make_device_worker(std::span<LoadSession* const> sessions,
                                               std::span<const NumberedUnit> order,
                                               const std::stop_token& stop) {
  return std::make_unique<DeviceWorker>(sessions, order, stop);
}

}  // namespace tensorizer::load
