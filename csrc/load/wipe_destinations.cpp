#include "load/wipe_destinations.h"

#include <array>
#include <span>

#include "core/pages.h"
#include "core/run_units.h"
#include "core/wipe.h"
#include "load/session_plan.h"

namespace tensorizer::load {
namespace {

constexpr size_t kWipedAtOnce = 1024;  // destinations on a device, between two waits

// The bytes that a piece fills in its destination. The header of a tensor whose chunks straddle its
// pieces stands for all of them: the worker that has it fills the whole tensor.
device::DeviceRange filled_by(const LoadSession& session, const Piece& piece) noexcept {
  std::byte* const data = session.targets[piece.target].destination.data;
  if (piece.kind == Piece::Kind::payload) return {data + piece.place, piece.nbytes};
  if (!session.cipher || !session.cipher->straddles(piece.target)) return {nullptr, 0};
  return {data, session.entry_of(piece.target).data_nbytes};
}

// On a device, units that were begun are wiped, too, once a copy has been made: then the caller's
// work, which comes first, is over. Before that, only bytes that copies have begun to fill.
void wipe_on_device(LoadSession& session) noexcept {
  const bool all = session.has_placed() && session.options.engine->is_ready();
  std::array<device::DeviceRange, kWipedAtOnce> ranges;
  size_t count = 0;
  for (size_t i = 0; i < session.plan.units.size(); ++i) {
    const LoadSession::Progress progress = session.progress_of(i);
    if (progress != LoadSession::Progress::placed &&
        (!all || progress == LoadSession::Progress::none))
      continue;
    for (const Piece& piece : session.plan.pieces_of(session.plan.units[i])) {
      const device::DeviceRange range = filled_by(session, piece);
      if (range.nbytes == 0 || !session.has_memory(piece.target)) continue;
      ranges[count++] = range;
      if (count < ranges.size()) continue;
      session.options.engine->wipe(ranges);
      count = 0;
    }
  }
  if (count > 0) session.options.engine->wipe(std::span(ranges).first(count));
}

}  // namespace

// Wipes only bytes that a worker may have filled: touching the rest would take memory and time. It
// cannot be stopped, so it must be short: pages of ours are given back, not written.
void wipe_destinations(LoadSession& session) noexcept {
  if (!session.has_crypt_info() || session.plans_begun == 0) return;
  if (session.options.engine != nullptr) return wipe_on_device(session);
  const auto wipe_unit = [&](size_t i, const std::stop_token&) {
    if (session.progress_of(i) == LoadSession::Progress::none) return;
    for (const Piece& piece : session.plan.pieces_of(session.plan.units[i])) {
      const device::DeviceRange range = filled_by(session, piece);
      const std::span<std::byte> bytes(range.device_address, range.nbytes);
      if (!bytes.empty() && session.targets[piece.target].destination.owner) {
        clear_pages(bytes);
      } else {
        wipe(bytes.data(), bytes.size());  // the caller's, which may be shared memory
      }
    }
  };
  const size_t count = session.plan.units.size();
  try {
    for_each_index(count, workers_of_plan(session), {}, wipe_unit);
  } catch (...) {  // no memory for threads: here, then
    for (size_t i = 0; i < count; ++i) wipe_unit(i, {});
  }
}

}  // namespace tensorizer::load
