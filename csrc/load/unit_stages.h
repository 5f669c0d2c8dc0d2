// What workers of loads to host memory and to a device have in common. A unit goes through four
// stages:
//   read    its bytes come from the source: to their places, or as an image, in the order of the
//           file, to memory of the worker
//   open    headers become fields; chunks of the cipher are opened; runs of parts are copied
//   digest  steps go to the digester, whole records are digested
//   place   bytes that are not in their destination yet are copied there
// host_worker.cpp and device_worker.cpp say where each of them happens. Confined to one thread.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <stop_token>
#include <vector>

#include "core/checked_math.h"
#include "core/pages.h"
#include "load/load_session.h"

namespace tensorizer::load {

class UnitStages {
 protected:
  UnitStages(LoadSession& session, std::stop_token stop)
      : session_(session), stop_(std::move(stop)) {}
  ~UnitStages() = default;

  // --- read ---

  // The unit as it is in the source: where it is in memory already, or in memory of ours.
  const std::byte* read_image(const Unit& unit);

  // To places_, run by run, or by one read for each stretch between payloads that are in place.
  // Bytes between runs go to memory that is ignored, headers to a scratch buffer.
  void read_to_places(const Unit& unit, std::span<const Piece> pieces);

  // How far behind `used` the unit's image begins: where in a page it does in the file, if the
  // buffer has room for that. A read past the page cache then needs no copy.
  static uint64_t place_in_page(const Unit& unit, uint64_t used, uint64_t buffer_nbytes) noexcept {
    const uint64_t place = (unit.offset - used) % kPageNbytes;
    return used + place + unit.nbytes <= buffer_nbytes ? place : 0;
  }

  // --- open ---

  void accept_header(uint32_t record, std::span<const std::byte> bytes) {
    if (const auto start = session_.accept_header(record, bytes))
      whole_.push_back({record, *start, {}});
    if (session_.cipher && session_.cipher->straddles(record)) straddling_.push_back(record);
  }

  // Waits for the header of an encrypted tensor. False: the worker with it loads all of the tensor.
  bool can_open_alone(const Piece& piece) {
    if (session_.plan.hash_steps[piece.target] > 0) session_.wait_for_header(piece.target, stop_);
    return !session_.cipher->straddles(piece.target);
  }

  void open_chunks_of(uint32_t record, uint64_t offset, std::span<const std::byte> stored,
                      std::byte* plain) {
    session_.naming(record, [&] { session_.cipher->open(record, offset, stored, plain, stop_); });
  }

  // Opens the chunks that the unit's parts lie in, each once, to memory of ours: the image of what
  // is opened. Those that `straight`, the place of the only part, takes whole are opened there, and
  // so is the rest brought there; the result is null then.
  const std::byte* open_chunks(const Unit& unit, const Piece& first, const std::byte* image,
                               std::byte* straight);

  // `nbytes` from byte `skip` of a piece on, out of the image of its unit.
  void copy_runs(const Unit& unit, const Piece& piece, uint64_t skip, uint64_t nbytes,
                 const std::byte* image, std::byte* to) const;

  // --- digest ---

  // True: the bytes are a step, which stays in use until it is hashed.
  bool digest(const Piece& piece, const std::byte* place) {
    const std::span<const std::byte> bytes(place, piece.nbytes);
    if (session_.plan.hash_steps[piece.target] == 0) {
      whole_.back().bytes = bytes;  // its header came right before it
      return false;
    }
    if (piece.step == 0) session_.wait_for_header(piece.target, stop_);
    session_.digester->add(piece.target, piece.step, bytes);
    return true;
  }
  // Those whose header and payload are in the unit.
  void digest_whole_records() {
    if (session_.digester) session_.digester->add_whole(whole_);
    whole_.clear();
  }

  // --- read, open and digest, of a tensor whose chunks straddle the pieces ---

  // All of it, to `bytes`. Calls added(step) for each step that is given to the digester.
  template <class Added>
  void load_straddling(uint32_t record, std::span<std::byte> bytes, Added&& added) {
    {
      const MutexLock lock(session_.out_of_order);
      session_.source.read_at(session_.entry_of(record).data_offset, io::Buffer(bytes), stop_);
    }
    open_chunks_of(record, 0, bytes, bytes.data());
    if (!session_.digester) return;
    const uint32_t steps = session_.plan.hash_steps[record];
    const uint64_t share = ceil_div(bytes.size(), steps);
    for (uint32_t step = 0; step < steps; ++step) {
      const uint64_t at = std::min<uint64_t>(step * share, bytes.size());
      session_.digester->add(record, step,
                             bytes.subspan(at, std::min<uint64_t>(share, bytes.size() - at)));
      added(step);
    }
  }

  LoadSession& session_;
  const std::stop_token stop_;
  std::vector<std::byte*> places_;    // of the unit's pieces
  std::vector<uint32_t> straddling_;  // records whose header is in the unit

 private:
  template <class Fn>
  void for_each_stretch(const Unit& unit, std::span<const Piece> pieces, Fn&& fn) const;
  void read_scattered(const Unit& unit, std::span<const Piece> pieces);
  void give_room(const Unit& unit, std::span<const Piece> pieces);
  void grow_image(uint64_t nbytes) {
    if (nbytes > bytes_of(image_).size()) image_ = allocate_pages(nbytes);
  }

  std::vector<io::Buffer> buffers_;
  std::vector<std::byte> headers_;
  Pages image_;  // of a unit as it is in the source; or what gaps are read to
  Pages plain_;  // chunks of parts
  std::vector<digest::RecordDigester::Whole> whole_;
};

}  // namespace tensorizer::load
