#include "load/unit_stages.h"

namespace tensorizer::load {

const std::byte* UnitStages::read_image(const Unit& unit) {
  if (const std::byte* there = session_.source.view(unit.offset, unit.nbytes)) return there;
  grow_image(unit.nbytes + kPageNbytes);
  const io::Buffer into(image_.get() + place_in_page(unit, 0, bytes_of(image_).size()),
                        unit.nbytes);
  session_.source.read_at(unit.offset, into, stop_);
  return into.data();
}

void UnitStages::read_to_places(const Unit& unit, std::span<const Piece> pieces) {
  if (unit.read != Unit::Read::separate_reads) return read_scattered(unit, pieces);
  for_each_stretch(unit, pieces, [&](size_t, uint64_t begin, std::byte* to, uint64_t nbytes) {
    session_.source.read_at(begin, io::Buffer(to, nbytes), stop_);
  });
}

// Calls fn(piece, begin, to, nbytes) for the runs of all pieces, in the order of the source:
// `begin` absolute, `to` in the piece's place.
template <class Fn>
void UnitStages::for_each_stretch(const Unit& unit, std::span<const Piece> pieces, Fn&& fn) const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.is_one_run()) {
      fn(i, unit.offset + piece.unit_offset, places_[i], piece.nbytes);
      continue;
    }
    const uint64_t payload = session_.entry_of(session_.record_of(piece.target)).data_offset;
    for_each_run(session_.targets[piece.target].runs, piece.place, piece.nbytes,
                 [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                   fn(i, payload + offset, places_[i] + (place - piece.place), nbytes);
                 });
  }
}

void UnitStages::read_scattered(const Unit& unit, std::span<const Piece> pieces) {
  give_room(unit, pieces);
  uint64_t begin = 0, end = 0;  // of what the buffers cover
  const auto flush = [&] {
    if (!buffers_.empty()) session_.source.read_at(begin, buffers_, stop_);
    buffers_.clear();
  };
  for_each_stretch(unit, pieces, [&](size_t i, uint64_t at, std::byte* to, uint64_t nbytes) {
    if (pieces[i].kind == Piece::Kind::payload && session_.targets[pieces[i].target].in_place)
      return flush();
    if (buffers_.empty()) {
      begin = at;
    } else if (at > end) {
      buffers_.emplace_back(image_.get(), at - end);
    }
    buffers_.emplace_back(to, nbytes);
    end = at + nbytes;
  });
  flush();
}

// Places for headers, and memory for the longest gap, before any buffer points there.
void UnitStages::give_room(const Unit& unit, std::span<const Piece> pieces) {
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

const std::byte* UnitStages::open_chunks(const Unit& unit, const Piece& first,
                                         const std::byte* image, std::byte* straight) {
  const uint32_t record = session_.record_of(first.target);
  const uint64_t payload = session_.entry_of(record).data_offset;
  const uint64_t chunk_nbytes = session_.cipher->chunk_nbytes(record);
  if (bytes_of(plain_).size() < unit.nbytes) plain_ = allocate_pages(unit.nbytes, PageUse::secret);
  for (uint64_t at = 0; at < unit.nbytes;) {
    const uint64_t end = std::min(at + chunk_nbytes, unit.nbytes);
    const uint64_t from = std::max(at, first.unit_offset);
    const uint64_t until = std::min(end, first.unit_offset + first.span_nbytes);
    std::byte* const to = straight && from == at && until == end
                              ? straight + (at - first.unit_offset)
                              : plain_.get() + at;
    open_chunks_of(record, unit.offset + at - payload, {image + at, end - at}, to);
    if (straight && to == plain_.get() + at)
      std::memcpy(straight + (from - first.unit_offset), plain_.get() + from, until - from);
    at = end;
  }
  return straight ? nullptr : plain_.get();
}

void UnitStages::copy_runs(const Unit& unit, const Piece& piece, uint64_t skip, uint64_t nbytes,
                           const std::byte* image, std::byte* to) const {
  if (piece.is_one_run()) {
    std::memcpy(to, image + piece.unit_offset + skip, nbytes);
    return;
  }
  const uint64_t payload = session_.entry_of(session_.record_of(piece.target)).data_offset;
  for_each_run(session_.targets[piece.target].runs, piece.place + skip, nbytes,
               [&](uint64_t offset, uint64_t place, uint64_t n) {
                 std::memcpy(to + (place - piece.place - skip),
                             image + (payload + offset - unit.offset), n);
               });
}

}  // namespace tensorizer::load
