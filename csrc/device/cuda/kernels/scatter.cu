// The kernel behind kernels/scatter.h. One block copies one piece at a time, in the widest words
// that source and destination allow together, reading the pinned slot across the bus.
#include "device/cuda/kernels/scatter.h"

namespace {

using tensorizer::device::cuda::ScatterPiece;

// Copies whole words of type Word between two pointers that are equally far from a multiple of its
// size.
template <class Word>
__device__ void copy_words(unsigned char* destination, const unsigned char* source,
                           uint64_t nbytes) {
  constexpr uint64_t kWord = sizeof(Word);
  const uint64_t misaligned = reinterpret_cast<uint64_t>(destination) % kWord;
  uint64_t head = misaligned ? kWord - misaligned : 0;
  if (head > nbytes) head = nbytes;
  const uint64_t words = (nbytes - head) / kWord;
  const uint64_t tail_start = head + words * kWord;
  for (uint64_t i = threadIdx.x; i < head; i += blockDim.x) destination[i] = source[i];
  auto* to = reinterpret_cast<Word*>(destination + head);
  const auto* from = reinterpret_cast<const Word*>(source + head);
  for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
  for (uint64_t i = tail_start + threadIdx.x; i < nbytes; i += blockDim.x)
    destination[i] = source[i];
}

}  // namespace

extern "C" __global__ void tensorizer_scatter(const ScatterPiece* pieces, uint32_t count,
                                              const unsigned char* slot) {
  for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    const ScatterPiece piece = pieces[index];
    auto* destination = reinterpret_cast<unsigned char*>(piece.destination);
    const unsigned char* source = slot + piece.source_offset;
    const uint64_t skew = piece.destination - reinterpret_cast<uint64_t>(source);
    if (skew % 16 == 0) {
      copy_words<uint4>(destination, source, piece.nbytes);
    } else if (skew % 8 == 0) {
      copy_words<uint64_t>(destination, source, piece.nbytes);
    } else if (skew % 4 == 0) {
      copy_words<uint32_t>(destination, source, piece.nbytes);
    } else {
      copy_words<unsigned char>(destination, source, piece.nbytes);
    }
  }
}
