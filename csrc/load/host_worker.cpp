#include "load/host_worker.h"

#include "load/unit_stages.h"

namespace tensorizer::load {
namespace {

class HostWorker final : public UnitWorker, private UnitStages {
 public:
  HostWorker(LoadSession& session, std::span<const NumberedUnit> order, const std::stop_token& stop)
      : UnitStages(session, stop), order_(order) {}

  bool help() override { return session_.digester && session_.digester->help(); }

  void process(size_t position) override {
    const size_t number = order_.empty() ? position : order_[position].unit;
    const Unit& unit = session_.plan.units[number];
    const std::span<const Piece> pieces = session_.plan.pieces_of(unit);
    session_.note(number, LoadSession::Progress::begun);
    give_places(pieces);
    const std::byte* image = session_.in_order(number, stop_, [&] { return read(unit, pieces); });
    if (session_.options.parts && session_.cipher && unit.placed_nbytes > 0)
      image = open_chunks_of_parts(unit, pieces, image);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.kind == Piece::Kind::header) {
        accept_header(piece.target, {image ? image + piece.unit_offset : places_[i], piece.nbytes});
      } else if (open(unit, piece, image, places_[i]) && session_.digester) {
        digest(piece, places_[i]);
      }
    }
    digest_whole_records();
    for (const uint32_t record : straddling_)
      load_straddling(record,
                      {session_.targets[record].destination.data,
                       static_cast<size_t>(session_.entry_of(record).data_nbytes)},
                      [](uint32_t) {});
    straddling_.clear();
    session_.nbytes_done.fetch_add(unit.placed_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    if (session_.digester) session_.digester->finish(stop_);
  }

 private:
  // The destinations; read_to_places() has places for headers.
  void give_places(std::span<const Piece> pieces) {
    places_.clear();
    for (const Piece& piece : pieces)
      places_.push_back(piece.kind == Piece::Kind::header
                            ? nullptr
                            : session_.targets[piece.target].destination.data + piece.place);
  }

  // The image of the unit; null where its bytes are in their places.
  const std::byte* read(const Unit& unit, std::span<const Piece> pieces) {
    if (session_.cipher || unit.read == Unit::Read::image) return read_image(unit);
    read_to_places(unit, pieces);
    return nullptr;
  }

  const std::byte* open_chunks_of_parts(const Unit& unit, std::span<const Piece> pieces,
                                        const std::byte* image) {
    const Piece& first = pieces.front();
    const bool straight = pieces.size() == 1 && first.is_one_run();
    return open_chunks(unit, first, image, straight ? places_.front() : nullptr);
  }

  // Gets the bytes of a piece to their place. False: the worker with its header does that.
  bool open(const Unit& unit, const Piece& piece, const std::byte* image, std::byte* place) {
    if (session_.cipher && !session_.options.parts) {
      if (!can_open_alone(piece)) return false;
      open_chunks_of(piece.target, piece.place, {image + piece.unit_offset, piece.nbytes}, place);
    } else if (image != nullptr && image + piece.unit_offset != place) {
      copy_runs(unit, piece, 0, piece.nbytes, image, place);
    }
    return true;
  }

  const std::span<const NumberedUnit> order_;
};

}  // namespace

std::unique_ptr<UnitWorker> make_host_worker(LoadSession& session,
                                             std::span<const NumberedUnit> order,
                                             const std::stop_token& stop) {
  return std::make_unique<HostWorker>(session, order, stop);
}

}  // namespace tensorizer::load
