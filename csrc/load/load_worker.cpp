#include "load/load_worker.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/checked_math.h"
#include "core/pages.h"
#include "device/host_arena.h"

namespace tensorizer::load {
namespace {

class Worker final : public LoadWorker {
 public:
  Worker(LoadJob& job, const std::stop_token& stop, std::function<void()> before_line)
      : job_(job), stop_(stop), before_line_(std::move(before_line)) {
    const auto places = [](const Unit& unit) { return unit.placed_nbytes > 0; };
    if (job_.options.engine != nullptr && std::ranges::any_of(job_.plan.units, places)) {
      copier_ = job_.options.engine->make_copier(job_.cipher != nullptr);
      const io::SourceTraits traits = job_.source.traits();
      waits_ = traits.waits && !traits.sequential;
      if (waits_) read_buffers_.resize(job_.read_buffers);
    }
  }

  bool help() override { return job_.digester && job_.digester->help(); }

  void prepare() override {
    if (!copier_ || prepared_) return;
    if (!has_room()) take_buffer();
    prepared_ = true;
  }

  void unprepare() override {
    if (!std::exchange(prepared_, false)) return;
    if (!outgoing_.empty()) return send();
    buffer_ = {};
    if (job_.digester) hashing_.drop_newest();
    if (waits_) {
      --next_read_buffer_;
    } else {
      copier_->give_back_unused();
    }
  }

  void release_buffers() override {
    if (!copier_) return;
    send();
    if (!waits_)
      while (hashing_.buffers() > 0) hashing_.release_oldest(stop_);
    free_slots();
  }

