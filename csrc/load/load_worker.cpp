#include "load/load_worker.h"

#include <algorithm>
#include <cstring>

#include "core/checked_math.h"
#include "core/pages.h"
#include "crypto/secret_key.h"
#include "load/chunks_for_device.h"

namespace tensorizer::load {
namespace {

class Worker final : public UnitWorker {
 public:
  Worker(LoadJob& job, const std::stop_token& stop) : job_(job), stop_(stop) {
    const auto places = [](const Unit& unit) { return unit.placed_nbytes > 0; };
    if (job_.options.engine != nullptr && std::ranges::any_of(job_.plan.units, places))
      lane_ = job_.options.engine->make_lane(job_.cipher != nullptr);
  }

  bool help() override { return job_.digester && job_.digester->help(); }

  void prepare() override {
    if (lane_) take_buffer();
  }

  void process(size_t number) override {
    const Unit& unit = job_.plan.units[number];
    const std::span<const Piece> pieces = job_.plan.pieces_of(unit);
    give_places(unit, pieces);
    const std::byte* image = job_.in_order(number, stop_, [&] { return read(unit, pieces); });
    if (job_.options.parts && job_.cipher && unit.placed_nbytes > 0)
      image = open_chunks(unit, pieces, image);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.kind == Piece::Kind::header) {
        accept_header(piece.target, {image ? image + piece.unit_offset : places_[i], piece.nbytes});
      } else if (places_[i] == nullptr) {
        pack(unit, piece, image);
      } else if (open(unit, piece, image, places_[i])) {
        if (job_.digester) digest(piece, places_[i]);
        if (lane_)
          copies_.push_back({place_in_buffer(places_[i]), destination_of(piece), piece.nbytes});
      }
    }
    if (job_.digester) job_.digester->add_whole(whole_);
    whole_.clear();
    send();
    for (const uint32_t record : straddling_) load_by_itself(record);
    straddling_.clear();
    job_.nbytes_done.fetch_add(unit.placed_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    if (job_.digester) job_.digester->finish(stop_);
    if (lane_) lane_->finish(stop_);
  }

 private:
  std::byte* destination_of(const Piece& piece) const {
    return job_.targets[piece.target].destination.data + piece.place;
  }
  uint64_t place_in_buffer(const std::byte* place) const {
    return static_cast<uint64_t>(place - buffer_.data());
  }

  // A buffer goes on once its copies are done and its steps are hashed. Two or three are under way,
  // so that a worker has steps of several tensors to hash side by side.
  void take_buffer() {
    buffer_ = device::next_buffer(*lane_, stop_, [this] {
      if (job_.digester) hashing_.release_oldest(stop_);
    });
    if (job_.digester) hashing_.begin_buffer();
    used_ = 0;
  }

