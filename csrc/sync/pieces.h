// Work on several tensors in pieces: whichever threads there are take the pieces of all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <vector>

#include "core/run_units.h"

namespace tensorizer::sync {

struct PieceOf {
  size_t tensor;
  size_t piece;  // of that tensor
};

// Calls work(piece, i), i being its position in `pieces`, on at most `workers` threads.
inline void for_pieces(const std::vector<PieceOf>& pieces, unsigned workers,
                       const std::stop_token& stop,
                       const std::function<void(const PieceOf&, size_t)>& work) {
  for_each_index(pieces.size(), workers, stop,
                 [&](size_t i, const std::stop_token&) { work(pieces[i], i); });
}

// The pieces of `count` tensors, of which tensor i has pieces_of(i).
template <class PiecesOf>
std::vector<PieceOf> all_pieces(size_t count, const PiecesOf& pieces_of) {
  std::vector<PieceOf> pieces;
  for (size_t tensor = 0; tensor < count; ++tensor) {
    const size_t n = pieces_of(tensor);
    for (size_t piece = 0; piece < n; ++piece) pieces.push_back({tensor, piece});
  }
  return pieces;
}

}  // namespace tensorizer::sync