  void process(size_t number) override {
    unit_ = number;
    prepared_ = false;
    const Unit& unit = job_.plan.units[number];
    const std::span<const Piece> pieces = job_.plan.pieces_of(unit);
    job_.note(number, LoadJob::Progress::begun);
    give_places(unit, pieces);
    const std::byte* image = job_.in_order(number, stop_, [&] { return read(unit, pieces); });
    if (job_.options.parts && job_.cipher && unit.placed_nbytes > 0)
      image = open_chunks(unit, pieces, image);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.kind == Piece::Kind::header) {
        if (image) read_up_to(unit, piece.unit_offset + piece.nbytes);
        accept_header(piece.target, {image ? image + piece.unit_offset : places_[i], piece.nbytes});
      } else if (places_[i] == nullptr) {
        pack(unit, piece, image);
      } else if (open(unit, piece, image, places_[i])) {
        if (job_.digester) digest(piece, places_[i]);
        if (copier_)
          outgoing_.push_back({number, place_in_buffer(places_[i]), piece.nbytes, piece.target,
                               piece.place, std::exchange(chunks_, 0)});
      }
    }
    if (job_.digester) job_.digester->add_whole(whole_);
    whole_.clear();
    if (!has_room() || !straddling_.empty()) send();
    for (const uint32_t record : straddling_) load_by_itself(record);
    straddling_.clear();
    job_.nbytes_done.fetch_add(unit.placed_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    send();
    if (job_.digester) job_.digester->finish(stop_);
    if (copier_) copier_->finish(stop_);
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

  std::byte* destination_of(const Piece& piece) const {
    return job_.targets[piece.target].destination.data + piece.place;
  }
  uint64_t place_in_buffer(const std::byte* place) const {
    return static_cast<uint64_t>(place - buffer_.data());
  }

  // --- buffers ---

  // Whether the buffer at hand takes any further unit.
  bool has_room() const noexcept {
    const LoadPlan& plan = job_.plan;
    return plan.units_share_buffers && used_ + plan.longest_unit_nbytes <= buffer_.size();
  }

  void begin_buffer(std::span<std::byte> buffer) {
    buffer_ = buffer;
    if (job_.digester) hashing_.begin_buffer();
    used_ = 0;
  }

  void take_buffer() {
    if (waits_) {
      take_read_buffer();
    } else {
      take_slot();
    }
  }

  // A buffer goes on once its copies are done and its steps are hashed. Two or three are under way,
  // so that a worker has steps of several tensors to hash side by side.
  void take_slot() {
    const auto release = [this] {
      if (job_.digester) hashing_.release_oldest(stop_);
    };
    begin_buffer(device::next_buffer(*copier_, stop_, release, before_line_));
  }

  // The copies from it are made when send() returns: it goes on once its steps are hashed.
  void take_read_buffer() {
    if (hashing_.buffers() == read_buffers_.size()) hashing_.release_oldest(stop_);
    ReadBuffer& next = read_buffers_[next_read_buffer_++ % read_buffers_.size()];
    if (next.bytes.empty()) next = make_read_buffer(job_.options.engine->buffer_nbytes());
    begin_buffer(next.bytes);
  }

  // Of a plain file in pages that are there already, where earlier loads have left some.
  ReadBuffer make_read_buffer(uint64_t nbytes) const {
    if (job_.cipher) {
      auto secret = std::make_shared<Pages>(allocate_pages(nbytes, PageUse::secret));
      return {bytes_of(*secret).first(nbytes), secret};
    }
    auto arena = device::HostArena::recycle(nbytes);
    return {arena->bytes(), arena};
  }

  // Where the bytes of each piece come together: at their destination on the host; in the copier's
  // buffer where they lie in the unit, or, of parts, one behind the other. Chunks of encrypted
  // parts may be longer than a buffer, and have no place before they are opened.
  void give_places(const Unit& unit, std::span<const Piece> pieces) {
    places_.clear();
    if (copier_ && !job_.options.parts) {
      unit_begin_ = used_ + place_in_page(unit, used_, buffer_.size());
      used_ = unit_begin_ + unit.nbytes;
    }
    for (const Piece& piece : pieces) {
      std::byte* place = nullptr;
      if (piece.kind == Piece::Kind::header) {
        // read() knows.
      } else if (!copier_) {
        place = destination_of(piece);
      } else if (!job_.options.parts) {
        place = buffer_.data() + unit_begin_ + piece.unit_offset;
      } else if (!job_.cipher) {
        place = buffer_.data() + used_;
        used_ += piece.nbytes;
      }
      places_.push_back(place);
    }
  }

  // --- read ---

  // The image of the unit; null where its bytes are in their places.
  const std::byte* read(const Unit& unit, std::span<const Piece> pieces) {
    const bool whole_to_device = copier_ && !job_.options.parts;
    if (whole_to_device && unit.placed_nbytes > 0) return read_to_buffer(unit);
    if (whole_to_device || job_.cipher || unit.read == Unit::Read::image) return read_image(unit);
    if (unit.read == Unit::Read::apart) {
      for_each_stretch(unit, pieces, [&](size_t, uint64_t begin, std::byte* to, uint64_t nbytes) {
        job_.source.read_at(begin, io::Slice(to, nbytes), stop_);
      });
    } else {
      read_scattered(unit, pieces);
    }
    return nullptr;
  }

  // Chunks are opened while they are in the cache: of those, no more is read at once than the
  // source likes. What is in memory already is opened from there.
  const std::byte* read_to_buffer(const Unit& unit) {
    const io::SourceTraits traits = job_.source.traits();
    in_buffer_ = unit.nbytes;
    if (job_.cipher) {
      if (const std::byte* there = job_.source.view(unit.offset, unit.nbytes)) return there;
      if (!traits.waits && !traits.sequential) {
        in_buffer_ = 0;
        return buffer_.data() + unit_begin_;
      }
    }
    const io::Slice into = buffer_.subspan(unit_begin_, unit.nbytes);
    job_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  // Of a unit that is read to the buffer bit by bit: all up to there.
  void read_up_to(const Unit& unit, uint64_t end) {
    while (in_buffer_ < end) {
      const uint64_t n =
          std::min(std::max(end - in_buffer_, kCipherChunkNbytes), unit.nbytes - in_buffer_);
      job_.source.read_at(unit.offset + in_buffer_, buffer_.subspan(unit_begin_ + in_buffer_, n),
                          stop_);
      in_buffer_ += n;
    }
  }

  const std::byte* read_image(const Unit& unit) {
    in_buffer_ = unit.nbytes;
    if (const std::byte* there = job_.source.view(unit.offset, unit.nbytes)) return there;
    grow_image(unit.nbytes + kPageNbytes);
    const io::Slice into(image_.get() + place_in_page(unit, 0, bytes_of(image_).size()),
                         unit.nbytes);
    job_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  // How far behind `used` the unit's image begins: where in a page it does in the file, if the
  // buffer has room for that. A read past the page cache then needs no copy.
  static uint64_t place_in_page(const Unit& unit, uint64_t used, uint64_t buffer_nbytes) noexcept {
    const uint64_t place = (unit.offset - used) % kPageNbytes;
    return used + place + unit.nbytes <= buffer_nbytes ? place : 0;
  }

  void grow_image(uint64_t nbytes) {
    if (nbytes > bytes_of(image_).size()) image_ = allocate_pages(nbytes);
  }

  // Calls fn(piece, begin, to, nbytes) for the runs of all pieces, in the order of the source:
  // `begin` absolute, `to` in the piece's place.
  template <class Fn>
  void for_each_stretch(const Unit& unit, std::span<const Piece> pieces, Fn&& fn) const {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.is_one_run()) {
        fn(i, unit.offset + piece.unit_offset, places_[i], piece.nbytes);
        continue;
      }
      const uint64_t payload = job_.entry_of(job_.record_of(piece.target)).data_offset;
      for_each_run(job_.targets[piece.target].runs, piece.place, piece.nbytes,
                   [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                     fn(i, payload + offset, places_[i] + (place - piece.place), nbytes);
                   });
    }
  }

  // One read, or one for each stretch between payloads that are in place. What lies between runs
  // goes to a place that nobody looks at.
  void read_scattered(const Unit& unit, std::span<const Piece> pieces) {
    give_room(unit, pieces);
    uint64_t begin = 0, end = 0;  // of what the slices cover
    const auto flush = [&] {
      if (!slices_.empty()) job_.source.read_at(begin, slices_, stop_);
      slices_.clear();
    };
    for_each_stretch(unit, pieces, [&](size_t i, uint64_t at, std::byte* to, uint64_t nbytes) {
      if (pieces[i].kind == Piece::Kind::payload && job_.targets[pieces[i].target].in_place)
        return flush();
      if (slices_.empty()) {
        begin = at;
      } else if (at > end) {
        slices_.emplace_back(image_.get(), at - end);
      }
      slices_.emplace_back(to, nbytes);
      end = at + nbytes;
    });
    flush();
  }

  // Places for headers, and memory for the longest gap, before any slice points there.
  void give_room(const Unit& unit, std::span<const Piece> pieces) {
    uint64_t headers = 0, gap = 0, end = unit.offset;
    for_each_stretch(unit, pieces, [&](size_t i, uint64_t at, std::byte*, uint64_t nbytes) {
      if (pieces[i].kind == Piece::Kind::header) headers += nbytes;
      gap = std::max(gap, at - end);
      end = at + nbytes;
    });
    grow_image(gap);
    if (headers_.size() < headers) headers_.resize(headers);
    std::byte* to = headers_.data();
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].kind != Piece::Kind::header) continue;
      places_[i] = to;
      to += pieces[i].nbytes;
    }
  }

  // --- open ---

  void accept_header(uint32_t record, std::span<const std::byte> bytes) {
    if (const auto start = job_.accept_header(record, bytes))
      whole_.push_back({record, *start, {}});
    if (job_.cipher && job_.cipher->straddles(record)) straddling_.push_back(record);
  }

  // Gets the bytes of a piece to their place. False: whoever has its header does that.
  bool open(const Unit& unit, const Piece& piece, const std::byte* image, std::byte* place) {
    if (job_.cipher && !job_.options.parts) {
      if (job_.plan.hash_steps[piece.target] > 0) job_.wait_for_header(piece.target, stop_);
      if (job_.cipher->straddles(piece.target)) return false;
      open_piece(unit, piece, image + piece.unit_offset, place);
    } else if (image != nullptr && image + piece.unit_offset != place) {
      copy_runs(unit, piece, 0, piece.nbytes, image, place);
    }
    return true;
  }

  // Whole chunks; for a device a few at a time, while they are in the cache.
  void open_piece(const Unit& unit, const Piece& piece, const std::byte* stored, std::byte* place) {
    chunks_ = chunks_for_device(piece);
    const uint64_t chunk_nbytes = job_.cipher->chunk_nbytes(piece.target);
    const uint64_t step = std::max(chunk_nbytes, align_down(kCipherChunkNbytes, chunk_nbytes));
    for (uint64_t done = 0; done < piece.nbytes;) {
      const uint64_t n = copier_ ? std::min(step, piece.nbytes - done) : piece.nbytes;
      if (copier_) read_up_to(unit, piece.unit_offset + done + n);
      if (chunks_ == 0) {
        job_.naming(piece.target, [&] {
          job_.cipher->open(piece.target, piece.place + done, {stored + done, n}, place + done,
                            stop_);
        });
      } else if (stored != place) {
        std::memcpy(place + done, stored + done, n);
      }
      done += n;
    }
  }

  // Ciphertext goes to the device where the kernels can open it and nobody hashes the plaintext.
  // Memory that is not allocated yet will be aligned.
  size_t chunks_for_device(const Piece& piece) {
    if (!copier_ || job_.digester) return 0;
    const uint64_t at = job_.has_memory(piece.target)
                            ? reinterpret_cast<uintptr_t>(destination_of(piece))
                            : piece.place;
    const size_t count = job_.cipher->chunks_for_device(piece.target, piece.nbytes, at);
    if (count == 0 || sealed_ + count > copier_->most_chunks_to_open(stop_)) return 0;
    sealed_ += count;
    return count;
  }

  // Opens the chunks that the unit's parts lie in, each once. One that a single part takes whole is
  // opened to where it goes, the others to memory of ours. Returns the image of what is opened;
  // null where all of it is in its place.
  const std::byte* open_chunks(const Unit& unit, std::span<const Piece> pieces,
                               const std::byte* image) {
    const Piece& first = pieces.front();
    const uint32_t record = job_.record_of(first.target);
    const uint64_t payload = job_.entry_of(record).data_offset;
    const uint64_t chunk_nbytes = job_.cipher->chunk_nbytes(record);
    const bool straight = !copier_ && pieces.size() == 1 && first.is_one_run();
    if (bytes_of(plain_).size() < unit.nbytes)
      plain_ = allocate_pages(unit.nbytes, PageUse::secret);
    for (uint64_t at = 0; at < unit.nbytes;) {
      const uint64_t end = std::min(at + chunk_nbytes, unit.nbytes);
      const uint64_t from = std::max(at, first.unit_offset);
      const uint64_t until = std::min(end, first.unit_offset + first.span_nbytes);
      std::byte* const to = straight && from == at && until == end
                                ? places_.front() + (at - first.unit_offset)
                                : plain_.get() + at;
      job_.naming(record, [&] {
        job_.cipher->open(record, unit.offset + at - payload, {image + at, end - at}, to, stop_);
      });
      if (straight && to == plain_.get() + at)
        std::memcpy(places_.front() + (from - first.unit_offset), plain_.get() + from,
                    until - from);
      at = end;
    }
    return straight ? nullptr : plain_.get();
  }

  // `nbytes` from byte `skip` of a piece on, out of the image of its unit.
  void copy_runs(const Unit& unit, const Piece& piece, uint64_t skip, uint64_t nbytes,
                 const std::byte* image, std::byte* to) const {
    if (piece.is_one_run()) {
      std::memcpy(to, image + piece.unit_offset + skip, nbytes);
      return;
    }
    const uint64_t payload = job_.entry_of(job_.record_of(piece.target)).data_offset;
    for_each_run(job_.targets[piece.target].runs, piece.place + skip, nbytes,
                 [&](uint64_t offset, uint64_t place, uint64_t n) {
                   std::memcpy(to + (place - piece.place - skip),
                               image + (payload + offset - unit.offset), n);
                 });
  }

  // --- digest ---

  void digest(const Piece& piece, const std::byte* place) {
    const std::span<const std::byte> bytes(place, piece.nbytes);
    if (job_.plan.hash_steps[piece.target] == 0) {
      whole_.back().bytes = bytes;  // its header came right before it
      return;
    }
    if (piece.step == 0) job_.wait_for_header(piece.target, stop_);
    job_.digester->add(piece.target, piece.step, bytes);
    if (copier_) hashing_.add({piece.target, piece.step});
  }

  // --- place ---

  void send() {
    if (outgoing_.empty()) return;
    for (const Outgoing& piece : outgoing_) job_.wait_for_memory(piece.target, stop_);
    copier_->pass_fence(stop_);
    if (waits_) copy_to_slot();
    std::vector<Origin> origins;
    for (const Outgoing& piece : outgoing_) {
      job_.note(piece.unit, LoadJob::Progress::placed);
      std::byte* const address = job_.targets[piece.target].destination.data + piece.place;
      copies_.push_back({piece.at, address, piece.nbytes});
      if (piece.chunks > 0) describe(piece, address, origins);
    }
    outgoing_.clear();
    sealed_ = 0;
    const size_t chunks = origins.size();
    const auto refuse = [this, origins = std::move(origins)](size_t i) {
      const Origin& origin = origins[i];
      job_.naming(origin.target, [&] { job_.cipher->refuse(origin.target, origin.chunk); });
    };
    copier_->send_to_open(copies_, chunks, refuse, stop_);
    copies_.clear();
    buffer_ = {};  // is sent once
    // The next request takes longer than these copies, and other workers wait for slots meanwhile.
    if (waits_) free_slots();
  }

  void free_slots() {
    copier_->finish(stop_);
    copier_->give_back_unused();
  }

  void copy_to_slot() {
    const std::span<std::byte> slot = device::next_buffer(*copier_, stop_, [] {}, before_line_);
    for (const Outgoing& piece : outgoing_)
      std::memcpy(slot.data() + piece.at, buffer_.data() + piece.at, piece.nbytes);
  }

  // What the device opens of the buffer that is about to be sent.
  void describe(const Outgoing& piece, const std::byte* address, std::vector<Origin>& origins) {
    const uint64_t first = piece.place / job_.cipher->chunk_nbytes(piece.target);
    job_.cipher->describe(piece.target, piece.place, piece.nbytes, address,
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
    const format::IndexEntry& entry = job_.entry_of(record);
    const Piece piece{
        .target = record, .span_nbytes = entry.data_nbytes, .nbytes = entry.data_nbytes};
    Pages opened;
    if (copier_) opened = allocate_pages(entry.data_nbytes, PageUse::secret);
    const std::span<std::byte> bytes(copier_ ? opened.get() : destination_of(piece),
                                     entry.data_nbytes);
    {
      const MutexLock lock(job_.out_of_order);
      job_.source.read_at(entry.data_offset, io::Slice(bytes), stop_);
    }
    job_.naming(record, [&] { job_.cipher->open(record, 0, bytes, bytes.data(), stop_); });
    digest::StepsInBuffers hashing(job_.digester.get());  // behind the bytes
    if (job_.digester) {
      const uint32_t steps = job_.plan.hash_steps[record];
      const uint64_t share = ceil_div(bytes.size(), steps);
      hashing.begin_buffer();
      for (uint32_t step = 0; step < steps; ++step) {
        const uint64_t at = std::min<uint64_t>(step * share, bytes.size());
        job_.digester->add(record, step,
                           bytes.subspan(at, std::min<uint64_t>(share, bytes.size() - at)));
        hashing.add({record, step});
      }
    }
    if (copier_) {
      take_buffer();
      pack({}, piece, bytes.data());
      send();
    }
    if (job_.digester) hashing.release_oldest(stop_);
  }

  LoadJob& job_;
  const std::stop_token stop_;
  const std::function<void()> before_line_;
  size_t unit_ = 0;                         // at hand
  std::unique_ptr<device::Copier> copier_;  // set iff bound for a device
  bool waits_ = false;                      // units are read to memory of ours first
  bool prepared_ = false;                   // buffer_ is for the next unit
  std::span<std::byte> buffer_;             // for the unit at hand
  uint64_t used_ = 0;                       // of the buffer
  uint64_t unit_begin_ = 0;                 // in the buffer, of the image of a unit
  uint64_t in_buffer_ = 0;                  // bytes of the unit that have been read
  std::vector<std::byte*> places_;          // of the unit's pieces
  std::vector<io::Slice> slices_;
  std::vector<std::byte> headers_;
  Pages image_;  // of a unit as it is in the source; or what gaps are read to
  Pages plain_;  // chunks of parts
  std::vector<digest::RecordDigester::Whole> whole_;
  std::vector<uint32_t> straddling_;  // records whose header is in the unit
  std::vector<Outgoing> outgoing_;
  size_t chunks_ = 0;  // of the piece at hand that the device opens
  size_t sealed_ = 0;  // of outgoing_
  std::vector<device::CopyPiece> copies_;
  std::vector<ReadBuffer> read_buffers_;  // where the source waits
  size_t next_read_buffer_ = 0;
  digest::StepsInBuffers hashing_{job_.digester.get()};  // behind the buffers
};

}  // namespace

std::unique_ptr<LoadWorker> make_load_worker(LoadJob& job, const std::stop_token& stop,
                                             std::function<void()> before_line) {
  return std::make_unique<Worker>(job, stop, std::move(before_line));
}

}  // namespace tensorizer::load