  // Where the bytes of each piece come together: at their destination on the host; in the lane's
  // buffer where they lie in the unit, or, of parts, one behind the other. Chunks of encrypted
  // parts may be longer than a buffer, and have no place before they are opened.
  void give_places(const Unit& unit, std::span<const Piece> pieces) {
    places_.clear();
    if (lane_ && !job_.options.parts) used_ = place_in_page(unit, buffer_.size());
    for (const Piece& piece : pieces) {
      std::byte* place = nullptr;
      if (piece.kind == Piece::Kind::header) {
        // read() knows.
      } else if (!lane_) {
        place = destination_of(piece);
      } else if (!job_.options.parts) {
        place = buffer_.data() + used_ + piece.unit_offset;
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
    const bool whole_to_device = lane_ && !job_.options.parts;
    if (whole_to_device && !job_.cipher && unit.placed_nbytes > 0) {
      const io::Slice into = buffer_.subspan(used_, unit.nbytes);
      job_.source.read_at(unit.offset, into, stop_);
      return into.data();
    }
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

  const std::byte* read_image(const Unit& unit) {
    if (const std::byte* there = job_.source.view(unit.offset, unit.nbytes)) return there;
    grow_image(unit.nbytes + kPageNbytes);
    const io::Slice into(image_.get() + place_in_page(unit, image_.get_deleter().nbytes),
                         unit.nbytes);
    job_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  // Where in a page the unit's image begins: where it does in the file, if the buffer has room for
  // that. A read past the page cache then needs no copy.
  static uint64_t place_in_page(const Unit& unit, uint64_t buffer_nbytes) noexcept {
    const uint64_t place = unit.offset % kPageNbytes;
    return place + unit.nbytes <= buffer_nbytes ? place : 0;
  }

  void grow_image(uint64_t nbytes) {
    if (nbytes > image_.get_deleter().nbytes) image_ = allocate_pages(nbytes);
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
      if (opens_on_device(piece, image + piece.unit_offset, place)) return true;
      job_.naming(piece.target, [&] {
        job_.cipher->open(piece.target, piece.place, {image + piece.unit_offset, piece.nbytes},
                          place, stop_);
      });
    } else if (image != nullptr && image + piece.unit_offset != place) {
      copy_runs(unit, piece, 0, piece.nbytes, image, place);
    }
    return true;
  }

  // Ciphertext goes to the device where the kernels can open it and nobody hashes the plaintext.
  bool opens_on_device(const Piece& piece, const std::byte* stored, std::byte* place) {
    if (!lane_ || job_.digester ||
        !sealed_.add(*lane_, *job_.cipher, piece.target, piece.place, piece.nbytes,
                     destination_of(piece)))
      return false;
    std::memcpy(place, stored, piece.nbytes);
    return true;
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
    const bool straight = !lane_ && pieces.size() == 1 && first.is_one_run();
    if (plain_.size() < unit.nbytes) plain_ = crypto::SecretBuffer(unit.nbytes);
    for (uint64_t at = 0; at < unit.nbytes;) {
      const uint64_t end = std::min(at + chunk_nbytes, unit.nbytes);
      const uint64_t from = std::max(at, first.unit_offset);
      const uint64_t until = std::min(end, first.unit_offset + first.span_nbytes);
      std::byte* const to = straight && from == at && until == end
                                ? places_.front() + (at - first.unit_offset)
                                : plain_.data() + at;
      job_.naming(record, [&] {
        job_.cipher->open(record, unit.offset + at - payload, {image + at, end - at}, to, stop_);
      });
      if (straight && to == plain_.data() + at)
        std::memcpy(places_.front() + (from - first.unit_offset), plain_.data() + from,
                    until - from);
      at = end;
    }
    return straight ? nullptr : plain_.data();
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
    if (lane_) hashing_.add({piece.target, piece.step});
  }

  // --- place ---

  void send() {
    if (!copies_.empty()) {
      const auto refuse = [this](uint32_t target, uint64_t chunk) {
        job_.naming(target, [&] { job_.cipher->refuse(target, chunk); });
      };
      sealed_.send(*lane_, copies_, refuse, stop_);
    }
    copies_.clear();
  }

  // From an image to as many buffers of the lane as it takes.
  void pack(const Unit& unit, const Piece& piece, const std::byte* image) {
    for (uint64_t done = 0; done < piece.nbytes;) {
      if (used_ == buffer_.size()) {
        send();
        take_buffer();
      }
      const uint64_t n = std::min<uint64_t>(piece.nbytes - done, buffer_.size() - used_);
      copy_runs(unit, piece, done, n, image, buffer_.data() + used_);
      copies_.push_back({used_, destination_of(piece) + done, n});
      used_ += n;
      done += n;
    }
  }

  // --- all four, of a tensor whose chunks straddle the pieces ---

  void load_by_itself(uint32_t record) {
    const format::IndexEntry& entry = job_.entry_of(record);
    const Piece piece{
        .target = record, .span_nbytes = entry.data_nbytes, .nbytes = entry.data_nbytes};
    crypto::SecretBuffer opened;
    if (lane_) opened = crypto::SecretBuffer(entry.data_nbytes);
    const std::span<std::byte> bytes(lane_ ? opened.data() : destination_of(piece),
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
    if (lane_) {
      take_buffer();
      pack({}, piece, bytes.data());
      send();
    }
    if (job_.digester) hashing.release_oldest(stop_);
  }

  LoadJob& job_;
  const std::stop_token stop_;
  std::unique_ptr<device::Lane> lane_;  // set iff bound for a device
  std::span<std::byte> buffer_;         // of the lane, for the unit at hand
  uint64_t used_ = 0;                   // of the buffer: by parts, or before the image of a unit
  std::vector<std::byte*> places_;      // of the unit's pieces
  std::vector<io::Slice> slices_;
  std::vector<std::byte> headers_;
  Pages image_{nullptr, {}};    // of a unit as it is in the source; or what gaps are read to
  crypto::SecretBuffer plain_;  // chunks of parts
  std::vector<digest::RecordDigester::Whole> whole_;
  std::vector<uint32_t> straddling_;  // records whose header is in the unit
  std::vector<device::CopyPiece> copies_;
  ChunksForDevice sealed_;                               // of copies_, what the device opens
  digest::StepsInBuffers hashing_{job_.digester.get()};  // behind the buffers
};

}  // namespace

std::unique_ptr<UnitWorker> make_load_worker(LoadJob& job, const std::stop_token& stop) {
  return std::make_unique<Worker>(job, stop);
}

}  // namespace tensorizer::load
